"""Generation: prompts go in chunk by chunk, tokens come out one step at a time, each row until it ends.

Keys and values lie in a `nsa.PagedCache`: rows differ in length, equal prompts share their pages, and a row that has
ended gives its own back.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

import torch
from torch import Tensor

from nsa.graphed_step import GraphedStep
from nsa.layer import a_size
from nsa.model import DecoderLM
from nsa.paged.cache import PagedCache, PagedRows
from nsa.sampling import NOT_FINITE, Sampling, draw

__all__ = ["generate", "with_progress"]

PREFILL_CHUNK = 4096
"""Tokens of a prompt per call unless told otherwise."""

Step = list[int | None]
"""The new token of each row, or None where the row has ended."""


def generate(
    model: DecoderLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    cuda_graph: bool = False,
) -> Iterator[Step]:
    """Continue each prompt: an iterator of steps, each with one token per prompt.

    Args:
        model: in NSA's attention, on any device.
        prompts: tokens of each row, at least one; they may differ in length.
        max_new_tokens: after which every row ends.
        sampling: `nsa.sampling.Sampling()` unless given. What a row draws depends on its seed and its tokens alone.
        eos: the token with which a row ends; it is the last that the row yields.
        prefill_chunk: tokens of a prompt per call, which bounds the memory of the prefill.
        cuda_graph: replay one CUDA graph per step, captured anew when a row ends; for the triton backend.

    Raises ValueError or TypeError naming the argument; ValueError where the logits are not finite.
    """
    if not isinstance(model, DecoderLM):
        raise TypeError(f"model must be a DecoderLM; got {type(model).__name__}")
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling; got {type(sampling).__name__}")
    texts = _prompts(prompts, model.config.vocab_size)
    if eos is not None and (isinstance(eos, bool) or not isinstance(eos, int)):
        raise TypeError(f"eos must be an int or None; got {type(eos).__name__}")
    device = model.embedding.weight.device
    if cuda_graph and device.type != "cuda":
        raise ValueError(f"cuda_graph must be False where the model is not on an NVIDIA GPU; it is on {device}")
    layers, new = model.attentions(), a_size("max_new_tokens", max_new_tokens)
    chunk = a_size("prefill_chunk", prefill_chunk)
    pages = sum(PagedCache.pages(layers[0], len(text) + new, per_call=chunk) for text in texts)
    cache = PagedCache(layers, num_pages=pages, max_tokens=max(map(len, texts)) + new)
    return _steps(model, cache, texts, new, sampling, eos, chunk, cuda_graph)


def with_progress(
    steps: Iterable[Step], max_new_tokens: int, to: TextIO | None = None, *, only_last: bool = False
) -> Iterator[Step]:
    """The same steps, with a line on `to` (stderr) that says how far they are: one that is rewritten on a terminal,
    a new one every ten seconds elsewhere, and a last one.

    `only_last` leaves out all but the last, which begins on a line of its own: for a text that is written to the same
    terminal or file as it comes.
    """
    to = sys.stderr if to is None else to
    begin = told = time.monotonic()
    tokens, pause_s, end = 0, (0.2 if to.isatty() else 10.0), ("" if to.isatty() else "\n")
    start = "\n" if only_last else "\r" if to.isatty() else ""

    def tell(done: int, ending: str) -> None:
        rate = tokens / max(time.monotonic() - begin, 1e-9)
        print(f"{start}step {done} of {max_new_tokens}, {rate:.1f} tokens/s", end=ending, file=to, flush=True)

    done = 0
    for done, step in enumerate(steps, 1):
        tokens += sum(token is not None for token in step)
        if not only_last and time.monotonic() - told >= pause_s:
            told = time.monotonic()
            tell(done, end)
        yield step
    tell(done, "\n")


def _steps(
    model: DecoderLM,
    cache: PagedCache,
    texts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    eos: int | None,
    prefill_chunk: int,
    cuda_graph: bool,
) -> Iterator[Step]:
    uniform = _uniform(len(texts), max_new_tokens, sampling.seed, model.embedding.weight.device)  # [new, rows]
    sequences, logits = _prefill(model, cache, texts, prefill_chunk)
    alive = list(range(len(texts)))
    own = uniform
    step: Callable[[Tensor], Tensor] | None = None
    for number in range(max_new_tokens):
        tokens = draw(logits, sampling, own[number])
        found = dict(zip(alive, tokens.tolist(), strict=True))
        if NOT_FINITE in found.values():
            row = next(row for row, token in found.items() if token == NOT_FINITE)
            raise ValueError(f"logits of row {row} are not finite at its new token {number}; nothing can be drawn")
        yield [found.get(row) for row in range(len(texts))]
        going = [i for i, row in enumerate(alive) if found[row] != eos]
        if not going or number + 1 == max_new_tokens:
            return
        if len(going) < len(alive):
            for row in alive:
                if found[row] == eos:
                    cache.free(sequences[row])
            tokens, alive = tokens[going], [alive[i] for i in going]
            own, step = uniform[:, alive], None
        step = step or _step(model, cache.rows([sequences[row] for row in alive]), cuda_graph)
        with torch.inference_mode():
            logits = step(tokens[:, None])[:, -1]


def _step(model: DecoderLM, rows: PagedRows, cuda_graph: bool) -> Callable[[Tensor], Tensor]:
    """From new tokens [B, 1] to the logits behind them [B, 1, vocab_size]."""
    return GraphedStep(model, rows) if cuda_graph else lambda tokens: model(tokens, rows)


@torch.inference_mode()
def _prefill(
    model: DecoderLM, cache: PagedCache, texts: list[list[int]], prefill_chunk: int
) -> tuple[list[int], Tensor]:
    """The sequence of each prompt, and the logits behind it [B, vocab_size]; equal prompts are computed once."""
    device, known = model.embedding.weight.device, dict[tuple[int, ...], tuple[int, Tensor]]()
    sequences, logits = [], []
    for text in texts:
        if tuple(text) in known:
            first, last = known[tuple(text)]
            sequence = cache.fork(first)
        else:
            sequence = cache.new()
            rows = cache.rows([sequence])
            for chunk in torch.tensor([text], device=device).split(prefill_chunk, 1):
                last = model(chunk, rows)[0, -1]
            known[tuple(text)] = sequence, last
        sequences.append(sequence)
        logits.append(last)
    return sequences, torch.stack(logits)


def _uniform(rows: int, steps: int, seed: int, device: torch.device) -> Tensor:
    """float64 [steps, rows] in [0, 1), each row from its own seed, alike on every device."""
    sources = [random.Random(seed + row) for row in range(rows)]
    drawn = [[source.random() for _ in range(steps)] for source in sources]
    return torch.tensor(drawn, dtype=torch.float64, device=device).T.contiguous()


def _prompts(prompts: object, vocab_size: int) -> list[list[int]]:
    """Lists of tokens, or ValueError or TypeError."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)) or not prompts:
        raise TypeError(f"prompts must be a sequence of sequences of tokens, at least one; got {prompts!r:.60}")
    texts = []
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompts[{row}] must be a sequence of at least one token; got {prompt!r:.60}")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(f"prompts[{row}] must hold ints between 0 and {vocab_size - 1}; got {token!r}")
        texts.append(list(prompt))
    return texts

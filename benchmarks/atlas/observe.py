"""A trained model reads held-out text, then writes on: what it selected becomes the curves of one length.

The model is watched through its cache, which every layer hands its queries and keys to; nothing in the product is
replaced. A sequence is read in one call, one at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.atlas import choices, measures
from benchmarks.atlas.choices import Choices
from benchmarks.atlas.record import LAGS, UNIONS, HeadCurves, LengthCurves, Sample
from nsa.attention import nsa_attention
from nsa.cache import KVCache
from nsa.config import NSAConfig
from nsa.geometry import num_selection_blocks
from nsa.layer import NativeSparseAttention, PerBranch
from nsa.loss import summed_cross_entropy
from nsa.model import DecoderLM, ModelCache
from nsa.train.data.packing import Batch

SCORED_ROWS = 256
"""Of a sequence: rows whose scores are computed again for `mass` and `sink_share`, evenly spaced."""
STEPS = 64
"""Tokens that the model writes on after each of the first sequences."""
WRITTEN_ON = 4
"""Sequences of a length, at most: a step takes the host as long as a thousand rows take the GPU."""
SAMPLED_LAYERS, SAMPLED_HEADS, SAMPLED_ROWS = 4, 2, 64
"""Whose choices are kept as they are."""
_DIGITS = 5


@dataclass(frozen=True)
class Choice:
    """What one layer did with one call, of one sequence."""

    block_indices: Tensor
    """int32 [S, Hkv, n]."""
    q: Tensor
    """[S, Hq, Dk]."""
    k_cmp: Tensor
    """[slots, Hkv, Dk]."""
    gates: Tensor
    """[S, Hq, 3]."""


class RecordingCache(KVCache):
    """A cache that tells what was chosen. One sequence (batch_size 1)."""

    def __init__(self, layer: NativeSparseAttention, *, max_tokens: int) -> None:
        super().__init__(layer, batch_size=1, max_tokens=max_tokens)
        self.observer: Callable[[Choice], None] | None = None

    def attend(self, q: Tensor, k: PerBranch, v: PerBranch, gates: Tensor) -> Tensor:
        """As `KVCache.attend`; `observer` is called with the choice."""
        keys, values, k_cmp, v_cmp = self.stage(k, v)
        o, aux = nsa_attention(
            q,
            (None, *keys[1:]),
            (None, *values[1:]),
            gates,
            self.layer.config,
            k_compressed=k_cmp,
            v_compressed=v_cmp,
            backend=self.layer.backend,
            return_aux=True,
        )
        if self.observer is not None:
            self.observer(Choice(aux.block_indices[0], q[0], k_cmp[0], gates[0]))
        return o


@dataclass(frozen=True)
class Measured:
    """One length."""

    curves: LengthCurves
    samples: tuple[Sample, ...]
    loss: float
    """Of the sequences that were read, nats per token."""
    choices: Choices | None = None
    """Of the first sequence, all of its rows; None where not even one head fits in a file."""


def measure(lm: DecoderLM, sequences: Iterable[Batch], *, seed: int, steps: int = STEPS) -> Measured:
    """The curves of one length, means over the sequences: tokens [1, S] each, of one length, on the model's device.

    Raises ValueError where a sequence is so short that rows of its later half have no choice, or the figures of the
    largest lag and tile no rows.
    """
    generator = torch.Generator(next(lm.parameters()).device).manual_seed(seed)
    found: list[_Sequence] = []
    nats = targets = 0.0
    for batch in sequences:
        check_length(batch.tokens.shape[1], lm.config.nsa, steps)
        one = _Sequence(lm, batch, generator, steps if len(found) < WRITTEN_ON else 0, keep=not found)
        found.append(one)
        nats, targets = nats + one.nats, targets + batch.num_targets
    if not found:
        raise ValueError("sequences must hold at least one")
    curves = _curves(found, lm.config.nsa)
    return Measured(curves, found[0].samples, nats / targets, _choices(found[0].indices, curves))


def check_length(seq_len: int, config: NSAConfig, steps: int = STEPS) -> None:
    """ValueError unless every row of the later half has more blocks to choose from than it may choose."""
    forced = config.init_blocks + config.local_blocks
    if config.n_sel == forced:
        raise ValueError(f"n_sel must be above the {forced} forced blocks: there is no choice to measure")
    least = max(2 * (config.n_sel + 1) * config.l_sel, 4 * max(*LAGS, *UNIONS), 2 * steps)
    if seq_len < least:
        raise ValueError(f"seq_len must be at least {least} tokens for this model; got {seq_len}")


class _Sequence:
    """The figures of one sequence: name -> float64 [layers, H, ...] on the CPU."""

    def __init__(self, lm: DecoderLM, batch: Batch, generator: torch.Generator, steps: int, *, keep: bool) -> None:
        self._config, self._steps = lm.config.nsa, steps
        self.seq_len = batch.tokens.shape[1]
        self._layers: list[dict[str, Tensor]] = []
        self._earlier: Tensor | None = None
        self.layers_jaccard: list[float] = []
        self.samples: tuple[Sample, ...] = ()
        self.indices: list[NDArray[np.int16]] = []
        self._keep = keep
        self._kept = _spread(lm.config.n_layers, SAMPLED_LAYERS) if keep else []
        caches = [RecordingCache(layer, max_tokens=self.seq_len) for layer in lm.attentions()]
        cache = ModelCache(list(caches))
        for cached in caches:
            cached.observer = self._read
        logits = lm(batch.tokens, cache)
        self.nats = float(summed_cross_entropy(logits, batch.targets))
        if steps:
            self._write_on(lm, cache, caches, batch.tokens, logits, generator)
        self.figures = {name: torch.stack([layer[name] for layer in self._layers]) for name in self._layers[0]}

    def _read(self, choice: Choice) -> None:
        """One layer's rows of the later half."""
        config, device = self._config, choice.q.device
        begin = self.seq_len // 2
        indices = choice.block_indices[begin:]
        positions = torch.arange(begin, self.seq_len, device=device)
        free = measures.without_forced(indices, positions, config)
        blocks = num_selection_blocks(self.seq_len, config)
        scored = torch.linspace(0, len(positions) - 1, min(SCORED_ROWS, len(positions)), device=device).long()
        score = measures.scores(
            choice.q[begin:][scored], choice.k_cmp, positions[scored], self.seq_len, config
        )  # [rows, H, blocks]
        mass, sink = measures.held(score, indices[scored])
        kv_heads = indices.shape[1]
        figures = {
            "jaccard": torch.stack([measures.at_lag(indices, lag) for lag in LAGS], -1),
            "jaccard_free": torch.stack([measures.at_lag(free, lag) for lag in LAGS], -1),
            "union": torch.stack([measures.union_size(indices, count) for count in UNIONS], -1),
            "distance": measures.distances(free, positions, config.l_sel, blocks),
            "popularity": measures.popularity(free, positions, config),
            "mass": mass,
            "sink_share": sink,
            "gates": choice.gates[begin:].double().unflatten(1, (kv_heads, -1)).mean((0, 2)),
        }
        if self._keep:
            self.indices.append(choice.block_indices.short().cpu().numpy())
        number = len(self._layers)
        self._layers.append({name: value.cpu() for name, value in figures.items()})
        if self._earlier is not None:
            self.layers_jaccard.append(measures.most_alike(self._earlier, indices))
        self._earlier = indices
        if number in self._kept:
            self._sample(number, begin, indices[:SAMPLED_ROWS], decode=False)

    def _write_on(
        self, lm: DecoderLM, cache: ModelCache, caches: list[RecordingCache], tokens: Tensor, logits: Tensor,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        """Decode `steps` tokens of the model's own, drawn at temperature 1, in place of the last ones of the text."""
        first = self.seq_len - self._steps
        cache.truncate(first)
        chosen: list[list[Tensor]] = [[] for _ in caches]
        for cached, rows in zip(caches, chosen, strict=True):
            cached.observer = lambda choice, rows=rows: rows.append(choice.block_indices)
        last = logits[:, first - 1]
        for _ in range(self._steps):
            token = torch.multinomial(last.softmax(-1), 1, generator=generator)
            last = lm(token, cache)[:, -1]
        for number, rows in enumerate(chosen):
            decoded = torch.cat(rows)  # [steps, H, n]
            self._layers[number]["step_jaccard"] = measures.at_lag(decoded, 1).cpu()
            if number in self._kept:
                self._sample(number, first, decoded, decode=True)

    def _sample(self, layer: int, first_row: int, indices: Tensor, *, decode: bool) -> None:
        self.samples += tuple(
            Sample(self.seq_len, layer, head, first_row, decode, tuple(map(tuple, indices[:, head].tolist())))
            for head in _spread(indices.shape[1], SAMPLED_HEADS)
        )


def _spread(count: int, most: int) -> list[int]:
    """At most so many of `count` numbers, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _curves(found: list[_Sequence], config: NSAConfig) -> LengthCurves:
    """Means over sequences of one length."""
    lengths = {one.seq_len for one in found}
    if len(lengths) > 1:
        raise ValueError(f"sequences must be of one length; got {sorted(lengths)}")
    known = {name: [one.figures[name] for one in found if name in one.figures] for name in found[0].figures}
    mean = {name: torch.stack(values).mean(0) for name, values in known.items()}
    layers, kv_heads = mean["mass"].shape
    edges = measures.distance_edges(num_selection_blocks(found[0].seq_len, config))
    heads = []
    for layer in range(layers):
        for head in range(kv_heads):
            own = {name: _rounded(value[layer, head]) for name, value in mean.items()}
            heads.append(
                HeadCurves(
                    layer=layer,
                    kv_head=head,
                    jaccard=dict(zip(map(str, LAGS), own["jaccard"], strict=True)),
                    jaccard_free=dict(zip(map(str, LAGS), own["jaccard_free"], strict=True)),
                    union=dict(zip(map(str, UNIONS), own["union"], strict=True)),
                    distance=tuple(zip(map(float, edges), own["distance"], strict=True)),
                    gates=tuple(own["gates"]),
                    **{name: own[name][0] for name in ("sink_share", "popularity", "mass", "step_jaccard")},
                )
            )
    between = [sum(pair) / len(found) for pair in zip(*(one.layers_jaccard for one in found), strict=True)]
    forced = config.init_blocks + config.local_blocks
    return LengthCurves(
        found[0].seq_len, config.n_sel, forced, config.l_sel, tuple(heads), tuple(round(x, _DIGITS) for x in between)
    )


def _choices(indices: list[NDArray[np.int16]], curves: LengthCurves) -> Choices | None:
    """The heads nearest to the median of how alike neighbouring rows choose, as many as a file holds."""
    median = statistics.median(head.jaccard["1"] for head in curves.heads)
    nearest = sorted(curves.heads, key=lambda head: abs(head.jaccard["1"] - median))
    return choices.of_heads(indices, [(head.layer, head.kv_head) for head in nearest], curves.l_sel)


def _rounded(value: Tensor) -> list[float]:
    return [round(x, _DIGITS) for x in value.flatten().tolist()]

"""A needle beyond the window: a small model learns to find one, and without its selected branch it does not.

`python -m nsa.train.needle [--steps N] [--out FOLDER]` trains it (some minutes on one core) and draws the figure.

A text is a row of pairs (key, value), each one token; then keys are asked for, and the answer is the value that stood
with that key. A needle's key stands once, further back than the window; the other pairs repeat the other keys. The
window does not reach a needle, and a compressed block is the mean of several pairs; to read one value, the block must
be found through its compressed key and read token by token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nsa.config import BRANCHES, NSAConfig
from nsa.io import atomic_write, cannot_write, to_json
from nsa.layer import NativeSparseAttention
from nsa.loss import IGNORED
from nsa.model import DecoderLM, ModelConfig
from nsa.train.data.packing import Batch
from nsa.train.distributed import Ranks
from nsa.train.settings import Data, Runtime, Settings, Train
from nsa.train.trainer import Trainer

KEYS, VALUES = 8, 4
NEEDLES = KEYS // 2
TEXT, QUESTIONS = 48, 16
"""Tokens of the text, and of the questions after it."""
CHANCE = 1 / VALUES
_ASK = KEYS * VALUES
"""The first token that asks for a key; the ones below are pairs, key · VALUES + value."""
CONFIG = NSAConfig(l=8, d=4, l_sel=8, n_sel=3, w=8, init_blocks=0, local_blocks=1)
STEPS = 2200


@dataclass(frozen=True)
class Questions:
    """Texts with their questions."""

    batch: Batch
    """Tokens [B, TEXT + QUESTIONS]; the targets are the answers."""
    answers: Tensor
    """int64 [B, QUESTIONS]."""
    distances: Tensor
    """int64 [B, QUESTIONS]: tokens from the needle to the question, all of them beyond the window."""


def settings(steps: int = STEPS) -> Settings:
    """The run."""
    model = ModelConfig(
        dim=64,
        n_layers=1,
        n_heads=4,
        num_kv_heads=1,
        d_k=32,
        d_v=32,
        nsa=CONFIG,
        vocab_size=_ASK + KEYS,
        tied_head=False,
    )
    train = Train(steps=steps, seq_len=TEXT + QUESTIONS, batch_size=32, lr=3e-3, warmup_steps=50, weight_decay=0.0)
    return Settings("needle", model, Runtime(device="cpu"), train, Data(packing=False))


def draw(batch_size: int, generator: torch.Generator) -> Questions:
    """Random texts."""
    value = torch.randint(VALUES, (batch_size, KEYS), generator=generator)
    order = torch.rand(batch_size, KEYS, generator=generator).argsort(1)
    needles, others = order[:, :NEEDLES], order[:, NEEDLES:]
    keys = others.gather(1, torch.randint(NEEDLES, (batch_size, TEXT), generator=generator))
    places = torch.rand(batch_size, TEXT - CONFIG.w, generator=generator).argsort(1)[:, :NEEDLES]
    keys.scatter_(1, places, needles)
    asked = torch.randint(NEEDLES, (batch_size, QUESTIONS), generator=generator)
    key = needles.gather(1, asked)
    answers = value.gather(1, key)
    tokens = torch.cat([keys * VALUES + value.gather(1, keys), _ASK + key], 1)
    targets = torch.cat([torch.full((batch_size, TEXT), IGNORED), answers], 1)
    distances = TEXT + torch.arange(QUESTIONS) - places.gather(1, asked)
    return Questions(Batch(tokens, targets, answers.numel()), answers, distances)


def trained(steps: int = STEPS, say: Callable[[str], None] | None = None, *, without: str | None = None) -> DecoderLM:
    """The model; `without` names a branch that it never had."""
    trainer = Trainer(settings(steps), torch.device("cpu"), Ranks())
    _begin_with_pairs(trainer.lm)
    generator = torch.Generator().manual_seed(0)
    with silenced(trainer.lm, without):
        for step in range(1, steps + 1):
            stepped = trainer.step([draw(32, generator).batch])
            if say is not None and step % 100 == 0:
                say(f"step {step}/{steps}  loss {float(stepped.loss):.4f}")
    return trainer.lm


@torch.no_grad()
def correct(lm: DecoderLM, questions: Questions, without: str | None = None) -> Tensor:
    """bool [B, QUESTIONS]: which answers are right, with a branch silenced if one is named."""
    with silenced(lm, without):
        logits = lm(questions.batch.tokens)[:, -QUESTIONS:, :VALUES]
    right: Tensor = logits.argmax(-1) == questions.answers
    return right


@contextmanager
def silenced(lm: DecoderLM, branch: str | None) -> Iterator[None]:
    """The gates of one branch at 0 (None: of no branch); what it selects and compresses stays as it is."""
    number = BRANCHES.index(branch) if branch else None

    def silence(module: object, given: object, gates: Tensor) -> Tensor:
        if number is None:
            return gates
        return torch.cat([gates[..., :number], torch.zeros_like(gates[..., :1]), gates[..., number + 1 :]], -1)

    layers = [module for module in lm.modules() if isinstance(module, NativeSparseAttention)]
    handles = [layer.gates.register_forward_hook(silence) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def accuracy(lm: DecoderLM, questions: Questions) -> dict[str, float]:
    """Share of right answers with every branch, and with each one silenced ("without selected")."""
    return {_name(branch): float(correct(lm, questions, branch).float().mean()) for branch in (None, *BRANCHES)}


def _name(without: str | None) -> str:
    return f"without {without}" if without else "all branches"


def _begin_with_pairs(lm: DecoderLM) -> None:
    """A pair's embedding begins as the sum of its key's and its value's, so that keys need not be found out first."""
    generator = torch.Generator().manual_seed(0)
    keys = 0.3 * torch.randn(KEYS, lm.config.dim, generator=generator)
    values = 0.3 * torch.randn(VALUES, lm.config.dim, generator=generator)
    with torch.no_grad():
        lm.embedding.weight[:_ASK] = (keys[:, None] + values).flatten(0, 1)
        lm.embedding.weight[_ASK:] = keys


def _picture(lm: DecoderLM, questions: Questions, never: float, path: Path) -> None:
    """Right answers over the distance of the needle, with each branch silenced in turn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for mark, branch in zip(("o-", "s--", "^:", "x-."), (None, *BRANCHES), strict=True):
        right = correct(lm, questions, branch).float()
        bins = [range(n, n + 6) for n in range(CONFIG.w + 1, TEXT + QUESTIONS, 6)]
        shares = [right[(questions.distances >= b.start) & (questions.distances < b.stop)].mean() for b in bins]
        axes.plot([b.start + 2.5 for b in bins], shares, mark, label=_name(branch))
    axes.axhline(CHANCE, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate("chance", (CONFIG.w + 1, CHANCE + 0.02), fontsize=8)
    axes.axhline(never, color="black", linewidth=0.8, linestyle="--")
    axes.annotate("trained without the selected branch, all distances", (CONFIG.w + 1, never + 0.02), fontsize=8)
    axes.set(
        xlabel=f"tokens from the needle to the question (window: {CONFIG.w})", ylabel="right answers", ylim=(0, 1.05)
    )
    axes.legend(loc="center right")
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nsa.train.needle", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("results/train"))
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # before the training, not after
    except OSError as error:
        parser.error(cannot_write(error, "--out") or str(error))
    torch.set_num_threads(1)
    questions = draw(512, torch.Generator().manual_seed(1))
    lm = trained(options.steps, print)
    found = accuracy(lm, questions)
    never_had_it = trained(options.steps, print, without="selected")
    found["trained without selected"] = float(correct(never_had_it, questions, "selected").float().mean())
    _picture(lm, questions, found["trained without selected"], options.out / "needle.svg")
    record = {"steps": options.steps, "chance": CHANCE, "window": CONFIG.w, "right_answers": found}
    atomic_write(options.out / "needle.json", to_json(record, indent=2) + "\n")
    print(to_json(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

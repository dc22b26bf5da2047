"""window-leak. Reported: "loss 1.249, stable for 35k steps".

Really: the window read a cache of the last w tokens by absolute position. As soon as S > w the cache no longer begins
at token 0, and a row finds the next tokens in it; on random tokens the loss fell to 1.379, half of their entropy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa.geometry import Layout
from regression import training
from regression.contract import Bound, Evidence, Incident, ReproVerdict, Step
from regression.detectors import causality, dense
from regression.detectors.backends import COMPILING_S, in_every_backend, interpreted, proofs
from regression.detectors.calls import SMALL, draw

INCIDENT = Incident(
    id="window-leak",
    symptom="loss 1.249, stable for 35k steps",
    cause="truncated window cache indexed by absolute position: for S > w rows see the next tokens",
    detector="causality at S = w-1, w, w+1, 2w-1, 2w, 2w+1; the entropy floor on random tokens",
    expects=ReproVerdict.LEAK,
    fires=("future_seen", "loss_nats"),
    floor_s=COMPILING_S,
)
LENGTHS = tuple(times * SMALL.w + more for times in (1, 2) for more in (-1, 0, 1))
STEPS = 100


def _by_absolute_position(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots t-w+1 … t of a cache that holds the last w tokens."""
    w = layout.config.w
    k, v = k[:, -w:], v[:, -w:]
    slot = torch.arange(k.shape[1], device=q.device)
    seen = (slot <= layout.tokens[:, None]) & (slot > layout.tokens[:, None] - w)
    return dense.attend(q, k, v, seen.expand(q.shape[0], k.shape[2], -1, -1), scale)


def _layer_leaks(device: str) -> list[str]:
    """The layer through its cache, where the fault was: a prompt at once, and in two halves."""
    torch.manual_seed(0)
    layer = nsa.NativeSparseAttention(32, 4, 2, 16, 16, SMALL, backend="torch", device=device)

    def prompt(x: Tensor, pieces: int) -> Tensor:
        cache = nsa.KVCache(layer, batch_size=1, max_tokens=x.shape[1])
        return torch.cat([layer(piece, cache) for piece in x.chunk(pieces, 1)], 1)

    found = []
    with torch.inference_mode():
        for tokens, pieces in ((tokens, pieces) for tokens in LENGTHS for pieces in (1, 2)):
            x = torch.randn(1, tokens, 32, device=device)
            for cut in (1, tokens // 2, tokens - 1):
                other = torch.cat([x[:, :cut], causality.OTHER * x[:, cut:] + 1], 1)
                moved = causality.changed_rows(*(prompt(each, pieces)[:, :cut] for each in (x, other)))
                if moved:
                    found.append(
                        f"layer with cache, S = {tokens} in {pieces}: {len(moved)} rows change with the future"
                    )
    return found


def _trained(step: Step, first: int) -> tuple[Bound, str]:
    """The mean of the last losses on random tokens, one more of them than the window holds, and their floor."""
    sizes: dict[str, Any] = {"batch_size": 8, "seq_len": training.TINY.nsa.w + 1, "packing": False}
    with tempfile.TemporaryDirectory() as folder:
        chosen = training.settings(Path(folder), step.device, steps=STEPS, lr=5e-3, **sizes)
        ended = training.run(chosen, lambda record: step(first + record["step"], loss=record["loss"]))
    return ended.loss_on_random_tokens(), f"{ended.course()}; ln 16 = 2.773"


def _examine(step: Step, backends: Sequence[str]) -> Evidence:
    seen: list[str] = []
    for n, backend in enumerate(backends):
        branches = ("window",) if interpreted(backend, step.device) else ("window", "whole")
        for tokens in LENGTHS:
            seen += causality.leaks(draw(tokens, step.device), backend, range(1, tokens), branches)
        step(n)
    seen += _layer_leaks(step.device)
    loss, note = _trained(step, len(backends))
    return Evidence(future_seen=tuple(seen), loss_nats=loss, notes=(note,), paths=tuple(backends))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("window_attention", _by_absolute_position)


faulty, product = proofs(_examine, inject)

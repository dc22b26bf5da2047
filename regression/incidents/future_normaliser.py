"""future-normaliser. Not reported; found beside the others.

What happened: p of the compressed blocks was normalised over all of them, also those that the row may not see. The
heads of a group are then added with wrong weights, and blocks of the future decide between blocks of the past.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

import nsa
from nsa.geometry import Layout
from nsa.torch_backend.scores import select_blocks as healthy
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors import causality, dense
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, interpreted, proofs
from regression.detectors.calls import SMALL, draw

INCIDENT = Incident(
    id="future-normaliser",
    symptom="none was reported",
    cause="p of the compressed blocks was normalised over blocks that the row may not see",
    detector="whatever invisible blocks hold, the chosen blocks stay",
    expects=ReproVerdict.LEAK,
    floor_s=COMPILING_S,
)
TRIALS = 50
INTERPRETED_TRIALS = 4
TOKENS = 32


def _over_all_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """The normaliser of all blocks, in place of that of the visible ones."""
    everything = dense.scores(q, k_cmp, scale).float().logsumexp(-1).transpose(1, 2)
    return healthy(q, k_cmp, layout, scale, everything)


def _trial(seed: int, backend: str, device: str) -> str | None:
    """Whatever comes behind a cut must not move the indices of the rows before it: compressed blocks given to
    `select_blocks`, or tokens given to `nsa_attention`, which hands on the normaliser of its compressed branch."""
    call = draw(TOKENS, device, group=4, seed=seed)
    call = replace(call, q=2 * call.q)  # peaked, so that heads differ in what they take from a sum
    if seed % 2:
        rows = TOKENS // 2 + seed % (TOKENS // 2)
        chosen = [x.whole(backend)[1].block_indices for x in (call, causality.with_another_future(call, rows))]
    else:
        k_cmp = call.compressed_keys(backend)
        cut = k_cmp.shape[1] // 2 + seed % (k_cmp.shape[1] // 2)
        rows = cut * SMALL.d + SMALL.l - 1  # tokens before the end of block `cut`
        other = torch.cat([k_cmp[:, :cut], causality.OTHER * k_cmp[:, cut:].flip(-1)], 1)
        chosen = [nsa.select_blocks(call.q, x, call.config, TOKENS, backend=backend) for x in (k_cmp, other)]
    moved = causality.changed_rows(*(indices[:, :rows] for indices in chosen))
    return f"{backend}, trial {seed}: {len(moved)} rows choose otherwise" if moved else None


def _detect(backend: str, device: str) -> Evidence:
    trials = INTERPRETED_TRIALS if interpreted(backend, device) else TRIALS
    moved = [trial for seed in range(trials) if (trial := _trial(seed, backend, device))]
    note = f"{backend}: {len(moved)} of {trials} trials changed the selection"
    return Evidence(future_seen=tuple(moved), notes=(note,))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("select_blocks", _over_all_blocks)


faulty, product = proofs(each_backend(_detect), inject)

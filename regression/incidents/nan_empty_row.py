"""nan-empty-row. Reported: "all-inf mask rows, NaN at steps 2-3", cured by a guard on the output.

Really: the softmax ran over rows in which everything was masked, and the NaN was replaced behind it: the forward is
finite, and 0 · NaN comes back in the backward pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

import nsa
from nsa.geometry import Layout
from nsa.torch_backend import selected_attention as healthy
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors import dense
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, nonfinite, proofs
from regression.detectors.calls import SMALL, Call, draw

INCIDENT = Incident(
    id="nan-empty-row",
    symptom="all-inf mask rows: the loss is not finite at steps 2-3",
    cause="masked after the softmax: finite forward, NaN backward",
    detector="every output and gradient of a batch with empty rows is finite, and 0 where nothing was seen",
    expects=ReproVerdict.NONFINITE,
    fires=("nonfinite", "wrong"),
    floor_s=COMPILING_S,
)


def _masked_afterwards(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A guard for empty rows, behind the softmax."""
    keys = torch.arange(layout.num_keys, device=q.device)
    chosen = (block_indices.transpose(1, 2)[..., None] == keys // layout.config.l_sel).any(-2)
    shown = dense.per_query_head(chosen & (keys <= layout.tokens[:, None]), q.shape[2])
    p = (dense.scores(q, k, scale) + torch.where(shown, 0.0, -torch.inf)).softmax(-1)
    p = torch.where(shown.any(-1, keepdim=True), p, 0)
    _, lse, read = healthy(q, k, v, block_indices, layout, scale)
    return dense.outputs(p, v), lse, read


def _selected(call: Call, backend: str) -> Tensor:
    """The selected branch, every other row of which has no block at all."""
    indices = call.select(backend)
    indices[:, ::2] = -1
    return nsa.selected_attention(call.q, call.k, call.v, indices, call.config, backend=backend)[0]


def _detect(backend: str, device: str) -> Evidence:
    """Empty rows: chosen blocks taken away, and in the compressed branch the tokens before the first full block."""
    bad, wrong = [], []
    call = draw(12, device).leaves()
    outputs = {"selected": (_selected(call, backend), slice(0, None, 2))}
    outputs["compressed"] = (call.attend("compressed", backend), slice(0, SMALL.l - 1))
    outputs["whole"] = (call.attend("whole", backend), slice(0, 0))
    for name, (o, empty) in outputs.items():
        named = {"o": o, **call.gradients(o, of=("q", "k", "v"))}
        bad += nonfinite(f"{backend}, {name}", named)
        if bool(o[:, empty].count_nonzero()) or bool(named["dq"][:, empty].count_nonzero()):
            wrong.append(f"{backend}, {name}: a row that sees nothing is not exactly 0")
    return Evidence(nonfinite=tuple(bad), wrong=tuple(wrong))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("selected_attention", _masked_afterwards)


faulty, product = proofs(each_backend(_detect), inject)

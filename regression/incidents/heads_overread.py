"""heads-overread. Reported: wrong rows for 24 heads.

What happened: a kernel takes heads in tiles of a power of two and reads whole tiles. Where their number is no multiple
of the tile it reads on into the next token's heads, or past the end of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

import nsa
from nsa.geometry import Layout
from nsa.torch_backend import window_attention as healthy
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors import memory
from regression.detectors.backends import COMPILING_S, in_every_backend, interpreted, nonfinite, proofs
from regression.detectors.calls import SMALL, Call, draw

INCIDENT = Incident(
    id="heads-overread",
    symptom="wrong rows for 24 heads",
    cause="a kernel reads past the heads where their number is no multiple of its tile",
    detector="every number of heads and groups near a tile's edge, inside a larger tensor of NaN",
    expects=ReproVerdict.NONFINITE,
    fires=("nonfinite", "wrong"),
    floor_s=COMPILING_S,
)
TILE = 16
HEADS = tuple(
    (kv_heads, group)
    for kv_heads, groups in {
        1: (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 33),
        2: (1, 3, 12, 15, 16, 17),
        3: (1, 5, 8),
        7: (1, 2),
        8: (1, 3),
        15: (1,),
        16: (1,),
        17: (1,),
        23: (1,),
        24: (1,),
        25: (1,),
    }.items()
    for group in groups
)
"""Hkv and G, so that Hkv, G and their product pass the edges of tiles of 8, 16 and 32."""
FEW_HEADS = (3, 8), (1, 17)
"""For the reference, which takes one query at a time, and for the interpreter."""


def _whole_tiles(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The window branch, whose keys are read by tiles of 16 heads; what is too many is multiplied by 0."""
    o, lse, read = healthy(q, k, v, layout, scale)
    heads = -(-k.shape[2] // TILE) * TILE
    behind = (k.shape[0] - 1) * k.stride(0) + (k.shape[1] - 1) * k.stride(1) + heads * k.stride(2)
    if k.storage_offset() + behind > k.untyped_storage().nbytes() // k.itemsize:
        return o, lse, read  # beyond the memory of this process
    tile = k.detach().as_strided((*k.shape[:2], heads, k.shape[3]), k.stride(), k.storage_offset())
    real = (torch.arange(heads, device=k.device) < k.shape[2])[:, None]
    return o + (tile * ~real).sum() * 0, lse, read


def _inside(call: Call) -> tuple[Call, list[Tensor]]:
    """The same numbers inside larger tensors of NaN, as leaves; and these tensors."""
    parts, around = zip(*map(memory.surrounded_by_nan, (call.q, call.k, call.v, call.gates)), strict=True)
    q, k, v, gates = (x.detach().requires_grad_() for x in parts)
    return Call(q, k, v, gates, call.config), list(around)


def _run(call: Call, backend: str, upstream: Tensor) -> dict[str, Tensor]:
    o, aux = call.whole(backend)
    found = {"o": o.detach(), **call.gradients(o, upstream)}
    with torch.no_grad():  # the last tokens again, as a step of decoding
        found["o of a step"] = nsa.nsa_attention(
            call.q[:, -2:], call.k, call.v, call.gates[:, -2:], call.config, backend=backend
        )
    return found | {"lse": torch.stack([x.detach().nan_to_num(neginf=0.0) for x in aux.lse.values()])}


def _findings(backend: str, call: Call) -> tuple[list[str], list[str]]:
    """(what is not finite, what is wrong) of one call inside larger tensors of NaN."""
    upstream = torch.ones_like(call.q)
    inside, around = _inside(call)
    before = [int(x.isnan().sum()) for x in around]
    found = _run(inside, backend, memory.surrounded_by_nan(upstream)[0])
    kv_heads = call.k.shape[2]
    shape = f"{backend}, Hkv {kv_heads}, G {call.q.shape[2] // kv_heads}"
    wrong = []
    if [int(x.isnan().sum()) for x in around] != before:
        wrong.append(f"{shape}: memory beside the inputs was written")
    if not interpreted(backend, call.q.device.type):  # seconds each; what is read of the NaN around shows without it
        plain = _run(call.leaves(), backend, upstream)
        wrong += [
            f"{shape}: {name} is not what it is alone in memory"
            for name, x in plain.items()
            if not torch.allclose(x, found[name], rtol=1e-5, atol=1e-5)
        ]
    return nonfinite(shape, found), wrong


def _examine(step: Step, backends: Sequence[str]) -> Evidence:
    """With a heartbeat after each number of heads: every one of them may have to be compiled."""
    bad, wrong = [], []
    cases = [
        (backend, kv_heads, group)
        for backend in backends
        for kv_heads, group in (FEW_HEADS if _slow(backend, step.device) else HEADS)
    ]
    for n, (backend, kv_heads, group) in enumerate(cases):
        tokens = 6 if _slow(backend, step.device) else 18
        nonfinite_here, wrong_here = _findings(
            backend, draw(tokens, step.device, config=SMALL, kv_heads=kv_heads, group=group)
        )
        bad += nonfinite_here
        wrong += wrong_here
        step(n)
    return Evidence(nonfinite=tuple(bad), wrong=tuple(wrong), paths=tuple(backends))


def _slow(backend: str, device: str) -> bool:
    return backend == "reference" or interpreted(backend, device)


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("window_attention", _whole_tiles)


faulty, product = proofs(_examine, inject)

"""prefill-decode-split. Not reported; found beside the others.

What happened: prefill and decode chose blocks in code of their own, and chose differently in up to 45 of 48 rows: the
model that generates was not the one that had been trained.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

import nsa
from nsa import backends
from nsa.backends import Decoder
from nsa.geometry import Layout
from nsa.kv import DecodeOutput, KVView
from nsa.torch_backend.scores import select_blocks as healthy
from regression.contract import Bound, Evidence, Incident, ReproVerdict
from regression.detectors import causality, dense
from regression.detectors.backends import COMPILING_S, each_backend, interpreted, proofs, replacing, worst
from regression.detectors.calls import SMALL, Call, draw
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="prefill-decode-split",
    symptom="none was reported",
    cause="prefill and decode chose blocks in code of their own",
    detector="prefill = chunked prefill = one token at a time: blocks, outputs, and the layer through its cache",
    expects=ReproVerdict.WRONG,
    fires=("error", "wrong"),
    floor_s=COMPILING_S,
)
ROWS = 48
INTERPRETED_ROWS = 24, 18  # of which those from the 18th on are asked again
CHUNK = 5


def _decode_of_its_own(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """Decode takes the best n and forces no block."""
    if layout.num_queries == 1:
        free = replace(layout.config, init_blocks=0, local_blocks=0)
        layout = replace(layout, config=free)
    return healthy(q, k_cmp, layout, scale, lse)


def _pieces(first: int, last: int, size: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + size, last)) for begin in range(first, last, size)]


def _functions(call: Call, backend: str, first: int) -> tuple[list[str], Bound]:
    """Rows from `first` on whose blocks differ from prefill's, and the worst error of their outputs over its blocks."""
    last = call.q.shape[1]
    blocks = call.whole(backend)[1].block_indices[:, first:]
    found, errors = [], []
    for name, size in (("chunked", CHUNK), ("one token at a time", 1)):
        parts = [call.rows(*piece).whole(backend) for piece in _pieces(first, last, size)]
        split = causality.changed_rows(torch.cat([aux.block_indices for _, aux in parts], 1), blocks)
        if split:
            found.append(f"{backend}, {name}: {len(split)} of {last - first} rows choose otherwise than in prefill")
        errors.append(dense.error(torch.cat([o for o, _ in parts], 1), call.rows(first, last), "whole", blocks))
    return found, worst(errors)


def _layer(backend: str, device: str) -> list[str]:
    """The layer in float64 through its cache: no rounding can be an excuse."""
    torch.manual_seed(0)
    layer = nsa.NativeSparseAttention(32, 4, 2, 16, 16, SMALL, backend=backend, device=device, dtype=torch.float64)
    x = torch.randn(2, 24, 32, device=device, dtype=torch.float64)
    found = []
    with torch.inference_mode():
        prefill = layer(x)
        for size in (CHUNK, 1):
            cache = nsa.KVCache(layer, batch_size=2, max_tokens=24)
            pieces = [layer(x[:, slice(*piece)], cache) for piece in _pieces(0, 24, size)]
            if not torch.allclose(torch.cat(pieces, 1), prefill, rtol=0, atol=1e-10):
                found.append(f"{backend}, layer with cache, {size} at a time: not what prefill gives")
    return found


def _detect(backend: str, device: str) -> Evidence:
    rows, first = INTERPRETED_ROWS if interpreted(backend, device) else (ROWS, 0)
    wrong, error = _functions(draw(rows, device), backend, first)
    if backend != "triton":  # its kernels know no float64; the layer calls the same function
        wrong += _layer(backend, device)
    return Evidence(wrong=tuple(wrong), error=error)


def _fused_decode_of_its_own(healthy: Decoder) -> Decoder:
    """The same where a backend decodes by a call of its own."""

    def decode_attention(
        q: Tensor,
        compressed: KVView,
        selected: KVView,
        window: KVView,
        lengths: Tensor | int,
        gates: Tensor,
        config: nsa.NSAConfig,
        scale: float,
    ) -> DecodeOutput:
        free = replace(config, init_blocks=0, local_blocks=0)
        return healthy(q, compressed, selected, window, lengths, gates, free, scale)

    return decode_attention


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    faults = replacing("select_blocks", _decode_of_its_own)
    if importlib.util.find_spec("triton") is not None:
        module = backends.load("triton")
        faults.append(Fault(module, "decode_attention", _fused_decode_of_its_own(vars(module)["decode_attention"])))
    return injected(*faults)


faulty, product = proofs(each_backend(_detect), inject)

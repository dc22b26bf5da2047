"""Compressed keys past 2³¹ elements: no attention that fits on a GPU has so many, so compression is called alone."""

from __future__ import annotations

import torch

import nsa
from benchmarks.cases.inputs import block_means
from benchmarks.cases.outcome import OracleCheck
from benchmarks.correctness import tolerance
from benchmarks.long_truth.sizes import INT32
from nsa import NSAConfig, geometry

_SIZES = {"cuda": (524288, 520, 128), "cpu": (512, 4, 16)}
"""Tokens, heads and channels: 65 GiB of keys in bfloat16 give 2.2e9 numbers, the smallest such keys."""
_ROWS_DRAWN = 4096


def check(device: torch.device, dtype: torch.dtype) -> list[OracleCheck]:
    """The first and the last compressed keys, and those around the offset 2³¹, against float64."""
    config, (tokens, heads, channels) = NSAConfig(), _SIZES[device.type]
    generator = torch.Generator(device).manual_seed(0)
    x = torch.empty(1, tokens, heads, channels, dtype=dtype, device=device)
    for some in x.split(_ROWS_DRAWN, dim=1):
        some.normal_(generator=generator)
    with torch.no_grad():
        found = nsa.compress(x, config)
    blocks, at = geometry.num_compressed_blocks(tokens, config), INT32 // (heads * channels)
    compared = {"first": 0, "last": blocks - 1}
    compared |= {f"at offset 2^31 {step:+}": at + step for step in (-1, 0, 1)} if at + 1 < blocks else {}
    return [_of_block(f"compressed key, {name}", x, found, c, config) for name, c in compared.items()]


def _of_block(name: str, x: torch.Tensor, found: torch.Tensor, c: int, config: NSAConfig) -> OracleCheck:
    own = x[:, c * config.d : c * config.d + config.l]
    truth = block_means(own.double(), config)[0, 0]
    errors = [
        (torch.linalg.vector_norm(one.double() - truth) / torch.linalg.vector_norm(truth)).item()
        for one in (found[0, c], block_means(own, config)[0, 0])
    ]
    return tolerance.check(name, errors[0], tolerance.FORWARD_FACTOR * max(errors[1], tolerance.LEAST_ERROR))

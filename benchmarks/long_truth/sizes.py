"""How many elements each tensor of a call has, and which pass the offsets that 32 bits can hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.cases.key import Key
from nsa import NSAConfig, geometry

INT32 = 2**31
"""Elements from which an offset of 32 bits with a sign wraps."""
GRADIENTS = ("q", "k", "v", "gates")


def elements(key: Key, *, backward: bool) -> dict[str, int]:
    """Of each tensor that a call reads, writes or keeps for the backward pass, by name."""
    config = NSAConfig.from_mapping(key.config or {})
    blocks = geometry.num_compressed_blocks(key.num_keys, config)
    found = {
        "q": key.num_queries * key.heads * key.head_dim_k,
        "k": key.num_keys * key.num_kv_heads * key.head_dim_k,
        "v": key.num_keys * key.num_kv_heads * key.head_dim_v,
        "gates": key.num_queries * key.heads * 3,
        "o": key.num_queries * key.heads * key.head_dim_v,
        "block_indices": key.num_queries * key.num_kv_heads * config.n_sel,
        "k_compressed": blocks * key.num_kv_heads * key.head_dim_k,
        "v_compressed": blocks * key.num_kv_heads * key.head_dim_v,
        "lse": key.num_queries * key.heads,
    }
    if backward:
        found |= {f"d{name}": found[name] for name in (*GRADIENTS, "o")}
    return {name: key.batch * count for name, count in found.items()}


def crossed(key: Key, *, backward: bool, limit: int = INT32) -> list[str]:
    """The tensors with elements at offsets of `limit` and beyond."""
    return [name for name, count in elements(key, backward=backward).items() if count > limit]


def least_gib(key: Key, *, backward: bool) -> float:
    """GiB of the tensors that must stand at once: inputs, outputs and gradients, without what kernels need."""
    width = getattr(torch, key.dtype).itemsize
    found = elements(key, backward=backward)
    return sum(count * (4 if name in ("block_indices", "lse") else width) for name, count in found.items()) / 2**30


def table(keys: Sequence[Key], *, backward: bool) -> str:
    """A line per case: what crosses and what does not."""
    lines = [f"{'case':<58} {'GiB':>6}  tensors past 2^31 elements / the rest, by their share of 2^31"]
    for key in keys:
        over = crossed(key, backward=backward)
        rest = {name: n for name, n in elements(key, backward=backward).items() if name not in over}
        below = ", ".join(f"{name} {count / INT32:.2g}" for name, count in rest.items())
        gib = least_gib(key, backward=backward)
        lines.append(f"{key.case:<58} {gib:>6.1f}  {', '.join(over) or 'none'} / {below}")
    return "\n".join(lines)

"""What a case takes at least, whoever computes it: operations, a multiply-add being two, and bytes of device memory.

Operations are those of an algorithm whose memory is linear in the tokens, so that products that it must compute twice
count twice: NSA's scores after the compressed branch (Eq. 8), and q·k in a backward pass. Bytes are inputs read and
outputs written once; a decode step reads only the keys that it attends to. Both grow from what `nsa.geometry` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.cases.key import Key
from nsa import NSAConfig, geometry
from nsa.model import DecoderLM

_PART_BRANCH = {"part-compressed": "compressed", "part-selected": "selected", "part-window": "window"}


@dataclass(frozen=True)
class MinimumCost:
    """The least that one call takes."""

    flops: float
    bytes_moved: float


@dataclass(frozen=True)
class Pairs:
    """How many (query, key) pairs each branch of one sequence and key head computes."""

    compressed: int
    selected: int
    window: int


def of(key: Key) -> MinimumCost:
    """The minimum of a prefill, a decode step, or a part of the forward."""
    if key.mode.startswith("part-"):
        return _of_part(key)
    backward = key.mode in ("prefill-forward-backward", "memory")
    config = _config(key)
    flops = _dense_flops(key, backward) if config is None else _nsa_flops(key, config, backward)
    elements = _io_elements(key, gated=config is not None)
    if key.mode == "decode":
        rows = key.num_keys if config is None else _decode_rows(key, config)
        elements = _io_elements(key, gated=config is not None, key_rows=rows)
    if backward:  # do is read; dq, dk, dv and dgates are written
        elements = 2 * elements
    return MinimumCost(flops, elements * _bytes_of(key.dtype))


def of_train_step(key: Key, model: DecoderLM) -> float:
    """Operations of the forward and backward pass: three products per weight of a linear layer, and attention."""
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    config = _config(key)
    attention = _dense_flops(key, True) if config is None else _nsa_flops(key, config, True)
    return 6.0 * weights * key.batch * key.num_queries + model.config.n_layers * attention


def nsa_pairs(num_queries: int, num_keys: int, config: NSAConfig) -> Pairs:
    """Pairs of the last `num_queries` of `num_keys` tokens, the current block being one of the selected."""
    t = torch.arange(num_keys - num_queries, num_keys)
    current = t // config.l_sel
    blocks = torch.clamp(current + 1, max=config.n_sel)
    selected = (blocks - 1) * config.l_sel + t % config.l_sel + 1
    window = torch.clamp(t + 1, max=config.w)
    return Pairs(_total(geometry.num_visible_compressed(t, config)), _total(selected), _total(window))


def _total(x: Tensor) -> int:
    return int(x.sum())


def _config(key: Key) -> NSAConfig | None:
    return None if key.config is None else NSAConfig.from_mapping(key.config)


def _flops_per_pair(key: Key, backward: bool) -> int:
    """q·k and p·v; backward, q·k again, do·v, and the three products of dq, dk and dv."""
    times_k, times_v = (4, 3) if backward else (1, 1)
    return 2 * (times_k * key.head_dim_k + times_v * key.head_dim_v)


def _dense_flops(key: Key, backward: bool) -> float:
    before = key.num_keys - key.num_queries
    pairs = key.num_queries * before + key.num_queries * (key.num_queries + 1) // 2
    return float(key.batch * key.heads * pairs * _flops_per_pair(key, backward))


def _nsa_flops(key: Key, config: NSAConfig, backward: bool) -> float:
    pairs = nsa_pairs(key.num_queries, key.num_keys, config)
    attended = (pairs.compressed + pairs.selected + pairs.window) * _flops_per_pair(key, backward)
    return float(key.batch * key.heads * (attended + _score_flops(key, pairs)))


def _score_flops(key: Key, pairs: Pairs) -> int:
    return 2 * key.head_dim_k * pairs.compressed


def _io_elements(key: Key, *, gated: bool, key_rows: int | None = None) -> int:
    """q, gates and o of every query, k and v of `key_rows` tokens (all of them unless given) of each sequence."""
    of_query = key.heads * (key.head_dim_k + key.head_dim_v + 3 * gated)
    of_key = key.num_kv_heads * (key.head_dim_k + key.head_dim_v)
    return key.batch * (key.num_queries * of_query + (key.num_keys if key_rows is None else key_rows) * of_key)


def _decode_rows(key: Key, config: NSAConfig) -> int:
    """Rows of keys that one query reads: the compressed ones, and at least the larger of the other two branches, which
    may read the same tokens."""
    pairs = nsa_pairs(1, key.num_keys, config)
    return pairs.compressed + max(pairs.selected, pairs.window)


def _of_part(key: Key) -> MinimumCost:
    config = _config(key)
    assert config is not None
    pairs, blocks = (
        nsa_pairs(key.num_queries, key.num_keys, config),
        geometry.num_compressed_blocks(key.num_keys, config),
    )
    queries, size = key.batch * key.num_queries, _bytes_of(key.dtype)
    outputs = queries * key.heads * key.head_dim_v
    chosen_bytes = 4 * queries * key.num_kv_heads * config.n_sel  # int32
    if key.mode == "part-gated-sum":
        return MinimumCost(6.0 * outputs, size * (4 * outputs + 3 * queries * key.heads))
    if key.mode == "part-scores":
        read = size * (queries * key.heads + key.batch * blocks * key.num_kv_heads) * key.head_dim_k
        return MinimumCost(float(key.batch * key.heads * _score_flops(key, pairs)), read + chosen_bytes)
    branch = _PART_BRANCH[key.mode]
    rows = blocks if branch == "compressed" else key.num_keys
    flops = key.batch * key.heads * getattr(pairs, branch) * _flops_per_pair(key, backward=False)
    indices = chosen_bytes if branch == "selected" else 0
    return MinimumCost(float(flops), size * _io_elements(key, gated=False, key_rows=rows) + indices)


def _bytes_of(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)

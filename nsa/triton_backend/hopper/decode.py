"""A decode step of one query in one launch: a program per sequence and KV head, where these fill the GPU.

The five launches of `decode_kernels` hand scores and partial outputs to one another through device memory. Here they
stay in the program, whose warps have three roles:

- `producer`, one warp, asks TMA for tiles of keys and values: all compressed blocks, the window, the chosen blocks.
- `consumer`, four warps, attends them. Each warp has its own keys of a tile and a softmax of its own, so that warps
  exchange nothing until a branch ends.
- `selector`, four warps, makes the scores of the compressed blocks probabilities once their lse is known, and chooses,
  while the window is read.

The scores of 16 heads and 64k tokens, 256 KiB, do not fit in shared memory. The selector, which has nothing else to do
until the lse is known, holds those of the first tiles in its registers, and later tiles take their place.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nsa import geometry
from nsa.config import NSAConfig
from nsa.kv import DecodeOutput, KVView
from nsa.triton_backend import topk
from nsa.triton_backend.decode_kernels import tokens_of, visible_blocks
from nsa.triton_backend.hopper import CHANNELS
from nsa.triton_backend.hopper.decode_roles import consumer, producer, selector
from nsa.triton_backend.hopper.tile import barriers, descriptor, kernel, slots_of
from nsa.triton_backend.launch import LOG2E
from nsa.triton_backend.tuning import MIN_DOT, next_power_of_2

TILE = 64
"""Keys per tile; divides l_sel and the page size."""
STAGES = 2  # tiles of keys, and of values, on their way: 64 KiB
SHARED_SCORE_TILES = 38
"""Tiles of scores in shared memory, an even number: what keys, values and 8 KiB to merge the warps leave of 227 KiB."""
REGISTER_SCORE_TILES = 26
"""Tiles of scores in the selector's registers, an even number: 8 registers per thread and tile."""
MAX_TILES = SHARED_SCORE_TILES + REGISTER_SCORE_TILES
MAX_CHOSEN = 128
"""Selected blocks that the producer's few registers hold."""
CONSUMER_WARPS = 4
WORKER_WARPS, WORKER_REGISTERS = (4, 1), (232, 24)
"""Of the selector and the producer; registers of a thread."""
MAX_IDLE_SHARE = 0.6
"""The greatest share of multiprocessors that may be idle in the last wave; above it the five launches are faster."""


@kernel
def _step(
    Q, K, V, TABLE, SELECTED_K, SELECTED_V, SELECTED_TABLE, WINDOW_K, WINDOW_V, WINDOW_TABLE, LENGTHS, num_tokens,
    GATES, P, OUT, LSE, INDICES, READ_CMP, READ_SEL, READ_WIN,
    q_b, q_h, gate_b, gate_h, gate_n, table_b, selected_b, window_b, HKV, G, rows, slots, to_base_2,
    SIZE: gl.constexpr, STRIDE: gl.constexpr, SEL: gl.constexpr, FIRST_OFFSET: gl.constexpr, WEIGHTS: gl.constexpr,
    INIT: gl.constexpr, LOCAL: gl.constexpr, N: gl.constexpr, NP: gl.constexpr, BLOCKS: gl.constexpr, WIN: gl.constexpr,
    PAGE: gl.constexpr, SELECTED_PAGE: gl.constexpr, WINDOW_PAGE: gl.constexpr, D: gl.constexpr, GP: gl.constexpr,
    BN: gl.constexpr, KEPT: gl.constexpr, HELD: gl.constexpr, STAGES: gl.constexpr,
    WORKER_WARPS: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """OUT [B, 1, Hq, D], LSE [3, B, 1, Hq] base e, INDICES int32 [B, 1, Hkv, N], ascending, -1 at the end; P float32
    [B, Hkv, slots] is for the selector alone."""
    h, b = gl.program_id(0), gl.program_id(1)
    t = tokens_of(LENGTHS, num_tokens, b) - 1
    seen = visible_blocks(t, SIZE, STRIDE)
    num_tiles, lo = gl.cdiv(seen, BN), gl.maximum(t - WIN + 1, 0)
    begin = lo // BN * BN
    num_window_tiles = gl.cdiv(t + 1 - begin, BN)
    group = b.to(gl.int64) * HKV + h
    chosen = INDICES + group * N

    k_slots, v_slots = slots_of(K, STAGES), slots_of(V, STAGES)
    # no bank conflicts: the consumer's warps store 8 rows at a time, the selector's read one
    scores = gl.allocate_shared_memory(gl.float32, [KEPT // 2, GP, 2 * BN], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    lse_slot = gl.allocate_shared_memory(gl.float32, [GP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 1)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 1)
    once = barriers(4, 1)
    held_ready, held_loaded, lse_ready, chosen_ready = (
        once.index(0),
        once.index(1),
        once.index(2),
        once.index(3),
    )
    gl.warp_specialize([
        (consumer, (
            Q + b.to(gl.int64) * q_b, GATES + b.to(gl.int64) * gate_b, OUT, LSE, READ_CMP, READ_SEL, READ_WIN,
            chosen, scores, lse_slot, group, q_h, gate_h, gate_n, h, G, rows, t, seen, num_tiles, lo, begin,
            num_window_tiles, to_base_2, k_slots, k_full, k_empty, v_slots, v_full, v_empty, lse_ready, held_ready,
            held_loaded, chosen_ready, SEL, N, NP, D, GP, BN, KEPT, HELD, STAGES)),
        (selector, (
            P + group * slots, chosen, scores, lse_slot, lse_ready, held_ready, held_loaded, chosen_ready, t, seen,
            num_tiles, STRIDE, SEL, FIRST_OFFSET, WEIGHTS, INIT, LOCAL, N, NP, BLOCKS, GP, BN, KEPT, HELD)),
        (producer, (
            K, V, TABLE, table_b, SELECTED_K, SELECTED_V, SELECTED_TABLE, selected_b, WINDOW_K, WINDOW_V, WINDOW_TABLE,
            window_b, chosen, b, h, num_tiles, begin, num_window_tiles, k_slots, k_full, k_empty, v_slots, v_full,
            v_empty, chosen_ready, PAGE, SELECTED_PAGE, WINDOW_PAGE, SEL, N, NP, BN, STAGES)),
    ], WORKER_WARPS, WORKER_REGISTERS)  # fmt: skip


def serves(q: Tensor, branches: tuple[KVView, KVView, KVView], config: NSAConfig, sms: int) -> bool:
    """Whether a step can go in one launch, and is then faster on a GPU of `sms` multiprocessors, which take one program
    each. TMA must be able to read the keys and values of `branches`, all of q's dtype.

    The longest sequence of a batch sets the time, since no program shares a sequence.
    """
    (batch, length, heads, dk), (num_kv_heads, dv) = q.shape, branches[1].v.shape[2:]
    if length != 1 or (dk, dv) != (CHANNELS, CHANNELS) or heads > MIN_DOT * num_kv_heads or config.l_sel % TILE:
        return False
    # a chosen block is not cut off at the last token, so that no page may end within one
    if branches[0].page_size % TILE or branches[2].page_size % TILE or branches[1].page_size % config.l_sel:
        return False
    if config.n_sel > MAX_CHOSEN or any(x.dtype != q.dtype for view in branches for x in (view.k, view.v)):
        return False
    if branches[0].capacity > MAX_TILES * TILE:
        return False
    idle = -(batch * num_kv_heads) % sms
    return idle <= MAX_IDLE_SHARE * sms


def attend(
    q: Tensor,
    branches: tuple[KVView, KVView, KVView],
    lengths: Tensor | int,
    gates: Tensor,
    config: NSAConfig,
    scale: float,
) -> DecodeOutput:
    """As `nsa.triton_backend.decode.attend`, of a step that `serves`."""
    compressed, selected, window = branches
    batch, _, heads, dk = q.shape
    num_kv_heads, dv = selected.v.shape[2:]
    rows, groups = (batch, 1, heads), (batch, 1, num_kv_heads)
    # of two values, so that few versions are compiled
    held = REGISTER_SCORE_TILES if compressed.capacity > SHARED_SCORE_TILES * TILE else 0
    p = q.new_empty(*groups, compressed.capacity, dtype=torch.float32)
    decoded = DecodeOutput(
        q.new_empty(*rows, dv),
        q.new_empty(*groups, config.n_sel, dtype=torch.int32),
        q.new_empty(3, *rows, dtype=torch.float32),
        (_counts(q, groups), _counts(q, groups), _counts(q, groups)),
    )
    blocks = max(geometry.num_selection_blocks(selected.capacity, config), config.n_sel)
    _step[num_kv_heads, batch](
        q, *_descriptors(compressed), *_descriptors(selected), *_descriptors(window),
        *((None, lengths) if isinstance(lengths, int) else (lengths, 0)), gates, p,
        decoded.o, decoded.lse, decoded.block_indices, *decoded.keys_read,
        q.stride(0), q.stride(2), gates.stride(0), gates.stride(2), gates.stride(3),
        compressed.strides[0], selected.strides[0], window.strides[0], num_kv_heads, heads // num_kv_heads,
        batch * heads, compressed.capacity, scale * LOG2E, config.l, config.d, config.l_sel, *topk.weights(config),
        config.init_blocks, config.local_blocks, config.n_sel, next_power_of_2(config.n_sel),
        next_power_of_2(blocks), config.w, compressed.page_size, selected.page_size, window.page_size,
        dk, MIN_DOT, TILE, SHARED_SCORE_TILES, held, STAGES, WORKER_WARPS, WORKER_REGISTERS, num_warps=CONSUMER_WARPS,
    )  # fmt: skip
    return decoded


def _descriptors(view: KVView) -> tuple[TensorDescriptor, TensorDescriptor, Tensor | None]:
    return descriptor(view.k, TILE), descriptor(view.v, TILE), view.table


def _counts(q: Tensor, groups: tuple[int, ...]) -> Tensor:
    return q.new_empty(*groups, 1, dtype=torch.int32)

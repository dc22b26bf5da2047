"""Where the queries, tokens, slots and blocks of a call stand: all that the kernels read of a layout, in one launch.

`nsa.geometry.Layout` says what each of them is, and computes them by some thirty PyTorch operations where nobody did
before; a graph holds those, fused by its compiler. How many numbers a document adds is found by looking at all
documents, 32 at a time, so that no prefix sum needs a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel
from nsa.triton_backend.tuning import cdiv

ITEMS = 128  # queries, tokens, slots and blocks per program
DOCUMENTS = 32  # looked at at a time


@triton.jit
def _num_compressed(tokens, L: tl.constexpr, D: tl.constexpr):
    """Compression blocks in that many tokens."""
    return tl.where(tokens >= L, (tokens - L) // D + 1, 0)


@triton.jit
def _document(place, CU, documents, UNIT: tl.constexpr, L: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
              ITEMS: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """int64 (first token, first compressed slot, first selection block, the token behind it) of the document in which
    `place` stands, a number of tokens (`UNIT` 0), of compressed slots (1) or of selection blocks (2).

    Behind the last document the first three are the totals of all.
    """
    start, slots, blocks = tl.zeros([ITEMS], tl.int64), tl.zeros([ITEMS], tl.int64), tl.zeros([ITEMS], tl.int64)
    end = tl.zeros([ITEMS], tl.int64) + (1 << 40)
    before = tl.zeros([], tl.int64)
    for first in range(0, documents, BD):
        number = first + tl.arange(0, BD)
        there = number < documents
        a = tl.load(CU + number, mask=there, other=0).to(tl.int64)
        b = tl.load(CU + number + 1, mask=there, other=0).to(tl.int64)
        own_slots, own_blocks = _num_compressed(b - a, L, D), (b - a + SIZE - 1) // SIZE
        own = b - a if UNIT == 0 else (own_slots if UNIT == 1 else own_blocks)
        behind = before + tl.cumsum(own, axis=0)
        earlier = there[None, :] & (behind[None, :] <= place[:, None])
        start += tl.sum(tl.where(earlier, (b - a)[None, :], 0), axis=1)
        slots += tl.sum(tl.where(earlier, own_slots[None, :], 0), axis=1)
        blocks += tl.sum(tl.where(earlier, own_blocks[None, :], 0), axis=1)
        end = tl.minimum(end, tl.min(tl.where(there[None, :] & ~earlier, b[None, :], 1 << 40), axis=1))
        before += tl.sum(own, axis=0)
    return start, slots, blocks, end


@kernel
def _places(
    CU, STARTS, POSITIONS, BLOCKS_BEFORE, SLOT_LO, SLOT_HI, TOKEN_LO, TOKEN_HI, BLOCK_FROM, BLOCK_TO, SLOT_TOKEN,
    SLOT_USED, SLOT_SEEN_FROM, SLOT_SEEN_TO, TOKEN_SEEN_FROM, TOKEN_SEEN_TO, S, T, SLOTS, max_blocks, documents,
    L: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, ITEMS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    ahead = T - S
    # tokens, and the queries among them
    if CU is None:
        start, slots_before, blocks_before = tl.zeros_like(item), tl.zeros_like(item), tl.zeros_like(item)
        end = start + T
    else:
        start, slots_before, blocks_before, end = _document(item, CU, documents, 0, L, D, SIZE, ITEMS, BD)
    tl.store(TOKEN_SEEN_FROM + item, tl.maximum(item - ahead, 0).to(tl.int32), mask=item < T)
    tl.store(TOKEN_SEEN_TO + item, tl.maximum(tl.minimum(item + W, end) - ahead, 0).to(tl.int32), mask=item < T)
    query, real = item - ahead, (item >= ahead) & (item < T)
    tl.store(STARTS + query, start, mask=real)
    tl.store(POSITIONS + query, item - start, mask=real)
    tl.store(BLOCKS_BEFORE + query, blocks_before, mask=real)
    tl.store(SLOT_LO + query, slots_before.to(tl.int32), mask=real)
    tl.store(SLOT_HI + query, (slots_before + _num_compressed(item - start + 1, L, D)).to(tl.int32), mask=real)
    tl.store(TOKEN_LO + query, tl.maximum(item - W + 1, start).to(tl.int32), mask=real)
    tl.store(TOKEN_HI + query, (item + 1).to(tl.int32), mask=real)

    if CU is not None:
        start, slots_before, _, end = _document(item, CU, documents, 1, L, D, SIZE, ITEMS, BD)
    first, used = start + (item - slots_before) * D, start < T  # behind the last document start is T
    tl.store(SLOT_TOKEN + item, tl.where(used, first, 0), mask=item < SLOTS)
    tl.store(SLOT_USED + item, used, mask=item < SLOTS)
    # a query sees a slot from the last token of its block on, and to the end of the document
    seen_from = tl.where(used, tl.maximum(first + (L - 1) - ahead, 0), S)
    tl.store(SLOT_SEEN_FROM + item, seen_from.to(tl.int32), mask=item < SLOTS)
    tl.store(SLOT_SEEN_TO + item, tl.where(used, end - ahead, S).to(tl.int32), mask=item < SLOTS)

    if CU is not None:
        start, _, blocks_before, end = _document(item, CU, documents, 2, L, D, SIZE, ITEMS, BD)
    first, used = start + (item - blocks_before) * SIZE, start < T
    tl.store(BLOCK_FROM + item, tl.where(used, first, 0), mask=item < max_blocks)
    tl.store(BLOCK_TO + item, tl.where(used, tl.minimum(first + SIZE, end), 0), mask=item < max_blocks)


PAIRS = "compressed_interval", "window_interval", "block_tokens", "slot_tokens", "compressed_queries", "window_queries"
"""Properties of a layout that are two tensors."""
SINGLES = "starts", "positions", "blocks_before"


def flat(layout: Layout) -> list[Tensor]:
    """All that kernels read of a layout that is `located`."""
    return [*(getattr(layout, name) for name in SINGLES), *(x for name in PAIRS for x in getattr(layout, name))]


def knowing(layout: Layout, tensors: Sequence[Tensor]) -> Layout:
    """The layout of which these are `flat`."""
    singles, others = tensors[: len(SINGLES)], tensors[len(SINGLES) :]
    pairs = zip(others[::2], others[1::2], strict=True)
    return layout.knowing(**dict(zip(SINGLES, singles, strict=True)), **dict(zip(PAIRS, pairs, strict=True)))


def located(layout: Layout) -> Layout:
    """The layout, knowing all that kernels read of it."""
    if "starts" in vars(layout):
        return layout
    queries, keys, slots, blocks = layout.num_queries, layout.num_keys, layout.num_slots, layout.max_blocks
    config = layout.config

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=layout.device)

    starts, positions, blocks_before = (empty(queries, torch.int64) for _ in range(3))
    compressed, window = ((empty(queries, torch.int32), empty(queries, torch.int32)) for _ in range(2))
    block_tokens = empty(blocks, torch.int64), empty(blocks, torch.int64)
    slot_tokens = empty(slots, torch.int64), empty(slots, torch.bool)
    of_slots, of_tokens = ((empty(n, torch.int32), empty(n, torch.int32)) for n in (slots, keys))
    documents = 0 if layout.cu_seqlens is None else layout.cu_seqlens.numel() - 1
    if (most := max(keys, slots, blocks)) > 0:
        with on_device(starts):
            _places[cdiv(most, ITEMS),](
                layout.cu_seqlens, starts, positions, blocks_before, *compressed, *window, *block_tokens,
                *slot_tokens, *of_slots, *of_tokens, queries, keys, slots, blocks, documents,
                config.l, config.d, config.l_sel, config.w, ITEMS, DOCUMENTS,
            )  # fmt: skip
    return layout.knowing(
        starts=starts, positions=positions, blocks_before=blocks_before, compressed_interval=compressed,
        window_interval=window, block_tokens=block_tokens, slot_tokens=slot_tokens, compressed_queries=of_slots,
        window_queries=of_tokens,
    )  # fmt: skip

"""Decode: 1 to 8 queries per sequence over many keys, in four or five launches that read each key once.

A step that fills a Hopper GPU is one launch instead (`hopper/decode.py`). Of the others:

The kernels are in `decode_kernels.py`: the compressed branch and its scores; one or two for the choice of blocks;
selected blocks and window; the last one merges. One query leaves most of a GPU idle, so several programs split the keys
of one row (split-KV), and the last kernel merges their partial outputs to branches and the branches to o.
Lengths may be read from the device, and grids follow from capacities, so that a CUDA graph serves every length.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import geometry
from nsa.config import NSAConfig
from nsa.kv import DecodeOutput, KVView
from nsa.triton_backend import architecture, decode_kernels, dispatch, hopper
from nsa.triton_backend.launch import LOG2E, strides, unit_stride
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tuning import ENOUGH_VALUES, MIN_DOT, NARROW, cdiv, next_power_of_2, num_sms, padded

ENOUGH_PROGRAMS_PER_SM = 2  # more of them write more partial outputs, which a launch must merge
RESIDENT_PER_SM = 3  # programs of the first launch that fit on an SM together
REGISTERS = 168  # of a thread: with more, only two programs of four warps fit on an SM
CAPPED_CHANNELS, CAPPED_BYTES = 256, 2  # from where on, and of how many bytes each, tiles of 16 rows take more
COLUMNS_PER_WARP = 128  # of the choice: one row per program, so that no other row hides the latency of its counts
MAX_SPLITS = 64  # of one row's compressed blocks: what the last launch holds in registers
MAX_ROWS = 32  # tokens × heads of a group per program, as far as a group is not larger
KEYS = 64  # per step of a loop, where a row of keys and values is at most NARROW bytes
SCRATCH = 2**27  # scores of one step that exist at a time
HAS_PDL_FROM = 90  # compute capability
FEW_BLOCKS = 512  # whose scores fit in one tile: `_choose` computes the probabilities too, if no SM has two programs
VALUES_PER_WARP = 2**12  # of a branch's partial outputs of one row, in the last launch
FEW_CHANNELS = 32  # per program of the last launch where it has few rows: more programs, each with less to do
FEW_ROWS_PER_SM = 2  # up to which it has few
SLOTS = 64  # scores of a row are padded to a multiple of this, so that lengths do not make kernels anew


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut a call's work; what else was tried on an H200 is in docs/decode.md."""

    tokens: int
    """Queries per program of the first launch, a power of two."""
    group: int
    """Heads of a group per tile, padded."""
    keys: int
    """Keys per step."""
    dk: int
    dv: int
    """Head sizes, padded to powers of two."""


def launch_options(rows: int, channels: int, dtype: torch.dtype) -> dict[str, int]:
    """Keywords of a launch that multiplies tiles of so many queries × heads, and of so many channels of keys and values
    together."""
    # elsewhere Triton takes fewer by itself, or a thread would spill
    capped = rows <= MIN_DOT and channels >= CAPPED_CHANNELS and dtype.itemsize == CAPPED_BYTES
    options = {"num_warps": 4 if rows <= MAX_ROWS else 8, "num_stages": 2}
    return options | {"maxnreg": REGISTERS} if capped else options


def tiles(num_queries: int, group: int, dk: int, dv: int, dtype: torch.dtype) -> Tiles:
    """Tiles that fit the 99 KiB of shared memory of an RTX 3090."""
    padded_k = padded(dk)
    padded_v = max(padded(dv), min(padded_k, ENOUGH_VALUES))
    excess = max(next_power_of_2((padded_k + padded_v) * dtype.itemsize) // NARROW, 1)
    heads = next_power_of_2(group)
    heads_in_tile = max(heads, MIN_DOT) if num_queries == 1 else heads
    tokens = max(min(next_power_of_2(num_queries), MAX_ROWS // heads_in_tile), MIN_DOT // heads_in_tile, 1)
    wide = max(tokens * heads_in_tile // MAX_ROWS, 1)
    return Tiles(tokens, heads_in_tile, max(KEYS // (excess * wide), MIN_DOT), padded_k, padded_v)


@dataclass(frozen=True)
class Splits:
    """How many programs share the keys of one row (split-KV), by branch."""

    compressed: int
    selected: int
    window: int

    @property
    def both(self) -> int:
        """Of the launch that reads both the selected blocks and the window."""
        return self.selected + self.window


def plan_splits(rows: int, num_queries: int, capacity: int, shape: Tiles, config: NSAConfig, sms: int) -> Splits:
    """How many programs share the keys of a row in each branch, so that no multiprocessor is idle.

    rows: sequences × KV heads; capacity: the most compressed blocks of a sequence; sms: multiprocessors of the GPU.
    """
    tiles_of_compressed = min(cdiv(capacity, shape.keys), MAX_SPLITS)
    tiles_of_choice, tiles_of_window = config.n_sel * cdiv(config.l_sel, shape.keys), cdiv(config.w, shape.keys)
    # two at least: one split of 16 blocks would take twice as long as the window's
    selected = max(_num_splits(rows * num_queries, tiles_of_choice, sms), min(tiles_of_choice, 2))
    selected = 2 ** (selected.bit_length() - 1)  # compiled in: not for every number of sequences anew
    return Splits(
        _in_whole_waves(rows * cdiv(num_queries, shape.tokens), tiles_of_compressed, sms),
        selected,
        max(selected * tiles_of_window // tiles_of_choice, 1),
    )


def probability_tile(group: int, splits: int) -> tuple[int, int, int]:
    """(heads of a group, scores of each, splits of each), all padded, that a program makes probabilities of."""
    heads = next_power_of_2(group)
    # no fewer lse than threads: Triton would let each thread load all of them
    padded_splits = max(next_power_of_2(splits), decode_kernels.THREADS.value // heads)
    return heads, max(decode_kernels.SCORES // heads, SLOTS), padded_splits


def blocks_in_one_tile(num_blocks: int, scores: int, config: NSAConfig) -> int | None:
    """Selection blocks, padded, that `_choose` computes the probabilities of; None where it cannot.

    num_blocks: a row's selection blocks, a power of two; scores: the most compressed blocks that a tile holds.
    """
    strides = config.l_sel // config.d  # compressed blocks that begin in a selection block
    padded_blocks = max(num_blocks, min(scores, decode_kernels.THREADS.value) // strides)  # a score for each thread
    fits = num_blocks <= FEW_BLOCKS and padded_blocks * strides <= scores
    return padded_blocks if fits and strides == next_power_of_2(strides) else None


def attend(
    q: Tensor,
    compressed: KVView,
    selected: KVView,
    window: KVView,
    lengths: Tensor | int,
    gates: Tensor,
    config: NSAConfig,
    scale: float,
) -> DecodeOutput:
    """Attention of q [B, S, Hq, Dk], the last tokens of `lengths` (int32 [B], or one number for all), S <= 8.

    gates [B, S, Hq, 3]; scale > 0.
    """
    branches = (compressed, selected, window)
    if _in_one_launch(q, branches, config):
        with on_device(q):
            return hopper.decode.attend(unit_stride(q), branches, lengths, gates, config, scale)
    if q.shape[0] > 1 and q.shape[0] * q.shape[1] * q.shape[2] * compressed.capacity > SCRATCH:
        return _by_halves(q, branches, lengths, gates, config, scale)
    step = _Step(q, branches, lengths, config, scale)
    if step.decoded.o.numel():
        with on_device(q):
            step.attend_compressed()
            step.select_blocks()
            step.attend_selected_window()
            step.merge(gates)
    return step.decoded


def _in_one_launch(q: Tensor, branches: tuple[KVView, KVView, KVView], config: NSAConfig) -> bool:
    """Whether a kernel of `hopper/` does the whole step (`hopper.decode.serves`)."""
    if not dispatch.has_hopper_kernels(q.device) or not hopper.decode.serves(q, branches, config, num_sms(q.device)):
        return False
    return all(dispatch.readable_by_tma(x) for view in branches for x in (view.k, view.v))


class _Step:
    """One decode call: its tensors, its tiles and splits, and its launches, to be called in the order they stand in."""

    def __init__(
        self, q: Tensor, branches: tuple[KVView, KVView, KVView], lengths: Tensor | int, config: NSAConfig, scale: float
    ) -> None:
        self.q, (self.compressed, self.selected, self.window) = unit_stride(q), map(_unit_stride, branches)
        self.config, self.to_base_2 = config, scale * LOG2E
        self.batch, self.length, self.heads, dk = q.shape
        self.num_kv_heads, self.dv = self.selected.v.shape[2:]
        self.group, self.sms = self.heads // self.num_kv_heads, num_sms(q.device)
        self.tiles = tiles(self.length, self.group, dk, self.dv, q.dtype)
        capacity = self.compressed.capacity
        self.splits = plan_splits(self.batch * self.num_kv_heads, self.length, capacity, self.tiles, config, self.sms)
        self.lengths = (None, lengths) if isinstance(lengths, int) else (lengths, 0)
        self.slots = max(cdiv(capacity, SLOTS), 1) * SLOTS
        self.sizes = (dk, self.dv, self.tiles.dk, self.tiles.dv)
        # a launch begins while the one before ends (programmatic dependent launch)
        self.pdl = decode_kernels.HAS_PDL and architecture.of(q.device) >= HAS_PDL_FROM
        self.early = {"launch_pdl": True} if self.pdl else {}

        by_head, by_group = q.shape[:3], (self.batch, self.length, self.num_kv_heads)
        self.scores = q.new_empty(*by_head, self.slots, dtype=torch.float32)
        self.o_cmp, self.lse_cmp, self.read_cmp = _parts(q, by_head, by_group, self.splits.compressed, self.dv)
        self.o_sel_win, self.lse_sel_win, self.read_sel_win = _parts(q, by_head, by_group, self.splits.both, self.dv)
        read_sel, read_win = self.read_sel_win.split_with_sizes((self.splits.selected, self.splits.window), -1)
        self.decoded = DecodeOutput(
            q.new_empty(*by_head, self.dv),
            q.new_empty(*by_group, config.n_sel, dtype=torch.int32),
            q.new_empty(3, *by_head, dtype=torch.float32),
            (self.read_cmp, read_sel, read_win),
        )

    def attend_compressed(self) -> None:
        """Partial outputs of the compressed branch, and its scores."""
        q, keys, shape, splits = self.q, self.compressed, self.tiles, self.splits.compressed
        decode_kernels._compressed[cdiv(self.length, shape.tokens) * splits, self.num_kv_heads, self.batch](
            q, keys.k, keys.v, keys.table, *self.lengths, self.scores, self.o_cmp, self.lse_cmp, self.read_cmp,
            *strides(q), *keys.strides, self.length, self.heads, self.num_kv_heads, self.group, self.slots, splits,
            self.to_base_2, self.config.l, self.config.d, keys.page_size, self.length == 1, self.pdl,
            *self.sizes, shape.tokens, shape.group, shape.keys, **self._options(shape.tokens * shape.group),
        )  # fmt: skip

    def select_blocks(self) -> None:
        """The blocks of each query and KV head: one launch, or two where the probabilities need their own."""
        config, splits = self.config, self.splits.compressed
        most_blocks = max(geometry.num_selection_blocks(self.selected.capacity, config), config.n_sel)
        num_blocks, (heads, most_scores, lses) = next_power_of_2(most_blocks), probability_tile(self.group, splits)
        counts = (self.length, self.heads, self.num_kv_heads, self.group, self.slots, splits)
        in_one_tile = blocks_in_one_tile(num_blocks, most_scores, config)
        p: Tensor | None = None
        scored: tuple[Tensor | None, Tensor | None] = (self.scores, self.lse_cmp)
        if in_one_tile is not None and self.batch * self.num_kv_heads * self.length <= self.sms:
            num_blocks, num_warps = in_one_tile, decode_kernels.THREADS.value // 32
            tile = (heads, in_one_tile * config.l_sel // config.d, lses)
        else:
            by_group = (self.batch, self.length, self.num_kv_heads)
            p, scored = self.q.new_empty(*by_group, self.slots, dtype=torch.float32), (None, None)
            parts = cdiv(self.slots, most_scores)
            decode_kernels._group_probabilities[self.length * parts, self.num_kv_heads, self.batch](
                self.scores, self.lse_cmp, *self.lengths, p, *counts, parts, config.l, config.d,
                heads, most_scores, lses, self.pdl, num_warps=decode_kernels.THREADS.value // 32, **self.early,
            )  # fmt: skip
            num_warps = min(max(num_blocks // COLUMNS_PER_WARP, 1), 16)
            tile = (1, 1, 1)  # constants, or each number of splits would compile the choice anew
        decode_kernels._choose[self.length, self.num_kv_heads, self.batch](
            p, *scored, *self.lengths, self.decoded.block_indices, *counts,
            config.l, config.d, config.l_sel, geometry.overlap_offsets(config).start,
            tuple(geometry.overlap_weights(config)), config.init_blocks, config.local_blocks, config.n_sel,
            next_power_of_2(config.n_sel), num_blocks, *tile, self.pdl, num_warps=num_warps, **self.early,
        )  # fmt: skip

    def attend_selected_window(self) -> None:
        """Partial outputs of the selected blocks and of the window."""
        q, selected, window, config, splits = self.q, self.selected, self.window, self.config, self.splits
        rows = max(self.tiles.group, MIN_DOT)
        decode_kernels._selected_window[self.length * splits.both, self.num_kv_heads, self.batch](
            q, selected.k, selected.v, selected.table, window.k, window.v, window.table, self.decoded.block_indices,
            *self.lengths, self.o_sel_win, self.lse_sel_win, self.read_sel_win,
            *strides(q), *selected.strides, *window.strides,
            self.length, self.heads, self.num_kv_heads, self.group, self.to_base_2,
            config.l_sel, config.n_sel, config.w, selected.page_size, window.page_size, splits.selected, splits.window,
            *self.sizes, rows, self.tiles.keys, self.pdl, **self._options(rows), **self.early,
        )  # fmt: skip

    def merge(self, gates: Tensor) -> None:
        """Merge the partial outputs of each branch, then add the gated branches."""
        splits, rows = self.splits, self.batch * self.length * self.heads
        of_branch = [next_power_of_2(n) for n in (splits.compressed, splits.selected, splits.window)]
        channels = min(self.tiles.dv, FEW_CHANNELS) if rows <= FEW_ROWS_PER_SM * self.sms else self.tiles.dv
        decode_kernels._merge[rows, cdiv(self.dv, channels)](
            self.o_cmp, self.lse_cmp, self.o_sel_win, self.lse_sel_win, gates, self.decoded.o, self.decoded.lse,
            *gates.stride(), self.length, self.heads, rows, splits.compressed, splits.selected, splits.window,
            *of_branch, self.dv, channels, self.pdl,
            num_warps=min(max(max(of_branch) * channels // VALUES_PER_WARP, 1), 4), **self.early,
        )  # fmt: skip

    def _options(self, rows: int) -> dict[str, int]:
        return launch_options(rows, self.tiles.dk + self.tiles.dv, self.q.dtype)


def _by_halves(
    q: Tensor,
    branches: tuple[KVView, KVView, KVView],
    lengths: Tensor | int,
    gates: Tensor,
    config: NSAConfig,
    scale: float,
) -> DecodeOutput:
    """The same for one half of the sequences after the other: their scores would take too much memory together."""
    parts = []
    for own in (slice(0, q.shape[0] // 2), slice(q.shape[0] // 2, None)):
        compressed, selected, window = (rows.of(own) for rows in branches)
        of_own = lengths if isinstance(lengths, int) else lengths[own]
        parts.append(attend(q[own], compressed, selected, window, of_own, gates[own], config, scale))
    read = [torch.cat([x.sum(-1, keepdim=True, dtype=torch.int32) for x in counts]) for counts in
            zip(*(part.keys_read for part in parts), strict=True)]  # fmt: skip
    return DecodeOutput(
        torch.cat([part.o for part in parts]),
        torch.cat([part.block_indices for part in parts]),
        torch.cat([part.lse for part in parts], 1),
        (read[0], read[1], read[2]),
    )


def _unit_stride(rows: KVView) -> KVView:
    """A view whose channels are side by side; those of pages always are."""
    return rows if rows.table is not None else KVView(unit_stride(rows.k), unit_stride(rows.v))


def _num_splits(rows: int, most: int, sms: int) -> int:
    """Into how many programs the work of each of `rows` is split, at most `most`, so that no SM is idle."""
    return max(min(cdiv(ENOUGH_PROGRAMS_PER_SM * sms, max(rows, 1)), most), 1)


@functools.cache  # some 100 us; for one `rows` at most MAX_SPLITS results are kept, however long the text
def _in_whole_waves(rows: int, most: int, sms: int) -> int:
    """The same, so that of four waves of programs at most the last leaves the fewest places free."""
    resident = RESIDENT_PER_SM * sms

    def free(splits: int) -> float:
        waves = max(rows, 1) * splits / resident
        return round(1 - waves / math.ceil(waves), 3)

    return min(range(1, max(min(4 * resident // max(rows, 1), most), 1) + 1), key=free)


def _parts(
    q: Tensor, by_head: tuple[int, ...], by_group: tuple[int, ...], splits: int, dv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the outputs, the lse and the counts of each split."""
    o, lse = q.new_empty(*by_head, splits, dv, dtype=torch.float32), q.new_empty(*by_head, splits, dtype=torch.float32)
    return o, lse, q.new_empty(*by_group, splits, dtype=torch.int32)

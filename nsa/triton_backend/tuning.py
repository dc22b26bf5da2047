"""Block shapes, chosen from the shapes of a call alone: nothing is tuned unless `nsa.tune` is called.

One table per architecture stands in `tables/`, and says how it was found; `python -m benchmarks tune` writes one.
What else was tried: docs/kernels.md.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nsa.triton_backend import architecture

MIN_DOT = 16  # tensor cores take no smaller side
# The optimiser of ptxas 12.8, which Triton 3.6 brings, breaks a kernel on Hopper whose values have fewer channels than
# its keys, and fewer than 64: wrong sums, then "Out-of-range shared or local address" (compute-sanitizer). The same PTX
# is right without its optimiser, and from the ptxas of CUDA 13. So values are padded as far as keys are, up to 64.
ENOUGH_VALUES = 64
NARROW = 512  # bytes of q and o, or of k and v, per row that the table is made for: bfloat16, head sizes of 128
CUT_GROUPS = frozenset(
    f"{folder}compressed_window_{kernel}" for folder in ("", "hopper.") for kernel in ("forward", "backward_q")
)
"""Kernels whose tiles may cut a group (`tile.rows_of_tile`), which is never padded there."""
BY_ROW_OR_BY_KEY = frozenset({"compressed_window_backward_kv", "selected_backward_kv"})
"""Kernels that write dk and dv; see `rows_first`."""


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched where a row is at most NARROW bytes."""

    rows: int
    """Rows (tokens × heads of a group) per program."""
    keys: int
    """Keys per step of the loop, or per program that loops over queries."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Registers per thread, so that more programs fit on an SM; None leaves it to the compiler."""
    value_stages: int | None = None
    """Of `hopper/`: tiles of values on their way at a time, where not as many as of keys (num_stages)."""


@dataclass(frozen=True)
class MaskedLaunch(LaunchConfig):
    """How a kernel of `selected_masked.py` is launched, and which calls are sooner done with it."""

    max_keys: int = 0
    """Of the longest sequence."""
    max_group: int = 0
    """Heads per group."""


@dataclass(frozen=True)
class Table:
    """The launches of one architecture."""

    how: str
    """How it was found."""
    narrow: Mapping[str, LaunchConfig]
    """Of every kernel, for up to NARROW bytes per row."""
    wide: Mapping[str, LaunchConfig]
    """For up to twice as many, where that is not half of `narrow`; a kernel of `hopper/` that has none here serves no
    such row."""
    slim: Mapping[str, LaunchConfig] = field(default_factory=dict)
    """For up to half as many, where that is not `narrow`."""
    masked: Mapping[str, Mapping[str, MaskedLaunch]] = field(default_factory=dict)
    """By width, then "forward", "backward_q" and "backward_kv": of the selected branch of short sequences, where that
    was measured."""
    shapes: dict[tuple[object, ...], Shape] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What `fit` has made of it: a call asks for the same shapes again and again."""

    def name(self, kernel: str, width: str, group: int) -> str:
        """Where a launch stands: under "kernel/8" for groups padded to 8 heads, if they have one of their own."""
        own = own_name(kernel, group)
        return own if own in getattr(self, width) else kernel

    def of(self, kernel: str, width: str, group: int) -> LaunchConfig:
        """The kernel's launch for rows of a width of `WIDTHS` and groups of so many heads."""
        launches: Mapping[str, LaunchConfig] = getattr(self, width)
        return launches.get(self.name(kernel, width, group), self.narrow[kernel])


def own_name(kernel: str, group: int) -> str:
    """What the launch of a kernel is called that is for groups padded to so many heads alone."""
    return f"{kernel}/{next_power_of_2(group)}"


WIDTHS = ("slim", "narrow", "wide")
TABLES = Path(__file__).parent / "tables"
ANYWHERE = 86  # which has the least shared memory


tuned: dict[int, Table] = {}
"""By compute capability: what `nsa.tune` has put in force in this process."""


def table(capability: int) -> Table:
    """The table that is in force on a compute capability (80, 86, ...)."""
    return tuned.get(capability) or shipped_table(capability)


@functools.cache
def shipped_table(capability: int) -> Table:
    """The table of a compute capability in `tables/`, or one that fits every GPU where it has none of its own."""
    path = TABLES / f"sm{capability}.json"
    found = json.loads((path if path.exists() else TABLES / f"sm{ANYWHERE}.json").read_text(encoding="utf-8"))
    widths = {width: {k: LaunchConfig(**launch) for k, launch in found.get(width, {}).items()} for width in WIDTHS}
    masked = {
        width: {k: MaskedLaunch(**launch) for k, launch in launches.items()}
        for width, launches in found.get("masked", {}).items()
    }
    return Table(found["how"], **widths, masked=masked)


@dataclass(frozen=True)
class Shape:
    """How one kernel cuts the work of one call."""

    rows: int
    """Rows of a tile, a power of two: those of each token in turn. Where some are left at the end, they are idle, or a
    part of the next group's (`tile.rows_of_tile`)."""
    group: int
    """Rows per token: the heads of a group, in some kernels padded to a power of two (`_fit`)."""
    keys: int
    dk: int
    """Dk, padded to a power of two."""
    dv: int
    """Dv, likewise."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    value_stages: int = 0
    """Tiles of values on their way at a time; num_stages those of keys."""
    stretches: int = 3
    """Loops of `compressed_window._backward_q`: 3, or 1 where the rows, which each needs in shared memory, are wide."""
    rows_first: bool = False
    """Whether the kernels that write dk and dv compute p and ds as [rows, keys], not as [keys, rows]: `rows_first`."""

    @property
    def tokens(self) -> int:
        """Whole queries per tile; where heads are padded, a power of two."""
        return self.rows // self.group

    def tiles(self, num_queries: int) -> int:
        """How many tiles hold the rows of so many queries, where a tile may cut a group (`tile.rows_of_tile`)."""
        return cdiv(num_queries * self.group, self.rows)

    def sizes(self, dk: int, dv: int) -> tuple[int, ...]:
        """The constants DK, DV, DKP, DVP, ROWS, GP, BN of a kernel of `compressed_window.py`."""
        return dk, dv, self.dk, self.dv, self.rows, self.group, self.keys

    @functools.cached_property
    def launch(self) -> dict[str, int]:
        """Keywords of the launch."""
        registers = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **registers}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up: as `triton.cdiv`, which takes 50 times as long on the host (Triton 3.7)."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is n or more; `triton.next_power_of_2`, likewise."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def padded(size: int) -> int:
    """A power of two that holds `size` and that a dot takes."""
    return max(next_power_of_2(size), MIN_DOT)


def padded_channels(dk: int, dv: int) -> tuple[int, int]:
    """Channels of keys and of values in a tile."""
    return padded(dk), max(padded(dv), min(padded(dk), ENOUGH_VALUES))


@functools.cache
def width(dk: int, dv: int, dtype: torch.dtype) -> tuple[str, int]:
    """(the table's width for a row, how many times as wide as that it is)."""
    row_bytes = next_power_of_2(sum(padded_channels(dk, dv)) * dtype.itemsize)
    if row_bytes <= NARROW:
        return ("slim" if row_bytes <= NARROW // 2 else "narrow"), 1
    return "wide", row_bytes // (2 * NARROW)


def has_tiles_of_its_own(dtype: torch.dtype) -> bool:
    """Whether tables are made for this type: those of 16 bits.

    Tensor cores take no products of float32. The threads compute them, which takes more registers: in tiles of as many
    bytes as those of 16-bit types, kernels spilled up to 12 KiB per thread on Hopper. So float32 takes half the rows
    and half the keys, but for masked kernels (`masked_shape`), which keep theirs.
    """
    return dtype.itemsize == 2


@functools.cache
def num_sms(device: torch.device) -> int:
    """A GPU's streaming multiprocessors; in the interpreter those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def shape(kernel: str, q: Tensor, v: Tensor) -> Shape:
    """The tiles of a kernel for these queries [B, S, Hq, Dk] and values [B, T, Hkv, Dv]."""
    return fit(kernel, architecture.of(q.device), q.shape[2] // v.shape[2], q.shape[3], v.shape[3], q.dtype)


def masked_launch(kernel: str, q: Tensor, v: Tensor) -> MaskedLaunch | None:
    """The launch of "forward", "backward_q" or "backward_kv" in `selected_masked.py`; None where there is none."""
    of_width, excess = width(q.shape[3], v.shape[3], q.dtype)
    return table(architecture.of(q.device)).masked.get(of_width, {}).get(kernel) if excess == 1 else None


def masked_shape(kernel: str, q: Tensor, v: Tensor) -> Shape:
    """The tiles of that launch, which there must be."""
    launch = masked_launch(kernel, q, v)
    assert launch is not None, kernel
    group, capability = q.shape[2] // v.shape[2], architecture.of(q.device)
    return _masked_shape(kernel, launch, capability, group, q.shape[3], v.shape[3], q.dtype)


def rows_per_token(rows: int, group: int) -> int:
    """The heads of a group, padded to a power of two where a tile of so many rows holds no more tokens without."""
    padded_group = next_power_of_2(group)
    return group if rows // group > rows // padded_group else padded_group


def rows_first(capability: int, rows: int, num_warps: int, dtype: torch.dtype) -> bool:
    """Whether kernels that write dk and dv do better with p and ds as [rows, keys] than as [keys, rows].

    In a product of Hopper's a thread holds two of the first side and a quarter of the second. With rows first it needs
    lse and delta of two rows in place of a quarter of all. That is sooner, although p and ds go through shared memory
    to be transposed, where each warp has 16 rows of its own; where it has none, later. Measured on Hopper with 16-bit
    types alone (others use no such product); the interpreter takes both.
    """
    of_warpgroups = capability in architecture.WGMMA and (capability == 0 or dtype.itemsize == 2)
    return of_warpgroups and rows >= MIN_DOT * num_warps


@functools.cache
def _masked_shape(
    kernel: str, launch: MaskedLaunch, capability: int, group: int, dk: int, dv: int, dtype: torch.dtype
) -> Shape:
    rows = max(launch.rows, padded(group))
    in_tile = group if f"compressed_window_{kernel}" in CUT_GROUPS else rows_per_token(rows, group)
    sizes = rows, in_tile, launch.keys, *padded_channels(dk, dv)
    by_row = rows_first(capability, rows, launch.num_warps, dtype)
    return Shape(*sizes, launch.num_warps, launch.num_stages, launch.max_registers, rows_first=by_row)


def fit(kernel: str, capability: int, group: int, dk: int, dv: int, dtype: torch.dtype) -> Shape:
    """Tiles of the table, made smaller as far as head sizes and dtype make rows wider than the tables assume, and for
    float32 (`has_tiles_of_its_own`)."""
    tables, shared_kib = table(capability), architecture.shared_kib(capability)
    asked = kernel, capability, group, dk, dv, dtype, shared_kib
    found = tables.shapes.get(asked)
    if found is None:
        found = tables.shapes[asked] = _fit(tables, *asked)
    return found


def _fit(
    tables: Table, kernel: str, capability: int, group: int, dk: int, dv: int, dtype: torch.dtype, shared_kib: int
) -> Shape:
    padded_group, (padded_k, padded_v) = next_power_of_2(group), padded_channels(dk, dv)
    of_width, excess = width(dk, dv, dtype)
    halved = capability != 0 and not has_tiles_of_its_own(dtype)  # the interpreter has no registers
    if of_width == "wide" and (excess > 1 or halved or kernel not in tables.wide):
        of_width, excess = "narrow", 2 * excess
    excess *= 2 if halved else 1
    tuned = tables.of(kernel, of_width, group)
    rows, keys = max(tuned.rows // excess, MIN_DOT), max(tuned.keys // excess, MIN_DOT)
    more = padded_group // rows
    as_measured = excess == 1 and more <= 1
    launch = (tuned.num_warps, tuned.num_stages, tuned.max_registers) if excess == 1 else (4, 2, None)
    if more > 1:  # a tile holds a group at least, and keys make up for its rows
        rows, keys, launch = padded_group, max(keys // more, MIN_DOT), (4, 1, None)
    value_stages = tuned.value_stages or launch[1]
    # where products do not take them from shared memory, q and do stand there for masked and for other loops apart
    twice_kib = 2 * rows * (padded_k + padded_v) * dtype.itemsize / 1024
    stretches = 1 if twice_kib > 2 / 3 * shared_kib else 3
    # by row takes more shared memory: 128 heads of 256 need 288 KiB, and Hopper has 227
    by_row = as_measured and kernel in BY_ROW_OR_BY_KEY and rows_first(capability, rows, launch[0], dtype)
    if kernel in CUT_GROUPS:
        in_tile = group
    elif kernel == "selected_kv_major" or by_row:
        in_tile = rows_per_token(rows, group)
    else:  # Scores are summed over a group, which takes a power of two. By key a thread would have to know of many rows
        in_tile = padded_group  # which head they are of: 5 and 12 heads of 128 took 8 % longer so.
    return Shape(rows, in_tile, keys, padded_k, padded_v, *launch, value_stages, stretches, by_row)

"""Which Triton kernel serves which call, and why; `nsa.backends` decides before whether this backend does.

`why_not` says whether the backend serves a call at all. `variant` then picks from `TABLE`, which lists the kernels of a
computation in order of preference: the first whose condition holds takes the call, and the last serves every call.
"""

from __future__ import annotations

import enum
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa.triton_backend import architecture, block_unions, hopper, traffic, tuning
from nsa.triton_backend.tuning import next_power_of_2

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)

KV_MAJOR_MIN_QUERIES = 2048  # below, the sort costs more than it saves
MASKED_MIN_QUERIES = 1024  # below, too few tiles keep the GPU busy
MASKED_MAX_BLOCKS = 64  # the bits of a mask
SHARED_MIN_QUERIES = 1024  # below, too few tiles keep the GPU busy
SHARED_MAX_CHOSEN = 32  # by a query; the blocks of a tile are compared with one another
SHARING_TOKENS = {
    "selected_forward": block_unions.FORWARD_TOKENS,
    "selected_backward_q": block_unions.DQ_TOKENS,
}
"""Queries of a tile that shares its blocks."""
KV_MAJOR_MAX_BLOCK_BYTES = 48 * 2**10  # of keys and values, which stay in shared memory
MOST_PLANNED_BYTES = 16 * 2**20
"""Of queries, and of keys, of a call that goes by a plan (`planned.py`): from some 10,000 tokens of 12 heads of 64 on,
the GPU takes longer than the host."""
TMA_ALIGNMENT = 16  # bytes, of addresses and steps (CUDA driver API, cuTensorMapEncodeTiled)


class Variant(enum.Enum):
    """Where the kernel of a computation stands."""

    PLAIN = "compressed_window.py, scores.py, selected.py"
    MASKED = "selected_masked.py"
    HOPPER = "hopper/"
    KV_MAJOR = "selected_kv_major.py"
    SHARED = "hopper/shared_blocks.py, hopper/shared_blocks_dq.py"


@dataclass(frozen=True)
class SelectionBlocks:
    """The selection blocks of a call, or of the whole sequence of which it is a part."""

    size: int
    """Tokens of a block, l'."""
    forced_share: float = 0.0
    """Of a query's blocks, those that are forced."""
    count: int = 0
    """Blocks that there are."""
    chosen: int = 0
    """Of them by a query, n."""
    packed: bool = False
    """Whether they are of several documents."""
    sequence_tokens: int | None = None
    """`Layout.sequence_tokens`."""


NO_BLOCKS = SelectionBlocks(0)


class Call(NamedTuple):
    """What the choice of a kernel depends on."""

    computation: str
    q: Tensor
    """[B, S, Hq, Dk]"""
    k: Tensor
    """[B, T, Hkv, Dk]"""
    v: Tensor
    """[B, T, Hkv, Dv]"""
    blocks: SelectionBlocks
    """Selection blocks, where they matter."""

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.v.shape[2]

    @property
    def lengths(self) -> tuple[int, int]:
        """(queries, keys), of the whole sequence where this is a part of one."""
        whole = self.blocks.sequence_tokens
        return (self.q.shape[1], self.k.shape[1]) if whole is None else (whole, whole)


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    variant: Variant
    serves: Callable[[Call], bool]
    why: str
    """What makes it the faster kernel where it serves."""


def _any(call: Call) -> bool:
    return True


def _hopper(call: Call) -> bool:
    return hopper_serves(call.computation, call.group, call.k, call.v)


def _hopper_backward_kv(call: Call) -> bool:
    """TMA reads queries too. Plans launch nothing with TMA, so that short calls with heads of 64 are left out."""
    return _hopper(call) and readable_by_tma(call.q) and not _goes_by_plan(call)


def _goes_by_plan(call: Call) -> bool:
    """Whether the call, or the whole sequence of which it is a part, is short enough for a plan, which launches no
    kernel of `hopper/`: with heads below 128, of which those kernels take the backward pass alone."""
    (queries, keys), q, k = call.lengths, call.q, call.k
    elements = max(q.numel() // max(q.shape[1], 1) * queries, k.numel() // max(k.shape[1], 1) * keys)
    return elements * q.itemsize <= MOST_PLANNED_BYTES and q.shape[3] < hopper.CHANNELS


def _hopper_selected(call: Call) -> bool:
    """A group must fit in its 16 rows, and its tiles must fill a block."""
    if tuning.padded(call.group) != tuning.MIN_DOT or not _hopper(call):
        return False
    return call.blocks.size % tuning.shape(f"hopper.{call.computation}", call.q, call.v).keys == 0


def _hopper_selected_kv(call: Call) -> bool:
    """Its tile of keys must be a block. Threads copy rows of queries 16 bytes at a time."""
    if not _hopper(call) or not readable_by_tma(call.q) or _goes_by_plan(call):
        return False
    return call.blocks.size == tuning.shape(f"hopper.{call.computation}", call.q, call.v).keys


def _shared(call: Call) -> bool:
    """A block must be a tile, and the heads of the queries that share it a tile's rows."""
    kernel = call.computation.replace("selected", "shared_blocks")
    if not hopper_serves(kernel, call.group, call.k, call.v) or call.blocks.packed:
        return False
    shape = tuning.shape(f"hopper.{kernel}", call.q, call.v)
    fits = tuning.padded(call.group) * SHARING_TOKENS[call.computation] == shape.rows and call.blocks.size == shape.keys
    return fits and call.lengths[0] >= SHARED_MIN_QUERIES and call.blocks.chosen <= SHARED_MAX_CHOSEN


def _masked(call: Call, *kernels: str) -> bool:
    """A step of keys, whose number is a power of two, must lie in one block, and all blocks in one mask."""
    blocks, (queries, keys) = call.blocks, call.lengths
    launches = [tuning.masked_launch(kernel, call.q, call.v) for kernel in kernels]
    short = queries >= MASKED_MIN_QUERIES and all(
        launch is not None and keys <= launch.max_keys and call.group <= launch.max_group for launch in launches
    )
    whole_steps = blocks.size >= tuning.MIN_DOT and blocks.size == next_power_of_2(blocks.size)
    return short and whole_steps and not blocks.packed and blocks.count <= MASKED_MAX_BLOCKS


def _masked_forward(call: Call) -> bool:
    return _masked(call, "forward")


def _masked_backward(call: Call) -> bool:
    return _masked(call, "backward_q", "backward_kv")


def _kv_major_forward(call: Call) -> bool:
    if call.lengths[0] < KV_MAJOR_MIN_QUERIES or not sooner_by_block(call, backward=False):
        return False
    shape = tuning.shape("selected_kv_major", call.q, call.v)
    block_bytes = tuning.padded(call.blocks.size) * (shape.dk + shape.dv) * call.q.element_size()
    return block_bytes <= KV_MAJOR_MAX_BLOCK_BYTES


def _kv_major_dq(call: Call) -> bool:
    one_tile = call.blocks.size <= tuning.shape("selected_backward_kv", call.q, call.v).keys
    return one_tile and sooner_by_block(call, backward=True)


def sooner_by_block(call: Call, *, backward: bool) -> bool:
    """Whether the selected branch waits less for bytes with the loop over blocks of keys (`traffic.py`)."""
    return traffic.sooner_by_block(*_traffic(call), backward=backward)


def max_shared_blocks(computation: str, q: Tensor, k: Tensor, v: Tensor, blocks: SelectionBlocks) -> int | None:
    """How many blocks a tile of queries may have to share them; None where it is faster for all tiles to do so."""
    call, memory = _traffic(Call(computation, q, k, v, blocks))
    most = traffic.max_shared_blocks(call, memory, blocks.chosen, backward=computation == "selected_backward_q")
    return None if traffic.expected_union(call, blocks.chosen, SHARING_TOKENS[computation]) <= most else most


def _traffic(call: Call) -> tuple[traffic.SelectedCall, traffic.MemorySystem]:
    dk, dv, (queries, keys) = call.q.shape[3], call.v.shape[3], call.lengths
    seen = traffic.SelectedCall(
        call.group, dk, dv, call.q.element_size(), call.blocks.size, queries, keys, call.blocks.forced_share
    )
    return seen, traffic.memory_system(call.q.device, architecture.of(call.q.device))


_SHORT = "most of what a query sees is chosen: no index, no sort, every key once for a tile of queries"
_ON_HOPPER = "TMA brings the next tiles while warpgroups multiply these"
_ALIKE = "what several neighbouring queries chose is brought once"
TABLE = {
    "compressed_window_forward": (
        Rule(Variant.HOPPER, _hopper, _ON_HOPPER),
        Rule(Variant.PLAIN, _any, "a tile of queries takes the keys that any of them sees"),
    ),
    "compressed_window_backward_q": (
        Rule(Variant.HOPPER, _hopper, _ON_HOPPER),
        Rule(Variant.PLAIN, _any, "a tile of queries takes the keys that any of them sees"),
    ),
    "compressed_window_backward_kv": (
        Rule(Variant.HOPPER, _hopper_backward_kv, _ON_HOPPER),
        Rule(Variant.PLAIN, _any, "a tile of keys takes the queries that see any of them"),
    ),
    "scores": (
        Rule(Variant.HOPPER, _hopper, _ON_HOPPER),
        Rule(Variant.PLAIN, _any, "a tile of queries takes the blocks that any of them sees"),
    ),
    "selected_forward": (
        Rule(Variant.MASKED, _masked_forward, _SHORT),
        Rule(Variant.KV_MAJOR, _kv_major_forward, "each block is read once: small groups, or an L2 that holds no head"),
        Rule(Variant.SHARED, _shared, _ALIKE),
        Rule(Variant.HOPPER, _hopper_selected, _ON_HOPPER),
        Rule(Variant.PLAIN, _any, "the heads of a group share each key; nothing is sorted"),
    ),
    "selected_kv_major": (
        Rule(
            Variant.HOPPER,
            _hopper_selected_kv,
            "the next queries are copied, and their scores multiplied, beside the softmax of these",
        ),
        Rule(Variant.KV_MAJOR, _any, "a program takes the queries of one block, however they come"),
    ),
    "selected_backward_q": (
        Rule(Variant.MASKED, _masked_backward, _SHORT),
        Rule(Variant.KV_MAJOR, _kv_major_dq, "the same; dk and dv read the blocks anyway, and dq comes along"),
        Rule(Variant.SHARED, _shared, f"{_ALIKE}; tiles of too many blocks go by query, as in hopper/selected.py"),
        Rule(Variant.HOPPER, _hopper_selected, _ON_HOPPER),
        Rule(Variant.PLAIN, _any, "the heads of a group share each key; no partial dq goes through memory"),
    ),
    "selected_backward_kv": (
        Rule(Variant.MASKED, _masked_backward, _SHORT),
        Rule(
            Variant.HOPPER,
            _hopper_selected_kv,
            "by block too; the scores of the next queries are multiplied while these are summed",
        ),
        Rule(Variant.KV_MAJOR, _any, "a block's queries are only known from the inverted index; no atomics"),
    ),
}
"""By computation, its kernels in order of preference."""


def variant(computation: str, q: Tensor, k: Tensor, v: Tensor, blocks: SelectionBlocks = NO_BLOCKS) -> Variant:
    """The kernel for q [B, S, Hq, Dk], k [B, T, Hkv, Dk], v [B, T, Hkv, Dv] and these selection blocks."""
    call = Call(computation, q, k, v, blocks)
    return next(rule.variant for rule in TABLE[computation] if rule.serves(call))


def hopper_serves(computation: str, group: int, k: Tensor, v: Tensor) -> bool:
    """Whether a kernel of `hopper/` can be launched for groups of so many heads and these keys and values [B, T, H, D].

    That takes a version of Triton that was tried, a launch in the architecture's table ("hopper.scores", ..., measured
    with 16 heads per group), and 16-bit heads of 128 (192 of keys; 64 for dk and dv), that TMA can read where they lie.
    """
    dk, dv = k.shape[3], v.shape[3]
    if not hopper.AVAILABLE or dk not in hopper.CHANNELS_OF_KEYS or interpreted():
        return False
    if dv != (dk if computation == "scores" else min(dk, hopper.CHANNELS)):
        return False
    if not readable_by_tma(k) or not readable_by_tma(v):
        return False
    name, (width, _) = f"hopper.{computation}", tuning.width(dk, dv, k.dtype)
    table = tuning.table(architecture.of(k.device))
    return name in getattr(table, width) and next_power_of_2(group) <= table.of(name, width, group).rows


def readable_by_tma(x: Tensor) -> bool:
    """Whether TMA can read it where it lies."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return False
    *strides, of_channel = x.stride()
    steps = [stride * x.itemsize for stride, size in zip(strides, x.shape[:3], strict=True) if size > 1]
    unreadable = [step for step in steps if step <= 0 or step % TMA_ALIGNMENT]
    return x.numel() > 0 and of_channel == 1 and x.data_ptr() % TMA_ALIGNMENT == 0 and not unreadable


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on any device and slowly."""
    if knobs := getattr(triton, "knobs", None):
        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0") == "1"  # before Triton 3.4


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Why the backend cannot serve these tensors, or None if it can."""
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is not float32, bfloat16 or float16"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"head sizes {q.shape[-1]} and {v.shape[-1]}: at most {MAX_HEAD_DIM} is supported"
    return _why_not_here(q.device, q.dtype)


def _why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this machine cannot serve; asked once per graph where one is traced."""
    if interpreted():
        has_bfloat16 = hasattr(importlib.import_module("triton.runtime.interpreter").InterpreterBuilder, "get_bf16")
        lacks = dtype == torch.bfloat16 and not has_bfloat16
        return "dtype torch.bfloat16 is not in Triton's interpreter" if lacks else None
    if device.type != "cuda":
        return f"device {device} is not an NVIDIA GPU (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return None


def has_hopper_kernels(device: torch.device) -> bool:
    """Whether kernels of `hopper/` can be launched there at all; asked once per graph where one is traced."""
    tables = tuning.table(architecture.of(device)).narrow
    return hopper.AVAILABLE and not interpreted() and any(name.startswith("hopper.") for name in tables)


# as torch.compiler.assume_constant_result marks it, which would import the compiler: half of what importing nsa costs
_why_not_here._dynamo_marked_constant = has_hopper_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]

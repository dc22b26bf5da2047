"""Rows of queries that stand anywhere in the sequence, copied by threads (`cp.async`) to tiles in shared memory.

TMA copies boxes of adjacent rows only. A tile here holds all heads of one query, then all heads of the next, for any
group size; only behind the last query are there rows without one.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from nsa.triton_backend.hopper.tile import thread_barrier

ALIGNED = gl.constexpr(8)
"""Elements of 16 bits per copy. Kernels are given strides divided by it, so that the compiler knows the alignment."""


@jit
def queries_of(pairs_base, number, pairs, N: gl.constexpr, G: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """(query, head in its group, whether there is one) of each row of the `number`-th tile."""
    row = number * ROWS + gl.arange(0, ROWS, layout)
    real = row // G < pairs
    return gl.load(pairs_base + row // G, mask=real, other=0) // N, row % G, real


@jit
def partly_seen(pairs_base, pairs, to_own, N: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr):
    """How many of a block's queries do not see all of its BN keys: query i sees the first i + to_own of them.

    Queries ascend, so that these are the first ones, which stand inside the block: BN of them at most.
    """
    place = gl.arange(0, BN, layout)
    first = gl.load(pairs_base + place, mask=place < pairs, other=0) // N
    return gl.sum(((place < pairs) & (first + to_own < BN)).to(gl.int32), 0)


@jit
def gather(base, offsets, real, slot, layout: gl.constexpr):
    """Begin to copy rows at base + offsets to a tile [rows, channels]; those that are not `real` become 0."""
    channel = gl.arange(0, slot.shape[1], gl.SliceLayout(0, layout))
    pointers = base + (gl.expand_dims(offsets, 1) + gl.expand_dims(channel, 0))
    async_copy.async_copy_global_to_shared(slot, pointers, gl.expand_dims(real, 1))


@jit
def wait_for_all_but(GROUPS: gl.constexpr):
    """Wait for the copies of all tiles but the last ones that were asked for, and make them visible to products."""
    async_copy.wait_group(GROUPS)
    fence_async_shared()  # by each thread for what it copied, and only then may any of them multiply
    thread_barrier()

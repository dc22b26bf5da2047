"""Which keys of a tile a row sees, and what is done about those that are not finite."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from nsa.triton_backend.hopper.ring import tile, wait


@jit
def stretches(first, end, all_from, all_to, STEP: gl.constexpr):
    """(tiles, the first that all rows see the whole of, the first after those) of `first` … `end`."""
    tiles = gl.cdiv(gl.maximum(end - first, 0), STEP)
    some = gl.minimum(gl.cdiv(gl.maximum(all_from - first, 0), STEP), tiles)
    return tiles, some, some + gl.maximum(gl.minimum(all_to, end) - first - some * STEP, 0) // STEP


@jit
def good_keys(good_base, HKV, at, T, BN: gl.constexpr, layout: gl.constexpr):
    """Whether each key at <= key < at + BN is finite; behind the last there are zeros, which are."""
    key = at + gl.arange(0, BN, layout)
    return gl.load(good_base + key.to(gl.int64) * HKV, mask=key < T, other=1) != 0


@jit
def visible_keys(at, lo, hi, BN: gl.constexpr, layout: gl.constexpr):
    """[rows, keys]: which of the keys at <= key < at + BN each row sees."""
    key = gl.expand_dims(at + gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
    return (key >= gl.expand_dims(lo, 1)) & (key < gl.expand_dims(hi, 1))


@jit
def any_bad(good):
    """Whether any key (or row) is not finite; seldom is there one."""
    return gl.min(good.to(gl.int32), 0) == 0


@jit
def blank(slots, full, number, STAGES: gl.constexpr, good, layout: gl.constexpr):
    """Wait for a tile and make its rows 0 that are not `good`: 0 · NaN would reach who does not see them."""
    wait(full, number, STAGES)
    there = tile(slots, number, STAGES)
    x = there.load(layout)
    there.store(gl.where(gl.expand_dims(good, 1), x, 0.0).to(x.dtype))
    fence_async_shared()

"""What Hopper's kernels share: a ring of tiles that TMA brings, and `tile.py` again in Gluon.

Each slot of the ring lies in shared memory and has a barrier that says when its tile is there. Loads, softmax and masks
are those of `nsa.triton_backend.tile`, where each value says how it lies in registers.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction, jit
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nsa.triton_backend.hopper import CHANNELS
from nsa.triton_backend.launching import relaunch
from nsa.triton_backend.tile import LENGTHS, LN2, with_settled_key

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # before Triton 3.7
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class _Kernel(GluonJITFunction):  # type: ignore[misc] # Triton has no types
    def run(self, *arguments, grid, **options):
        """Launch; descriptors are made anew for each launch, so that its arguments do not suffice to repeat it."""
        if relaunch.thread.recorder is not None:
            relaunch.thread.recorder.launched(None, grid, None)
        return super().run(*arguments, grid=grid, **options)


def kernel(function):
    """`gluon.jit`, compiled once for all lengths; see `nsa.triton_backend.tile.kernel`."""
    return with_settled_key(_Kernel(function, do_not_specialize=LENGTHS))


@functools.cache
def _shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[dtype])


def descriptor(x: Tensor, tokens: int, heads: int = 1) -> TensorDescriptor:
    """How TMA reads tiles [1, tokens, heads, D] of x [B, T, H, D]; what lies outside is 0."""
    sizes, channels = list(x.shape), x.shape[3]
    # where there is only one, its step means nothing and may be one that TMA does not take
    steps = [step if size > 1 else channels for size, step in zip(sizes[:3], x.stride()[:3], strict=True)]
    box = (1, tokens, heads, channels)
    return TensorDescriptor(x, sizes, [*steps, 1], list(box), _shared_layout(box, x.dtype))


def descriptors(x: Tensor, tokens: int, heads: int = 1) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of the first CHANNELS channels of x and of the remaining ones; None if there are none."""
    if x.shape[3] <= CHANNELS:
        return descriptor(x, tokens, heads), None
    return descriptor(x[..., :CHANNELS], tokens, heads), descriptor(x[..., CHANNELS:], tokens, heads)


@jit
def ring(source, STAGES: gl.constexpr):
    """(slots, barriers) for tiles of a descriptor."""
    block: gl.constexpr = source.block_type.shape
    slots = gl.allocate_shared_memory(source.dtype, [STAGES] + block, source.layout)  # noqa: RUF005 - no * in kernels
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    return slots, full


@jit
def fetch(source, b, token, head, slots, full, number, STAGES: gl.constexpr, wanted):
    """Begin to bring the tile at [b, token, head], the `number`-th of the ring, if it is `wanted`.

    It overwrites the tile `number` - STAGES: the products that read that one must have been waited for. Where threads
    have loaded it, `fence_async_shared` must stand between: neither the next instructions nor a barrier wait for loads
    that are on their way, and TMA writes by a path of its own: it may overwrite a tile before all of it is read.
    """
    slot = number % STAGES
    mbarrier.expect(full.index(slot), source.block_type.nbytes, wanted)
    tma.async_copy_global_to_shared(source, [b, token, head, 0], full.index(slot), slots.index(slot), wanted)


@jit
def start(source, b, first, head, slots, full, STAGES: gl.constexpr, tiles, STEP: gl.constexpr):
    """Begin to bring the first STAGES of `tiles` tiles, which follow each other from the token `first` on."""
    for number in gl.static_range(STAGES):
        fetch(source, b, first + number * STEP, head, slots, full, number, STAGES, number < tiles)


@jit
def wait(full, number, STAGES: gl.constexpr, wanted=True):
    """Wait for the `number`-th tile. A slot's barrier changes its phase, 0 or 1, with each tile that the slot takes."""
    mbarrier.wait(full.index(number % STAGES), (number // STAGES) & 1, wanted)


@jit
def slots_of(source, STAGES: gl.constexpr):
    """Slots of a ring for tiles of a descriptor, where a producer brings them."""
    block: gl.constexpr = source.block_type.shape
    return gl.allocate_shared_memory(source.dtype, [STAGES] + block, source.layout)  # noqa: RUF005 - no * in kernels


@jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, a phase of each of which ends with so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@jit
def bring(source, b, token, head, slots, full, empty, number, STAGES: gl.constexpr):
    """As `fetch`, by a producer, which waits for the slot's `empty` barrier: no load of the tile that stood there may
    be on its way, nor a product that reads it."""
    slot = number % STAGES
    wait_until_empty(empty, number, STAGES)
    mbarrier.expect(full.index(slot), source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [b, token, head, 0], full.index(slot), slots.index(slot))


@jit
def wait_until_empty(empty, number, STAGES: gl.constexpr):
    """Wait until the slot of the `number`-th tile has been given back; each slot begins empty."""
    mbarrier.wait(empty.index(number % STAGES), ((number // STAGES) & 1) ^ 1)


@jit
def release(full, STAGES: gl.constexpr):
    """Invalidate barriers that are waited for before a loop only, once the loop has ended.

    The compiler uses their memory again after the last wait, which PTX forbids while they are valid. Barriers that the
    loop waits for need no release: what follows it takes the memory of the tiles.
    """
    for slot in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(slot))


@jit
def tile(slots, number, STAGES: gl.constexpr):
    """[rows, channels] of the `number`-th tile [1, tokens, heads, channels], heads of a token side by side."""
    slot = slots.index(number % STAGES)
    return slot.reshape([slot.shape[1] * slot.shape[2], slot.shape[3]])


@jit
def shared(x):
    """x [rows, channels] as an operand in shared memory.

    A product needs `fence_async_shared` between: it reads shared memory by another path than the threads' stores take.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(x.shape, x.dtype)
    return gl.allocate_shared_memory(x.dtype, x.shape, layout, x)


@jit
def softmax(s, m, l, to_base_2):
    """(p, alpha, m, l): the probabilities of s [rows, keys] before normalisation, the factor of the sums so far, and
    the running row max and row sum; `tile.online_softmax` without its product.

    m is kept unscaled. alpha is exactly 1 where m stays, so that keys which a row does not see leave its sums bit for
    bit as they were. exp2((m - safe) * to_base_2) is exact too, but with it ptxas starts the exponentials of a thread's
    first row only after the max of its second, which costs up to 1.5 % of the branch.
    """
    m_new = gl.maximum(m, gl.max(s, 1))
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * to_base_2 - gl.expand_dims(safe * to_base_2, 1))
    alpha = gl.where(m == m_new, 1.0, gl.exp2(m * to_base_2 - safe * to_base_2))
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@jit
def finish(m, l, to_base_2, nonfinite_rows):
    """(factor of the sums, lse base e) of each row, as `tile.finish`."""
    safe_l = gl.where(l == 0.0, 1.0, l)
    lse = gl.where(l == 0.0, float("-inf"), (m * to_base_2 + gl.log2(safe_l)) * LN2)
    return gl.where(nonfinite_rows, float("nan"), 1.0 / safe_l), gl.where(nonfinite_rows, float("nan"), lse)


@jit
def nonfinite(x):
    """For each row, whether anything in it is not finite."""
    return gl.max((~(gl.abs(x.to(gl.float32)) < float("inf"))).to(gl.int32), 1) > 0


@jit
def rows_of(first, S, G, BT: gl.constexpr, GP: gl.constexpr, layout: gl.constexpr):
    """(token, head in its group, whether there is one) of each row of a tile of BT tokens × GP heads."""
    row = gl.arange(0, BT * GP, layout)
    token, head = (first + row // GP).to(gl.int64), row % GP
    return token, head, (token < S) & (head < G)


@jit
def rows_of_tile(tile, S, G, ROWS: gl.constexpr, GP: gl.constexpr, layout: gl.constexpr):
    """As `rows_of`, of tile number `tile` of the rows of all tokens: `nsa.triton_backend.tile.rows_of_tile`."""
    if ROWS % GP == 0:
        token, head, real = rows_of(tile * (ROWS // GP), S, G, ROWS // GP, GP, layout)
    else:
        row = tile * ROWS + gl.arange(0, ROWS, layout)
        token, head = (row // GP).to(gl.int64), row % GP
        real = token < S
    return token, head, real


@jit
def tokens_of_tile(tile, S, ROWS: gl.constexpr, GP: gl.constexpr):
    """(the first token of such a tile, the last one)."""
    if ROWS % GP == 0:
        first = tile * (ROWS // GP)
        last = gl.minimum(first + ROWS // GP, S) - 1
    else:
        first = tile * ROWS // GP
        last = gl.minimum((tile * ROWS + ROWS - 1) // GP, S - 1)
    return first, last


@jit
def load_rows(base, offsets, inside, D: gl.constexpr, layout: gl.constexpr):
    """[rows, D] at base + offsets, 0 where not `inside`."""
    channel = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = base + (gl.expand_dims(offsets, 1) + gl.expand_dims(channel, 0))
    return gl.load(pointers, mask=gl.expand_dims(inside, 1), other=0.0)


@jit
def store_rows(base, offsets, inside, x, D: gl.constexpr, layout: gl.constexpr):
    """Write [rows, D] where `inside`, side by side."""
    x = gl.convert_layout(x.to(base.dtype.element_ty), layout)
    channel = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = base + (gl.expand_dims(offsets, 1) + gl.expand_dims(channel, 0))
    gl.store(pointers, x, mask=gl.expand_dims(inside, 1))


@jit
def _gate(GATES, row, BRANCH: gl.constexpr, inside):
    return gl.expand_dims(gl.load(GATES + (row * 3 + BRANCH), mask=inside, other=0.0).to(gl.float32), 1)


@jit
def gated(GATES, row, inside, o_cmp, o_sel, o_win):
    """`nsa.triton_backend.gated_sum.gated`, with its fused multiplications."""
    total = _gate(GATES, row, 0, inside) * o_cmp.to(gl.float32)
    total = gl.fma(_gate(GATES, row, 1, inside), o_sel.to(gl.float32), total)
    return gl.fma(_gate(GATES, row, 2, inside), o_win.to(gl.float32), total)


@jit
def store_dq(DQ, DQ_CMP, DQ_WIN, row, inside, dq, D: gl.constexpr, flat: gl.constexpr):
    """Write D channels of dq; add dq of the other branches if given, as `tile.add_branches`."""
    dq = gl.convert_layout(dq.to(DQ.dtype.element_ty), flat)
    if DQ_CMP is not None:
        total = dq.to(gl.float32) + load_rows(DQ_CMP, row, inside, D, flat).to(gl.float32)
        dq = total + load_rows(DQ_WIN, row, inside, D, flat).to(gl.float32)
    store_rows(DQ, row, inside, dq, D, flat)


@jit
def stretches(first, end, all_from, all_to, STEP: gl.constexpr):
    """(tiles, the first that all rows see the whole of, the first after those) of `first` … `end`."""
    tiles = gl.cdiv(gl.maximum(end - first, 0), STEP)
    some = gl.minimum(gl.cdiv(gl.maximum(all_from - first, 0), STEP), tiles)
    return tiles, some, some + gl.maximum(gl.minimum(all_to, end) - first - some * STEP, 0) // STEP


@jit
def finite_keys(finite_base, HKV, at, T, BN: gl.constexpr, layout: gl.constexpr):
    """Whether each key at <= key < at + BN is finite; behind the last there are zeros, which are."""
    key = at + gl.arange(0, BN, layout)
    return gl.load(finite_base + key.to(gl.int64) * HKV, mask=key < T, other=1) != 0


@jit
def visible_keys(at, lo, hi, BN: gl.constexpr, layout: gl.constexpr):
    """[rows, keys]: which of the keys at <= key < at + BN each row sees."""
    key = gl.expand_dims(at + gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
    return (key >= gl.expand_dims(lo, 1)) & (key < gl.expand_dims(hi, 1))


@jit
def any_nonfinite(finite):
    """Whether any key (or row) is not finite; that is rare."""
    return gl.min(finite.to(gl.int32), 0) == 0


@jit
def zero_rows(slots, full, number, STAGES: gl.constexpr, finite, layout: gl.constexpr):
    """Wait for a tile and make its rows 0 that are not `finite`."""
    wait(full, number, STAGES)
    zero_rows_of(tile(slots, number, STAGES), finite, layout)


@jit
def zero_rows_of(there, finite, layout: gl.constexpr):
    """Make the rows 0 of a tile [rows, channels] that are not `finite`: 0 · NaN would reach queries that do not see
    them."""
    x = there.load(layout)
    there.store(gl.where(gl.expand_dims(finite, 1), x, 0.0).to(x.dtype))
    fence_async_shared()

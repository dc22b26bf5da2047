"""What the kernels share: loading rows of a tile, and what is done about non-finite values.

Where a tile holds keys that some of its rows may not see, and only there, a product must not meet what is not finite,
since 0 · NaN is NaN. There such keys and rows are not loaded, and so 0; the rows that see such a key turn NaN through
their scores, and the keys that such a row sees through its lse. To check each tile for what is not finite would cost
six times what its products do: keys are checked once (`launch.finite_keys`), and rows have an lse that is NaN.
"""

from __future__ import annotations

from types import ModuleType

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from nsa.triton_backend.launching import relaunch

LN2 = tl.constexpr(0.6931471805599453)
LENGTHS = (
    "S", "T", "SLOTS", "WIDTH", "ahead", "cells", "cells_of_chunk", "chunk", "count", "documents", "first",
    "first_cell", "first_query", "first_slot", "k_count", "max_blocks", "max_shared", "num_rows", "num_tokens",
    "of_cells", "pairs", "rows", "slots", "splits", "tiles", "total", "v_count",
)  # fmt: skip
"""Arguments of kernels that change from call to call with the lengths."""


def kernel(function):
    """`triton.jit`, compiled once for all lengths.

    Triton compiles a kernel anew where a number becomes 1, or turns from a multiple of 16 into none. Of strides and
    pointers it must know that, or no load is as wide as it could be; a length tells it nothing that it could use.
    """
    jitted = triton.jit(function, do_not_specialize=LENGTHS)
    if type(jitted) is JITFunction and relaunch.SERVES:
        jitted = relaunch.Kernel(function, LENGTHS)
    return with_settled_key(jitted)


def with_settled_key(jitted):
    """The function, with the cache keys of all that it calls computed, the innermost first.

    Triton 3.6 and 3.7 merge the constants that a callee uses into the caller's key before they know the callee's own.
    Whether they are part of it would then depend on which kernel a process launches first, and a kernel that one
    process has compiled would not be found by another.
    """
    if isinstance(jitted, JITFunction) and isinstance(load_rows, JITFunction):  # the interpreter has no keys
        for callee in _callees(jitted):
            _ = with_settled_key(callee).cache_key
    return jitted


def _callees(jitted):
    """What a function of Triton's calls, as far as it is one too: by name, or as an attribute of a module."""
    scope, names = jitted.fn.__globals__, jitted.fn.__code__.co_names
    direct = [scope.get(name) for name in names]
    modules = [found for found in direct if isinstance(found, ModuleType) and found is not tl]
    inside = [getattr(module, name, None) for module in modules for name in names]
    return [found for found in (*direct, *inside) if isinstance(found, JITFunction) and found is not jitted]


@triton.jit
def load_rows(base, offsets, inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of `SIZE` contiguous channels at base + offsets, 0 where not `inside` (None: all are).

    In a loop, what changes belongs into `base`: the sums of 32-bit offsets are then computed once.
    """
    channel = tl.arange(0, PADDED)
    pointers = base + (offsets[:, None] + channel[None, :])
    if SIZE == PADDED:  # a mask that is always true still costs its predicates
        mask = None if inside is None else inside[:, None]
    else:
        mask = (channel < SIZE)[None, :] if inside is None else inside[:, None] & (channel < SIZE)[None, :]
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(base, offsets, inside, x, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write [rows, PADDED] where `inside`."""
    channel = tl.arange(0, PADDED)
    pointers = base + offsets[:, None] + channel[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=inside[:, None] & (channel < SIZE)[None, :])


@triton.jit
def add_branches(dq, DQ_CMP, DQ_WIN, row, real, DQ, D: tl.constexpr, DP: tl.constexpr):
    """dq of the selected branch [rows, channels] in float32, and those of the other branches, if these are not None.

    Rounded to DQ's type before the sum, as where a kernel of its own adds: the branches add up to the same bits.
    """
    if DQ_CMP is not None:
        dq = dq.to(DQ.dtype.element_ty).to(tl.float32)
        dq += load_rows(DQ_CMP, row * D, real, D, DP).to(tl.float32)
        dq += load_rows(DQ_WIN, row * D, real, D, DP).to(tl.float32)
    return dq


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def nonfinite(x):
    """For each row, whether anything in it is not finite."""
    return tl.max((~is_finite(x)).to(tl.int32), axis=1) > 0


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; float32 operands stay float32 (no tf32)."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def product(a, b):
    """a @ b^T in float32."""
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def scores_of(rows, keys, ROWS_FIRST: tl.constexpr):
    """rows @ keys^T in float32: [rows, keys] or, not ROWS_FIRST, [keys, rows] (`tuning.Shape.rows_first`)."""
    return product(rows, keys) if ROWS_FIRST else product(keys, rows)


@triton.jit
def per_row(x, ROWS_FIRST: tl.constexpr):
    """x [rows], to be broadcast to the shape of `scores_of`."""
    return x[:, None] if ROWS_FIRST else x[None, :]


@triton.jit
def per_key(x, ROWS_FIRST: tl.constexpr):
    """x [keys], to be broadcast to the shape of `scores_of`."""
    return x[None, :] if ROWS_FIRST else x[:, None]


@triton.jit
def transposed(x, WANTED: tl.constexpr):
    """x transposed where that is WANTED, else x."""
    return tl.trans(x) if WANTED else x


@triton.jit
def rows_of(first, S, G, ROWS: tl.constexpr, GP: tl.constexpr):
    """(token, head in its group, whether there is one) of each row of a tile of ROWS // GP tokens × GP heads.

    GP is the group G, padded, or G itself; where it does not divide ROWS, the rows at the end are idle.
    """
    row = tl.arange(0, ROWS)
    token, head = (first + row // GP).to(tl.int64), row % GP
    # where no head is padding, to compare heads all the same took up to 77 registers
    return token, head, (token < S) & (head < G if ROWS % GP == 0 else row < ROWS // GP * GP)


@triton.jit
def rows_of_tile(tile, S, G, ROWS: tl.constexpr, GP: tl.constexpr):
    """As `rows_of`, of tile number `tile` of the rows of all tokens: it may begin and end inside a group.

    So a tile begins at a multiple of ROWS rows, whatever the group: pieces of a sequence that begin at multiples of
    ROWS tokens (`parallel.plan.GRID`) have the tiles of the whole, and its bits. Only rows behind the last token, and
    of heads that are padding, are idle.
    """
    if ROWS % GP == 0:
        token, head, real = rows_of(tile * (ROWS // GP), S, G, ROWS, GP)
    else:
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = (row // GP).to(tl.int64), row % GP
        real = token < S
    return token, head, real


@triton.jit
def online_softmax(s, v, m, l, acc, to_base_2):
    """Add the scores s [rows, keys] and values v [keys, Dv] to the running softmax; `to_base_2` > 0 scales scores.

    `to_base_2` is scale · log2(e): a GPU has an instruction for 2^x, and none for e^x. Its sign matters, since the
    maximum is taken before it is applied.
    m is the row max, l the row sum, alpha the factor of the sums so far. m is kept scaled and rounded, so that alpha is
    exactly 1 where m stays. Scaled here, the compiler makes m * to_base_2 - safe one fused step, which gives the
    rounding error of the product: every further step then multiplied what was there by 1 + 1e-7, and float32 ended 4
    times further from float64 than PyTorch.
    """
    m_new = tl.maximum(m, tl.max(s, axis=1) * to_base_2)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet: -inf - -inf would be NaN
    p = tl.exp2(s * to_base_2 - safe[:, None])
    alpha = tl.exp2(m - safe)
    l = l * alpha + tl.sum(p, axis=1)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, l, acc


@triton.jit
def finish(m, l, acc, nonfinite_rows):
    """(o, lse base e) of a running softmax; 0 and -inf for a row that saw no key, NaN for `nonfinite_rows`.

    These are the rows whose query is not finite and which saw a key. They are set right here, and not through
    their query, because Hopper multiplies straight from shared memory only what was loaded and left alone.
    """
    safe_l = tl.where(l == 0.0, 1.0, l)  # acc is 0 there, and 0 / 0 would be NaN
    lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(safe_l)) * LN2)
    o = acc * (1.0 / safe_l)[:, None]
    return tl.where(nonfinite_rows[:, None], float("nan"), o), tl.where(nonfinite_rows, float("nan"), lse)

"""What the kernels share: loading rows of a tile, and what is done about non-finite values.

Where a tile holds keys that some of its rows may not see, and only there, a product must not meet what is
not finite, since 0 · NaN is NaN: a key whose value is not finite gets a NaN key and a zero value, so that just the
rows that see it turn NaN, through their scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, offsets, inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of `SIZE` contiguous channels at base + offsets, 0 where not `inside` (None: all are)."""
    channel = tl.arange(0, PADDED)
    pointers = base + offsets[:, None] + channel[None, :]
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
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def finite(x):
    """x with 0 in place of every NaN and infinity."""
    return tl.where(is_finite(x), x, 0.0)


@triton.jit
def mark(x, cause):
    """x with NaN in every row in which `cause` is not finite."""
    bad = tl.max((~is_finite(cause)).to(tl.int32), axis=1) > 0
    return tl.where(bad[:, None], float("nan"), x)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; float32 operands stay float32 (no tf32)."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def product(a, b):
    """a @ b^T in float32."""
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def rows_of(first, S, G, BT: tl.constexpr, GP: tl.constexpr):
    """(token, head in its group, whether there is one) of each row of a tile of BT tokens × GP heads."""
    row = tl.arange(0, BT * GP)
    token, head = (first + row // GP).to(tl.int64), row % GP
    return token, head, (token < S) & (head < G)


@triton.jit
def online_softmax(s, v, top, total, acc, to_base_2):
    """Add the scores s [rows, keys] and values v [keys, Dv] to the running softmax; `to_base_2` > 0 scales scores."""
    new_top = tl.maximum(top, tl.max(s, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top) * to_base_2
    p = tl.exp2(s * to_base_2 - safe[:, None])
    shrink = tl.exp2(top * to_base_2 - safe)
    total = total * shrink + tl.sum(p, axis=1)
    acc = dot(p.to(v.dtype), v, acc * shrink[:, None])
    return new_top, total, acc


@triton.jit
def finish(top, total, acc, to_base_2):
    """(o, lse base e) of a running softmax; 0 and -inf for a row that saw nothing."""
    something = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (top * to_base_2 + tl.log2(something)) * LN2)
    return acc / something[:, None], lse

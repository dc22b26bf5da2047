"""What tiles of `compressed_window.py` see: intervals of keys, under a mask of blocks where there is one."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.triton_backend.tile import load_rows, rows_of

CHECKED = tl.constexpr(1024)  # flags, or rows, that are looked at together


@triton.jit
def stretches(first, last, all_from, all_to, STEP: tl.constexpr):
    """Ends of the first two of three stretches of `first` … `last`; the second, in whole steps, lies inside
    `all_from` … `all_to`."""
    some = first + tl.cdiv(tl.maximum(all_from - first, 0), STEP) * STEP
    return some, some + tl.maximum(tl.minimum(all_to, last) - some, 0) // STEP * STEP


@triton.jit
def are_finite_keys(finite_base, HKV, first, end, BN: tl.constexpr):
    """Whether each of the keys first <= key < first + BN is finite and before `end`."""
    key = first + tl.arange(0, BN)
    return tl.load(finite_base + key.to(tl.int64) * HKV, mask=key < end, other=0) != 0


@triton.jit
def all_finite(finite_base, HKV, first, end, BN: tl.constexpr):
    """Whether all keys first <= key < end are finite; BN at a time."""
    some = tl.zeros([BN], tl.int32)
    for at in range(first, end, BN):
        key = at + tl.arange(0, BN)
        some |= (tl.load(finite_base + key.to(tl.int64) * HKV, mask=key < end, other=1) == 0).to(tl.int32)
    return tl.max(some, axis=0) == 0


@triton.jit
def all_loaded(lse_base, first, end, HQ, G, GP: tl.constexpr, ROWS: tl.constexpr):
    """Whether no query first <= i < end has an lse of NaN; ROWS rows at a time."""
    some = tl.zeros([ROWS], tl.int32)
    for at in range(first, end, ROWS // GP):
        token, g, real = rows_of(at, end, G, ROWS, GP)
        lse = tl.load(lse_base + token * HQ + g, mask=real, other=0.0)
        some |= (lse != lse).to(tl.int32)
    return tl.max(some, axis=0) == 0


@triton.jit
def load_keys(k_base, k_s, v_base, v_s, first, loaded, DK: tl.constexpr, DKP: tl.constexpr,
          DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """(k, v) of the keys first <= key < first + BN, 0 where not `loaded` (None: all are)."""
    place, at = tl.arange(0, BN), tl.cast(first, tl.int64)
    k = load_rows(k_base + at * k_s, place * k_s, loaded, DK, DKP)
    return k, load_rows(v_base + at * v_s, place * v_s, loaded, DV, DVP)


@triton.jit
def within(key, lo, hi):
    """Whether lo <= key < hi, of int32 with lo <= hi, in idle rows too: one comparison, since a negative difference is
    a large unsigned number.

    Two comparisons combined with AND cost up to five instructions for each pair whose product is not there yet, as
    their result is kept in registers until then.
    """
    return (key - lo).to(tl.uint32) < (hi - lo).to(tl.uint32)


@triton.jit
def visible_keys(first, lo, hi, BN: tl.constexpr):
    """[rows, keys]: which of the keys first <= key < first + BN each row sees."""
    return within(first + tl.arange(0, BN)[None, :], lo[:, None], hi[:, None])


@triton.jit
def masked_pair(p, ds, key, lo, hi, ROWS_FIRST: tl.constexpr):
    """(p, ds) of the pairs with lo <= key < hi, 0 elsewhere; all broadcast to one shape (`tile.scores_of`).

    Masked after the exponential, which may overflow for a pair that is not seen, since lse does not bound it. Rows
    first: ds is masked where p is 0, so that no register holds the mask until ds is there. p of a pair that is seen may
    be 0 too, but only where its query, key, upstream gradient and delta are finite (`launch.backward_row`), so that ds
    is 0; where do · v alone overflows, it is 0 and not NaN. Keys first: the mask is kept, as dk and dv of compressed
    attention took 3 % longer by p (40/8 heads of 128, H200).
    """
    if ROWS_FIRST:
        p = tl.where(within(key, lo, hi), p, 0.0)
        ds = tl.where(p == 0.0, 0.0, ds)
    else:
        visible = (key >= lo) & (key < hi)
        p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
    return p, ds


@triton.jit
def interval_of(LO, HI, token, real, ahead):
    """(lo, hi) of each token; where LO and HI are None, all keys up to its own."""
    if LO is None:
        hi = tl.where(real, (token + ahead + 1).to(tl.int32), 0)
        lo = tl.zeros_like(hi)
    else:
        lo, hi = tl.load(LO + token, mask=real, other=0), tl.load(HI + token, mask=real, other=0)
    return lo, hi


@triton.jit
def key_range(LO, HI, first_token, last_token, ahead, BN: tl.constexpr):
    """(first key, end, ends of the first two stretches) of a tile of tokens; one stretch where LO and HI are None."""
    if LO is None:
        first, end = tl.zeros_like(first_token), last_token + ahead + 1
        some, most = end, end
    else:
        first, end = tl.load(LO + first_token), tl.load(HI + last_token)
        some, most = stretches(first, end, tl.load(LO + last_token), tl.load(HI + first_token), BN)
    return first, end, some, most


@triton.jit
def among_chosen(bits, key, SIZE: tl.constexpr):
    """For each row's bit mask of blocks, whether it has the one of `key`, which is the same for a whole step."""
    return ((bits >> tl.cast(key // SIZE, tl.int64)) & 1) != 0

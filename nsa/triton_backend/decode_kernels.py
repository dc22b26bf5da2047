"""The kernels of a decode step, in the order of their launches; `decode.py` launches them.

1. `_compressed`: the compressed branch, each sequence's blocks split among several programs. A program writes the
   partial output of its split, and the scores, which the choice of blocks needs once the whole softmax is known.
2. `_group_probabilities` and 3. `_choose`: the choice of blocks (Eq. 8 to 12). Scores become probabilities, summed over
   the heads of a group, by as many programs as there are scores to read; then one program per query and group takes
   the n best. Where there are few scores, that program computes the probabilities too, and launch 2 is left out. What
   is added up, in which order, and how the best are found is what the prefill does (`scores.py`, `topk.py`).
4. `_selected_window`: the selected blocks and the window of each query, both split among several programs.
5. `_merge`: the partial outputs of each branch become its output, and the branches their gated sum (Eq. 5).

How many tokens there are is one number, or read from the device for each sequence (LENGTHS).

Launches 2 to 5 are programmatic dependent launches where PDL says so (compute capability 9.0 and later): a kernel
begins once all programs of the one before have begun, and `wait` stops it until all of that one is written. So ahead of
`wait` a kernel reads only what no launch of the step writes, such as q, and writes only what no earlier launch reads.
Two things make that enough. Some programs of each launch wait (of launch 4 those of the selected blocks), so that no
launch ends before all earlier ones have. And launch 1 is an ordinary one: it begins when all that came before has
ended, such as the cache's write and whatever used the same memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.triton_backend.tile import LN2, kernel, load_rows, nonfinite, online_softmax, product, rows_of, store_rows
from nsa.triton_backend.topk import best

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton
    gdc_launch_dependents = gdc_wait = None

HAS_PDL = gdc_wait is not None
SCORES = 8192  # at most, per tile of probabilities
THREADS = tl.constexpr(128)  # of a program that makes probabilities


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next launch begin once all programs of this one have come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the launch before has ended, and those before it."""
    if PDL:
        gdc_wait()


@triton.jit
def tokens_of(LENGTHS, num_tokens, b):
    """Of sequence b: `num_tokens` where LENGTHS is None."""
    return num_tokens if LENGTHS is None else tl.load(LENGTHS + b)


@triton.jit
def load_keys(
    K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h, first, place, inside,
    PAGE: tl.constexpr, WHOLE: tl.constexpr,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """(k [rows, Dk], v [rows, Dv]) of the rows first + place of sequence b and head h, 0 where not `inside`.

    PAGE is the rows in a page, 0 if there are no pages; WHOLE says that these rows never leave one page. `inside` is
    None where all are.
    """
    if PAGE == 0 or WHOLE:
        outer = b if PAGE == 0 else tl.load(TABLE + b * table_b + first // PAGE).to(tl.int64)
        row = tl.cast(first if PAGE == 0 else first % PAGE, tl.int64)
        k = load_rows(K + h * k_h + outer * k_o + row * k_r, place * k_r, inside, DK, DKP)
        v = load_rows(V + h * v_h + outer * v_o + row * v_r, place * v_r, inside, DV, DVP)
    else:
        at = TABLE + b * table_b + (first + place) // PAGE
        pages = (tl.load(at) if inside is None else tl.load(at, mask=inside, other=0)).to(tl.int64)
        rows = (first + place) % PAGE
        k = load_rows(K + h * k_h, pages * k_o + rows * k_r, inside, DK, DKP)
        v = load_rows(V + h * v_h, pages * v_o + rows * v_r, inside, DV, DVP)
    return k, v


@triton.jit
def visible_blocks(t, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """How many compressed blocks token t sees: those that end at or before it."""
    return tl.where(t + 1 < SIZE, 0, (t + 1 - SIZE) // STRIDE + 1)


@triton.jit
def store_partial(O_PART, LSE_PART, row, real, m, l, acc, nonfinite_rows, DV: tl.constexpr, DVP: tl.constexpr):
    """Write a split's output, and its lse base 2: -inf where it saw no key, NaN for `nonfinite_rows`."""
    safe_l = tl.where(l == 0.0, 1.0, l)
    lse = tl.where(l == 0.0, float("-inf"), m + tl.log2(safe_l))
    store_rows(O_PART, row * DV, real, acc * (1.0 / safe_l)[:, None], DV, DVP)
    tl.store(LSE_PART + row, tl.where(nonfinite_rows, float("nan"), lse), mask=real)


@kernel
def _compressed(
    Q, K, V, TABLE, LENGTHS, num_tokens, SCORES, O_PART, LSE_PART, READ, q_b, q_s, q_h,
    table_b, k_o, k_r, k_h, v_o, v_r, v_h, S, HQ, HKV, G, slots, splits, to_base_2,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """SCORES [B, S, Hq, slots] base 2, O_PART [B, S, Hq, splits, Dv], LSE_PART [B, S, Hq, splits] base 2, READ
    [B, S, Hkv, splits]."""
    launch_dependents(PDL)
    first_token, split = tl.program_id(0) // splits * BT, tl.program_id(0) % splits
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i, g, real = rows_of(first_token, S, G, BT * GP, GP)
    before = tokens_of(LENGTHS, num_tokens, b) - S  # tokens that stand before the queries
    seen = visible_blocks(before + i.to(tl.int32), SIZE, STRIDE)
    end = visible_blocks(before + tl.minimum(first_token + BT, S) - 1, SIZE, STRIDE)
    per_split = tl.cdiv(tl.cdiv(end, BN), splits) * BN
    first = split * per_split
    stop = tl.minimum(end, first + per_split)
    q = load_rows(Q + b * q_b, i * q_s + (h * G + g) * q_h, real, DK, DKP)
    row = (b * S + i) * HQ + h * G + g

    m, l = tl.full([BT * GP], float("-inf"), tl.float32), tl.zeros([BT * GP], tl.float32)
    acc, place = tl.zeros([BT * GP, DVP], tl.float32), tl.arange(0, BN)
    seen_by_all = visible_blocks(before + first_token, SIZE, STRIDE)
    whole = first if ALONE else first + tl.maximum(tl.minimum(seen_by_all, stop) - first, 0) // BN * BN
    # first the tiles that every query sees whole, then the rest; one query sees all that it reads: one loop, no check
    for stretch in tl.static_range(1 if ALONE else 0, 2):
        for at in range(first if stretch == 0 else whole, whole if stretch == 0 else stop, BN):
            block = at + place
            inside = block < stop
            k, v = load_keys(K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h, at, place,
                             None if stretch == 0 else inside, PAGE, PAGE % BN == 0, DK, DKP, DV, DVP)  # fmt: skip
            s = product(q, k)
            scored = real[:, None] if stretch == 0 else real[:, None] & inside[None, :]
            tl.store(SCORES + row[:, None] * slots + block[None, :], s * to_base_2, mask=scored)
            if stretch == 1:
                if not ALONE:  # a query that does not see a block must not meet what is not finite in it
                    finite = ~(nonfinite(k) | nonfinite(v))
                    v = tl.where(finite[:, None], v, 0.0)
                    s = tl.where(finite[None, :], s, float("nan"))
                s = tl.where(block[None, :] < tl.minimum(seen, stop)[:, None], s, float("-inf"))
            m, l, acc = online_softmax(s, v, m, l, acc, to_base_2)
    read = tl.minimum(tl.maximum(seen - first, 0), tl.maximum(stop - first, 0))
    store_partial(O_PART, LSE_PART, row * splits + split, real, m, l, acc, nonfinite(q) & (read > 0),
                  DV, DVP)  # fmt: skip
    tl.store(READ + ((b * S + i) * HKV + h) * splits + split, read, mask=real & (g == 0))


@triton.jit
def _probabilities(
    S_CMP, LSE_PART, row, seen, first, splits, slots, G, GP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """[BN] probabilities of the blocks first … first + BN, 0 where a query does not see them: summed over the heads of
    a group, whose scores begin at `row`.

    One thread adds all heads of a block, so that their order, and the bits, are the same in tiles of every length.
    """
    # as many scores as a thread reads at once: with four in a shorter tile, heads would be spread over threads
    AT_ONCE: tl.constexpr = 4 if BN >= 4 * THREADS else 1
    slots = slots // AT_ONCE * AT_ONCE  # `decode.SLOTS` is a multiple of it, which the compiler does not know
    g, split, block = tl.arange(0, GP), tl.arange(0, SPLITS), first + tl.arange(0, BN)
    part = tl.load(LSE_PART + row * splits + (g[:, None] * splits + split[None, :]),
                   mask=(g < G)[:, None] & (split < splits)[None, :], other=float("-inf"))  # fmt: skip
    shown = (g < G)[:, None] & (block < seen)[None, :]
    seen_in_part = block // AT_ONCE * AT_ONCE < seen  # all or none of what is read at once; `slots` leaves room
    s = tl.load(S_CMP + row * slots + (g[:, None] * slots + block[None, :]),
                mask=(g < G)[:, None] & seen_in_part[None, :], other=0.0)  # fmt: skip
    m = tl.max(part, axis=1)
    m = tl.where(m == float("-inf"), 0.0, m)
    lse = m + tl.log2(tl.sum(tl.exp2(part - m[:, None]), axis=1))
    return tl.sum(tl.where(shown, tl.exp2(s - lse[:, None]), 0.0), axis=0)


@kernel
def _group_probabilities(
    S_CMP, LSE_PART, LENGTHS, num_tokens, P, S, HQ, HKV, G, slots, splits, tiles,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """P float32 [B, S, Hkv, slots] of the scores S_CMP [B, S, Hq, slots], base 2, written for the blocks that a query
    sees."""
    launch_dependents(PDL)
    i, first = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BN
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    seen = visible_blocks(tokens_of(LENGTHS, num_tokens, b) - S + tl.program_id(0) // tiles, SIZE, STRIDE)
    wait(PDL)
    if first < seen:
        p = _probabilities(S_CMP, LSE_PART, (b * S + i) * HQ + h * G, seen, first, splits, slots, G, GP, BN, SPLITS)
        block = first + tl.arange(0, BN)
        tl.store(P + ((b * S + i) * HKV + h) * slots + block, p, mask=block < seen)


@kernel
def _choose(
    P, S_CMP, LSE_PART, LENGTHS, num_tokens, OUT, S, HQ, HKV, G, slots, splits,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, SEL: tl.constexpr, FIRST_OFFSET: tl.constexpr, WEIGHTS: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCKS: tl.constexpr,
    GP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUT int32 [B, S, Hkv, N], ascending, -1 at the end. Where P is None, the scores fit in one tile, and
    their probabilities are computed here."""
    launch_dependents(PDL)
    i, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tokens_of(LENGTHS, num_tokens, b) - S + tl.program_id(0)
    seen, block = visible_blocks(t, SIZE, STRIDE), tl.arange(0, BLOCKS)
    row = (b * S + i) * HKV + h
    wait(PDL)
    score = tl.zeros([BLOCKS], tl.float32)
    if P is None:
        p = _probabilities(S_CMP, LSE_PART, (b * S + i) * HQ + h * G, seen, 0, splits, slots, G, GP, BN, SPLITS)
        p = tl.reshape(p, [BLOCKS, SEL // STRIDE])
        stride = tl.arange(0, SEL // STRIDE)[None, :]
        for offset in tl.static_range(FIRST_OFFSET, FIRST_OFFSET + len(WEIGHTS)):
            own = tl.sum(tl.where(stride == offset % (SEL // STRIDE), p, 0.0), axis=1)
            if offset < 0:  # of the block before
                own = tl.where(block > 0, tl.gather(own, tl.maximum(block - 1, 0), axis=0), 0.0)
            score += WEIGHTS[offset - FIRST_OFFSET] * own
    else:
        for offset in tl.static_range(FIRST_OFFSET, FIRST_OFFSET + len(WEIGHTS)):
            c = block * (SEL // STRIDE) + offset
            score += WEIGHTS[offset - FIRST_OFFSET] * tl.load(
                P + row * slots + c, mask=(c >= 0) & (c < seen), other=0.0
            )
    score = tl.where(score == score, score, 0.0)  # the bits of a NaN would rank above a forced block
    taken = best(score[None, :], block, tl.full([1], 0, tl.int32) + t // SEL, INIT, LOCAL, N)

    out = OUT + row * N
    position = tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(out + position, tl.broadcast_to(block[None, :], [1, BLOCKS]), mask=taken)
    column, found = tl.arange(0, NP), tl.minimum(t // SEL + 1, N)  # all that are visible, at most N
    tl.store(out + column, tl.full([NP], -1, tl.int32), mask=(column >= found) & (column < N))


@triton.jit
def _tile(q, first, lo, hi, K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h, m, l, acc, to_base_2,
          PAGE: tl.constexpr, WHOLE: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr,
          DVP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Attention over those of the keys first … first + BN that lie in lo … hi; the others are not even loaded."""
    place = tl.arange(0, BN)
    visible = (first + place >= lo) & (first + place < hi)
    k, v = load_keys(K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h, first, place, visible,
                     PAGE, WHOLE, DK, DKP, DV, DVP)  # fmt: skip
    s = tl.where(visible[None, :], product(q, k), float("-inf"))
    m, l, acc = online_softmax(s, v, m, l, acc, to_base_2)
    return m, l, acc, tl.maximum(tl.minimum(first + BN, hi) - tl.maximum(first, lo), 0)


@kernel
def _selected_window(
    Q, K, V, TABLE, WINDOW_K, WINDOW_V, WINDOW_TABLE, BLOCKS, LENGTHS, num_tokens, O_PART, LSE_PART, READ,
    q_b, q_s, q_h, table_b, k_o, k_r, k_h, v_o, v_r, v_h, window_b, wk_o, wk_r, wk_h, wv_o, wv_r, wv_h,
    S, HQ, HKV, G, to_base_2,
    SEL: tl.constexpr, N: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr, WINDOW_PAGE: tl.constexpr,
    SELECTED_SPLITS: tl.constexpr, WINDOW_SPLITS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """O_PART [B, S, Hq, splits, Dv], LSE_PART [B, S, Hq, splits] base 2, READ [B, S, Hkv, splits]: first the selected
    branch's splits, then the window's."""
    launch_dependents(PDL)
    splits: tl.constexpr = SELECTED_SPLITS + WINDOW_SPLITS
    # the window's programs come first, since they need not wait for the choice
    split, i = (tl.program_id(0) + SELECTED_SPLITS) % splits, (tl.program_id(0) // splits).to(tl.int64)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tokens_of(LENGTHS, num_tokens, b) - S + tl.program_id(0) // splits
    g = tl.arange(0, GP)
    real = g < G
    q = load_rows(Q + b * q_b + i * q_s, (h * G + g) * q_h, real, DK, DKP)
    nonfinite_q = nonfinite(q)  # ahead of `wait`, where it costs nothing
    m, l = tl.full([GP], float("-inf"), tl.float32), tl.zeros([GP], tl.float32)
    acc, read = tl.zeros([GP, DVP], tl.float32), tl.zeros([], tl.int32)
    if split < SELECTED_SPLITS:
        steps: tl.constexpr = (SEL + BN - 1) // BN
        per_split: tl.constexpr = (N * steps + SELECTED_SPLITS - 1) // SELECTED_SPLITS
        chosen = BLOCKS + ((b * S + i) * HKV + h) * N
        wait(PDL)
        for step in range(split * per_split, tl.minimum(split * per_split + per_split, N * steps)):
            block = tl.load(chosen + step // steps)
            lo = tl.maximum(block, 0) * SEL
            hi = tl.where(block < 0, 0, tl.minimum(lo + SEL, t + 1))
            m, l, acc, more = _tile(
                q, lo + step % steps * BN, lo, hi, K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h,
                m, l, acc, to_base_2, PAGE, SEL % BN == 0, DK, DKP, DV, DVP, BN,
            )  # fmt: skip
            read += more
    else:
        lo = tl.maximum(t - W + 1, 0)
        begin = lo // BN * BN
        window_per_split = tl.cdiv(tl.cdiv(t + 1 - begin, BN), WINDOW_SPLITS) * BN
        first = begin + (split - SELECTED_SPLITS) * window_per_split
        for at in range(first, tl.minimum(first + window_per_split, t + 1), BN):
            m, l, acc, more = _tile(
                q, at, lo, t + 1, WINDOW_K, WINDOW_V, WINDOW_TABLE, window_b, wk_o, wk_r, wk_h, wv_o, wv_r, wv_h, b, h,
                m, l, acc, to_base_2, WINDOW_PAGE, WINDOW_PAGE % BN == 0, DK, DKP, DV, DVP, BN,
            )  # fmt: skip
            read += more
    row = ((b * S + i) * HQ + h * G + g) * splits + split
    store_partial(O_PART, LSE_PART, row, real, m, l, acc, nonfinite_q & (read > 0), DV, DVP)
    tl.store(READ + ((b * S + i) * HKV + h) * splits + split, read)


@triton.jit
def _load_parts(O_PART, LSE_PART, first, count, channel, inside, DV: tl.constexpr, SPLITS: tl.constexpr):
    """(o [SPLITS, Dv], lse base 2 [SPLITS]) of a row's `count` splits from `first` on."""
    split = tl.arange(0, SPLITS)
    lse = tl.load(LSE_PART + first + split, mask=split < count, other=float("-inf"))
    there = (split < count)[:, None] & inside[None, :]
    return tl.load(O_PART + (first + split)[:, None] * DV + channel[None, :], mask=there, other=0.0), lse


@triton.jit
def _join(o, lse):
    """(o [Dv], lse base e) of one row's splits; 0 and -inf where none saw a key."""
    m = tl.max(lse, axis=0)
    m = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2(lse - m)
    l = tl.sum(weight, axis=0)
    # what a split without a key has written adds nothing, and NaN is in the weight
    o = tl.where((lse > float("-inf"))[:, None], o, 0.0)
    safe_l = tl.where(l == 0.0, 1.0, l)
    o = tl.sum(weight[:, None] * o, axis=0) * (1.0 / safe_l)
    return o, tl.where(l == 0.0, float("-inf"), (m + tl.log2(safe_l)) * LN2)


@kernel
def _merge(
    O_CMP, LSE_CMP, O_SEL_WIN, LSE_SEL_WIN, GATES, OUT, LSE, gate_b, gate_s, gate_h, gate_n, S, HQ, rows, splits,
    SELECTED_SPLITS: tl.constexpr, WINDOW_SPLITS: tl.constexpr, CMP: tl.constexpr, SEL: tl.constexpr, WIN: tl.constexpr,
    DV: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUT [B, S, Hq, Dv] and LSE [3, B, S, Hq]; a program per row (b, s, head) and CHANNELS channels."""
    row = tl.program_id(0).to(tl.int64)
    both: tl.constexpr = SELECTED_SPLITS + WINDOW_SPLITS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < DV
    gates = GATES + row // (S * HQ) * gate_b + row // HQ % S * gate_s + row % HQ * gate_h
    gate_cmp, gate_sel, gate_win = tl.load(gates), tl.load(gates + gate_n), tl.load(gates + 2 * gate_n)
    wait(PDL)
    # all loads come before the first sum, so that they are on their way together
    o_cmp, lse_cmp = _load_parts(O_CMP, LSE_CMP, row * splits, splits, channel, inside, DV, CMP)
    o_sel, lse_sel = _load_parts(O_SEL_WIN, LSE_SEL_WIN, row * both, SELECTED_SPLITS, channel, inside, DV, SEL)
    o_win, lse_win = _load_parts(
        O_SEL_WIN, LSE_SEL_WIN, row * both + SELECTED_SPLITS, WINDOW_SPLITS, channel, inside, DV, WIN
    )
    o_cmp, lse_cmp = _join(o_cmp, lse_cmp)
    o_sel, lse_sel = _join(o_sel, lse_sel)
    o_win, lse_win = _join(o_win, lse_win)
    # each branch is rounded as the prefill stores it
    kept = OUT.dtype.element_ty
    acc = gate_cmp.to(tl.float32) * o_cmp.to(kept).to(tl.float32)
    acc += gate_sel.to(tl.float32) * o_sel.to(kept).to(tl.float32)
    acc += gate_win.to(tl.float32) * o_win.to(kept).to(tl.float32)
    tl.store(OUT + row * DV + channel, acc.to(kept), mask=inside)
    first = tl.program_id(1) == 0
    tl.store(LSE + row, lse_cmp, mask=first)
    tl.store(LSE + rows + row, lse_sel, mask=first)
    tl.store(LSE + 2 * rows + row, lse_win, mask=first)

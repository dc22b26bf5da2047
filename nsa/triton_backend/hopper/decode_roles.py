"""The roles of the warps of a decode step in one launch (`decode.py`): producer, selector and consumer."""

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from nsa.triton_backend.hopper.tile import bring, thread_barrier, wait
from nsa.triton_backend.tile import LN2
from nsa.triton_backend.topk import best


@jit
def _bring_kv(K, V, TABLE, table_b, b, h, first, number, k_slots, k_full, k_empty, v_slots, v_full, v_empty,
              PAGE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Bring keys and values of the rows from `first` on, side by side or in pages."""
    outer, row = b, first
    if PAGE > 0:
        outer, row = gl.load(TABLE + b * table_b + first // PAGE), first % PAGE
    bring(K, outer, row, h, k_slots, k_full, k_empty, number, STAGES)
    bring(V, outer, row, h, v_slots, v_full, v_empty, number, STAGES)


@jit
def producer(
    K, V, TABLE, table_b, SELECTED_K, SELECTED_V, SELECTED_TABLE, selected_b, WINDOW_K, WINDOW_V, WINDOW_TABLE,
    window_b, chosen, b, h, num_tiles, begin, num_window_tiles,
    k_slots, k_full, k_empty, v_slots, v_full, v_empty, chosen_ready,
    PAGE: gl.constexpr, SELECTED_PAGE: gl.constexpr, WINDOW_PAGE: gl.constexpr, SEL: gl.constexpr, N: gl.constexpr,
    NP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for i in range(0, num_tiles):
        _bring_kv(K, V, TABLE, table_b, b, h, i * BN, i,
                  k_slots, k_full, k_empty, v_slots, v_full, v_empty, PAGE, STAGES)  # fmt: skip
    for i in range(0, num_window_tiles):
        _bring_kv(WINDOW_K, WINDOW_V, WINDOW_TABLE, window_b, b, h, begin + i * BN, num_tiles + i,
                  k_slots, k_full, k_empty, v_slots, v_full, v_empty, WINDOW_PAGE, STAGES)  # fmt: skip
    mbarrier.wait(chosen_ready, 0)
    blocks, place, number = _load_chosen(chosen, N, NP)
    for i in range(0, number * (SEL // BN)):
        first = _first_key(blocks, place, i, SEL, BN)
        _bring_kv(SELECTED_K, SELECTED_V, SELECTED_TABLE, selected_b, b, h, first, num_tiles + num_window_tiles + i,
                  k_slots, k_full, k_empty, v_slots, v_full, v_empty, SELECTED_PAGE, STAGES)  # fmt: skip


@jit
def _load_chosen(chosen, N: gl.constexpr, NP: gl.constexpr):
    """(blocks [NP], their places, how many there are)."""
    place = gl.arange(0, NP, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    blocks = gl.load(chosen + place, mask=place < N, other=-1)
    return blocks, place, gl.sum((blocks >= 0).to(gl.int32), 0)


@jit
def _first_key(blocks, place, i, SEL: gl.constexpr, BN: gl.constexpr):
    """The first key of the i-th tile of the chosen blocks, which stay in registers: no load in the loop."""
    block = gl.sum(gl.where(place == i // (SEL // BN), blocks, 0), 0)
    return block * SEL + i % (SEL // BN) * BN


@jit
def _store_probabilities(P, s, lse, first, seen, layout: gl.constexpr):
    """Of the blocks from `first` on, of scores [GP, blocks]: summed over the heads of the group (Eq. 10)."""
    block = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    gl.store(P + block, gl.sum(gl.exp2(s - lse), 0), mask=block < seen)


@jit
def selector(
    P, chosen, scores, lse_slot, lse_ready, held_ready, held_loaded, chosen_ready, t, seen, num_tiles,
    STRIDE: gl.constexpr, SEL: gl.constexpr, FIRST_OFFSET: gl.constexpr, WEIGHTS: gl.constexpr, INIT: gl.constexpr,
    LOCAL: gl.constexpr, N: gl.constexpr, NP: gl.constexpr, BLOCKS: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
    KEPT: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    # a thread has all heads of a block: nothing is exchanged to add them
    by_block: gl.constexpr = gl.BlockedLayout([GP, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    held = ()
    if HELD > 0:
        mbarrier.wait(held_ready, 0)
        for pair in gl.static_range(HELD // 2):
            held = held + (scores.index(pair).load(by_block),)  # type: ignore[assignment] # noqa: RUF005 - no * in kernels
        mbarrier.arrive(held_loaded)
    mbarrier.wait(lse_ready, 0)
    lse = gl.expand_dims(lse_slot.load(gl.SliceLayout(1, by_block)), 1)
    for pair in gl.static_range(HELD // 2):
        _store_probabilities(P, held[pair], lse, pair * 2 * BN, seen, by_block)
    for pair in range(HELD // 2, gl.cdiv(num_tiles, 2)):
        s = scores.index(pair % (KEPT // 2)).load(by_block)
        _store_probabilities(P, s, lse, pair * 2 * BN, seen, by_block)
    thread_barrier()

    row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, row))
    score = gl.zeros([BLOCKS], gl.float32, gl.SliceLayout(0, row))
    for offset in gl.static_range(len(WEIGHTS)):
        c = block * (SEL // STRIDE) + (FIRST_OFFSET + offset)
        score += WEIGHTS[offset] * gl.load(P + c, mask=(c >= 0) & (c < seen), other=0.0)
    score = gl.where(score == score, score, 0.0)  # the bits of a NaN would rank above a forced block
    current = gl.full([1], 0, gl.int32, gl.SliceLayout(1, row)) + t // SEL
    taken = best(gl.expand_dims(score, 0), block, current, INIT, LOCAL, N)
    position = tl.cumsum(taken.to(gl.int32), axis=1) - 1
    gl.store(chosen + position, gl.expand_dims(block, 0), mask=taken)
    place = gl.arange(0, NP, gl.SliceLayout(0, row))
    none = (place >= gl.sum(gl.sum(taken.to(gl.int32), 1), 0)) & (place < N)
    gl.store(chosen + place, gl.full([NP], -1, gl.int32, gl.SliceLayout(0, row)), mask=none)
    thread_barrier()  # all of them have stored, before one says so
    mbarrier.arrive(chosen_ready)


@jit
def _release_slot(empty, number, STAGES: gl.constexpr):
    """Give a tile's slot back. The fence is explained at `tile.fetch`."""
    fence_async_shared()
    mbarrier.arrive(empty.index(number % STAGES))


@jit
def _scores(q, k_slots, k_full, k_empty, number, to_base_2, W: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
            STAGES: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """[W, GP, BN / W] base 2, of the keys that each warp has of a tile."""
    wait(k_full, number, STAGES)
    slot = k_slots.index(number % STAGES)
    k = slot.reshape([W, BN // W, slot.shape[3]]).permute((0, 2, 1)).load(gl.DotOperandLayout(1, mma, 2))
    s = mma_v2(q, k, gl.zeros([W, GP, BN // W], gl.float32, mma))
    _release_slot(k_empty, number, STAGES)
    return s * to_base_2


@jit
def _keys(at, W: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr):
    """[W, BN / W]: the keys of each warp, of a tile whose first is `at`; `layout` is of such a matrix."""
    warp = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, layout)), 1)
    return at + warp * (BN // W) + gl.expand_dims(gl.arange(0, BN // W, gl.SliceLayout(0, layout)), 0)


@jit
def _add(s, v_slots, v_full, v_empty, number, at, lo, hi, m, l, acc,
         W: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """Add a tile of scores and values to the running softmax, of the keys in [lo, hi)."""
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    whole = (at >= lo) & (at + BN <= hi)
    if not whole:
        key = _keys(at, W, BN, gl.SliceLayout(1, mma))
        s = gl.where(gl.expand_dims((key >= lo) & (key < hi), 1), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 2))
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - gl.expand_dims(safe, 2))
    alpha = gl.exp2(m - safe)
    l = l * alpha + gl.sum(p, 2)
    wait(v_full, number, STAGES)
    slot = v_slots.index(number % STAGES)
    v = slot.reshape([W, BN // W, slot.shape[3]]).load(right)
    if not whole:  # what is not seen may not be finite
        key = _keys(at, W, BN, gl.SliceLayout(2, right))
        v = gl.where(gl.expand_dims((key >= lo) & (key < hi), 2), v, 0.0).to(v.dtype)
    acc = mma_v2(gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, mma, 2)), v, acc * gl.expand_dims(alpha, 2))
    _release_slot(v_empty, number, STAGES)
    return m_new, l, acc


@jit
def _empty_softmax(W: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, mma: gl.constexpr):
    m = gl.full([W, GP], float("-inf"), gl.float32, gl.SliceLayout(2, mma))
    return m, gl.zeros_like(m), gl.zeros([W, GP, D], gl.float32, mma)


@jit
def _merge(m, l, nonfinite_rows):
    """(factor of each warp's sums [W, GP], lse base 2 [GP]) of the branch; 0 and -inf for a row that saw no key."""
    top = gl.max(m, 0)
    top = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2(m - gl.expand_dims(top, 0))
    total = gl.sum(l * weight, 0)
    safe = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), top + gl.log2(safe))
    factor = gl.where(nonfinite_rows, float("nan"), 1.0 / safe)
    return weight * gl.expand_dims(factor, 0), gl.where(nonfinite_rows, float("nan"), lse)


@jit
def _halves(x, mma: gl.constexpr):
    """x [W, GP, D] -> its first and its last D / 2 channels."""
    first, last = gl.split(x.reshape([x.shape[0], x.shape[1], 2, x.shape[2] // 2]).permute((0, 1, 3, 2)))
    return gl.convert_layout(first, mma, assert_trivial=True), gl.convert_layout(last, mma, assert_trivial=True)


@jit
def _gated(acc, factor, gate, dtype: gl.constexpr, mma: gl.constexpr):
    """gate · o of D / 4 channels, [GP, D / 4] with four channels per thread; o is rounded as the prefill stores it."""
    W: gl.constexpr = gl.num_warps()
    by_channel: gl.constexpr = gl.BlockedLayout([W, 1, 4], [1, 4, 8], [1, W, 1], [2, 1, 0])
    o = gl.sum(gl.convert_layout(acc * gl.expand_dims(factor, 2), by_channel), 0)
    gate = gl.convert_layout(gate, gl.SliceLayout(1, gl.SliceLayout(0, by_channel)))
    return gl.expand_dims(gate, 1) * o.to(dtype).to(gl.float32)


@jit
def _gated_quarters(acc, factor, gate, dtype: gl.constexpr, mma: gl.constexpr):
    """gate · o, by quarters of the channels: to add up the warps of all at once would take 32 KiB."""
    first, last = _halves(acc, mma)
    a, b = _halves(first, mma)
    c, d = _halves(last, mma)
    return (_gated(a, factor, gate, dtype, mma), _gated(b, factor, gate, dtype, mma),
            _gated(c, factor, gate, dtype, mma), _gated(d, factor, gate, dtype, mma))  # fmt: skip


@jit
def _load_query(Q, q_h, first_head, G, W: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """q [W, GP, D]: all warps have the same."""
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    g = gl.arange(0, GP, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    channel = gl.expand_dims(gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(0, layout))), 0), 0)
    head = gl.expand_dims(warp * 0, 1) + gl.expand_dims(g, 0)  # [W, GP]: of each warp
    return gl.load(
        Q + gl.expand_dims((first_head + head) * q_h, 2) + channel, mask=gl.expand_dims(head < G, 2), other=0.0
    )


@jit
def consumer(
    Q, GATES, OUT, LSE, READ_CMP, READ_SEL, READ_WIN, chosen, scores, lse_slot, group, q_h, gate_h, gate_n,
    h, G, rows, t, seen, num_tiles, lo, begin, num_window_tiles, to_base_2,
    k_slots, k_full, k_empty, v_slots, v_full, v_empty, lse_ready, held_ready, held_loaded, chosen_ready,
    SEL: gl.constexpr, N: gl.constexpr, NP: gl.constexpr, D: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
    KEPT: gl.constexpr, HELD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    of_head: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, mma))
    dtype: gl.constexpr = OUT.dtype.element_ty
    g = gl.arange(0, GP, of_head)
    q = _load_query(Q, q_h, h.to(gl.int64) * G, G, W, GP, D, gl.DotOperandLayout(0, mma, 2))
    finite = gl.min(gl.min((gl.abs(q.to(gl.float32)) < float("inf")).to(gl.int32), 2), 0)
    nonfinite_q = gl.convert_layout(finite, of_head) == 0
    gates = GATES + (h.to(gl.int64) * G + g) * gate_h
    gate_cmp = gl.load(gates, mask=g < G, other=0.0).to(gl.float32)
    gate_sel = gl.load(gates + gate_n, mask=g < G, other=0.0).to(gl.float32)
    gate_win = gl.load(gates + 2 * gate_n, mask=g < G, other=0.0).to(gl.float32)
    m, l, acc = _empty_softmax(W, GP, D, mma)
    for i in range(0, num_tiles):
        s = _scores(q, k_slots, k_full, k_empty, i, to_base_2, W, GP, BN, STAGES, mma)
        if i == KEPT:
            mbarrier.wait(held_loaded, 0)
        pair, own = scores.index(i // 2 % (KEPT // 2)), s.permute((1, 0, 2)).reshape([GP, BN])
        if i % 2 == 0:
            pair.slice(0, BN, dim=1).store(own)
        else:
            pair.slice(BN, BN, dim=1).store(own)
        if i == HELD - 1:
            mbarrier.arrive(held_ready)
        m, l, acc = _add(s, v_slots, v_full, v_empty, i, i * BN, 0, seen, m, l, acc, W, BN, STAGES, mma)
    if num_tiles < HELD:
        mbarrier.arrive(held_ready)
    factor, lse = _merge(m, l, nonfinite_q & (seen > 0))
    lse_slot.store(lse)
    mbarrier.arrive(lse_ready)
    row = group * G + g  # of one query per sequence
    gl.store(LSE + row, lse * LN2, mask=g < G)
    gl.store(READ_CMP + group, seen)
    a, b, c, d = _gated_quarters(acc, factor, gate_cmp, dtype, mma)

    m, l, acc = _empty_softmax(W, GP, D, mma)
    for i in range(0, num_window_tiles):
        number, at = num_tiles + i, begin + i * BN
        s = _scores(q, k_slots, k_full, k_empty, number, to_base_2, W, GP, BN, STAGES, mma)
        m, l, acc = _add(s, v_slots, v_full, v_empty, number, at, lo, t + 1, m, l, acc, W, BN, STAGES, mma)
    factor, lse = _merge(m, l, nonfinite_q & (t >= 0))
    gl.store(LSE + 2 * rows + row, lse * LN2, mask=g < G)
    gl.store(READ_WIN + group, t + 1 - lo)
    a_win, b_win, c_win, d_win = _gated_quarters(acc, factor, gate_win, dtype, mma)

    mbarrier.wait(chosen_ready, 0)
    blocks, place, count = _load_chosen(chosen, N, NP)
    m, l, acc = _empty_softmax(W, GP, D, mma)
    read = 0
    for i in range(0, count * (SEL // BN)):
        number, at = num_tiles + num_window_tiles + i, _first_key(blocks, place, i, SEL, BN)
        s = _scores(q, k_slots, k_full, k_empty, number, to_base_2, W, GP, BN, STAGES, mma)
        m, l, acc = _add(s, v_slots, v_full, v_empty, number, at, 0, t + 1, m, l, acc, W, BN, STAGES, mma)
        read += gl.maximum(gl.minimum(t + 1 - at, BN), 0)
    factor, lse = _merge(m, l, nonfinite_q & (read > 0))
    gl.store(LSE + rows + row, lse * LN2, mask=g < G)
    gl.store(READ_SEL + group, read)
    a_sel, b_sel, c_sel, d_sel = _gated_quarters(acc, factor, gate_sel, dtype, mma)
    out = OUT + group * G * D
    _store_quarter(out, a + a_sel + a_win, 0, G, D)
    _store_quarter(out, b + b_sel + b_win, D // 4, G, D)
    _store_quarter(out, c + c_sel + c_win, D // 2, G, D)
    _store_quarter(out, d + d_sel + d_win, D // 4 * 3, G, D)


@jit
def _store_quarter(out, x, first: gl.constexpr, G, D: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    x = gl.convert_layout(x.to(out.dtype.element_ty), layout)
    g = gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, layout)), 1)
    channel = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, layout)), 0)
    gl.store(out + g * D + first + channel, x, mask=g < G)

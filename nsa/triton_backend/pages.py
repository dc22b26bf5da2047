"""Where rows lie: side by side [B, T, Hkv, D], or in pages [pages, page_size, Hkv, D] by a table [B, width]."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.triton_backend.tile import load_rows


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

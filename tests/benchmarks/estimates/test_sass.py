"""Which instructions are counted, in a disassembly short enough to count by hand; and in one kernel's own."""

from __future__ import annotations

import pytest

from benchmarks.estimates import sass

MASKED_AND_PLAIN = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   FSEL R4, R4, -INF , P0 ;
        /*0034*/                   FSEL R5, R5, -INF , P0 ;
        /*0038*/                   FSEL R6, R6, -INF , P0 ;
        /*0040*/                   FADD R4, R4, R5 ;
        /*0050*/                   FMUL R4, R4, R5 ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
.L_x_2:
        /*0070*/                   LDSM.16.M88.4 R8, [R20] ;
        /*0080*/                   LDGSTS.E.BYPASS.LTC128B.128 [R21], [R22.64] ;
        /*0090*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00a0*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00b0*/                   MUFU.EX2 R4, R4 ;
        /*00c0*/                   SHFL.BFLY PT, R5, R4, 0x1, 0x1f ;
        /*00d0*/                   FFMA R4, R4, R5, R6 ;
        /*00e0*/                   IADD3 R7, R7, 0x1, RZ ;
        /*00f0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0100*/              @!P0 BRA `(.L_x_2) ;
        /*0110*/                   STG.E.128 [R2.64], R4 ;
        /*0120*/                   EXIT ;
.L_x_3:
        /*0130*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0140*/                   BRA `(.L_x_3) ;
"""


def test_the_loop_without_a_mask_is_counted() -> None:
    found = sass.count(sass.parse(MASKED_AND_PLAIN))
    assert found.tensor_flop == found.synchronous_flop == 2 * 2 * 16 * 8 * 16
    assert (found.tensor, found.mufu, found.shuffle, found.fp32, found.integer, found.barrier) == (2, 1, 1, 1, 1, 1)
    assert (found.shared, found.shared_bytes, found.global_) == (2, 512 + 512, 0)
    assert found.issued == 9  # neither the branch nor what stands outside


def test_a_warpgroups_product_is_shared_by_its_four_warps() -> None:
    text = """
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
"""
    found = sass.count(sass.parse(text))
    assert (found.tensor_flop, found.synchronous_flop) == (2 * 64 * 64 * 16 / 4, 0)


def test_a_kernel_without_products_is_counted_as_a_whole() -> None:
    text = """
.L_x_1:
        /*0010*/                   LDS.64 R2, [R4] ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   LDG.E R2, [R4.64] ;
        /*0040*/                   EXIT ;
"""
    found = sass.count(sass.parse(text))
    assert (found.tensor_flop, found.shared, found.shared_bytes, found.global_, found.issued) == (0, 1, 256, 1, 2)


def test_an_empty_disassembly_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        sass.count(sass.parse("nvdisasm error: not a cubin"))

"""A length that is no multiple of 16, or 1, compiles nothing anew: shown by Triton's own cache, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from nsa.triton_backend import hopper
from tests.nsa.triton_backend.processes import answer

tried = pytest.mark.skipif(not hopper.AVAILABLE, reason="kernels of hopper/ need a version of Triton that was tried")
PREFILL = ["8192/8192", "8191/8191", "6152/6152"]
DECODE = ["1/4093", "1/4094", "1/4096", "2/4080", "16/4093"]
BACKWARD_OF_KEYS = 4
"""Of the window and of compressed keys, each with a multiple of 16 and without: these know their length."""


@pytest.mark.parametrize("group", [16, 4])
def test_lengths_come_and_go_without_a_compilation(group: int) -> None:
    found = answer("count_compilations", 90, group, 128, 128, *PREFILL, *DECODE)
    assert len(found) >= 13
    # of groups of 16 with `hopper/` that of compressed keys, of others none
    assert found.pop("compressed_window._backward_kv", 1) <= BACKWARD_OF_KEYS
    assert found.pop("hopper.keys_and_values._backward", 1) <= 2  # into float32, and into the type of the keys
    assert found.pop("topk._topk") == 2  # up to 64 and up to 128 blocks
    assert found.pop("compression._prepare") == 2  # keys and values together, and one of them alone
    assert found.pop("partial_sums._add_kv_parts", 1) <= 2  # into float32, and into the type of the keys
    assert found.pop("decode_kernels._compressed") == 2  # one query alone, and several
    assert found.pop("decode_kernels._merge") <= 2  # more queries make fewer splits
    assert found.pop("index._tiles") <= 2  # with the slots of a choice, for the forward pass, and without
    assert found.pop("block_unions._unions", 2) == 2  # of the queries that share forward, and of those of dq
    assert set(found.values()) == {1}


def test_decoding_compiles_the_choice_anew_only_where_the_number_of_blocks_doubles() -> None:
    lengths = (*range(1000, 4100, 101), *range(8300, 32700, 2003))
    found = answer("count_compilations", 90, 16, 128, 128, *(f"1/{keys}" for keys in lengths))
    assert found.pop("decode_kernels._choose") == 4  # up to 32, 64, 256 and 512 blocks
    # as many splits of the compressed blocks as there are then; up to 128 blocks `_choose` takes the probabilities
    assert found.pop("decode_kernels._merge") == 5
    assert found.pop("decode_kernels._group_probabilities") == 2
    assert set(found.values()) == {1}


@pytest.mark.parametrize(
    ("architecture", "kernel"), [(80, "selected._forward"), pytest.param(90, "hopper.selected._forward", marks=tried)]
)
def test_the_count_sees_a_length_that_a_kernel_knows(architecture: int, kernel: str) -> None:
    found = answer("count_compilations", architecture, 16, 128, 128, "fault", "16/4093", "16/4096", "17/4080")
    assert found[kernel] > 1

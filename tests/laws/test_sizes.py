"""The laws where a backend works in several pieces: long texts, and on a GPU the sizes of real models."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO

import pytest
import torch

from harness import forced
from nsa import NSAConfig
from tests.laws import (
    test_aux,
    test_causality,
    test_dense,
    test_empty_rows,
    test_independence,
    test_lengths,
    test_memory,
    test_selection,
)
from tests.laws.cases import Case
from tests.laws.parts import BRANCHES_AND_ALL, Parts
from tests.laws.test_precision import values_and_gradients_within_budget

LONG = Case(
    config=NSAConfig(l=8, d=4, l_sel=16, n_sel=6, w=150),
    num_kv_heads=2,
    group=3,
    dk=24,
    dv=16,
    queries=700,
    keys=700,
    seed=411,
)
"""More tokens than the torch backend takes in one piece; token 411 is where the laws cut."""
DOCUMENTS = replace(LONG, documents=(130, 0, 1, 309, 260))
CHUNK = replace(LONG, queries=301)
RECORDED = replace(LONG, recorded=True)

_CAUSALITY: list[Callable[..., None]] = [
    test_causality.test_past_ignores_a_changed_future.check,
    test_causality.test_past_ignores_a_future_that_is_not_finite.check,
    test_causality.test_gradient_of_the_past_ignores_the_future.check,
    test_causality.test_nan_gradient_of_a_row_stays_with_the_past.check,
]
_WHOLE: list[Callable[..., None]] = [
    test_aux.test_keys_read_are_those_that_were_read.check,
    test_dense.test_window_is_a_band_mask.check,
    test_empty_rows.test_rows_before_the_first_block_are_zero.check,
    test_empty_rows.test_rows_without_a_chosen_block_are_zero.check,
    test_selection.test_indices_are_distinct_ascending_causal_and_padded.check,
    test_selection.test_forced_blocks_are_in_every_row.check,
    test_selection.test_selection_follows_equation_9.check,
    test_selection.test_invisible_blocks_never_move_the_indices.check,
]


def _name(check: Callable[..., None]) -> str:
    return check.__name__.removeprefix("test_")


@pytest.fixture
def in_pieces(parts: Parts) -> Parts:
    """A backend that works in pieces, and in time: the reference takes every query alone anyway."""
    if parts.backend == "reference" or parts.interpreted:
        pytest.skip("the reference has no pieces; 700 tokens take minutes in Triton's interpreter")
    return parts


@pytest.mark.parametrize("case", [LONG, DOCUMENTS, CHUNK], ids=["plain", "packed", "chunk"])
@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
@pytest.mark.parametrize("check", [*_CAUSALITY, values_and_gradients_within_budget], ids=_name)
def test_long_text(in_pieces: Parts, check: Callable[..., None], branch: str, case: Case) -> None:
    """Causality, values and gradients over many pieces."""
    check(in_pieces, case, branch)


@pytest.mark.parametrize("case", [LONG, DOCUMENTS, CHUNK, RECORDED], ids=["plain", "packed", "chunk", "recorded"])
@pytest.mark.parametrize("check", _WHOLE, ids=_name)
def test_long_text_as_a_whole(in_pieces: Parts, check: Callable[..., None], case: Case) -> None:
    """Selection, empty rows and what was read."""
    if check is test_dense.test_window_is_a_band_mask.check and in_pieces.backend == "triton":
        pytest.skip("its probe has a value channel per key, 700 of them; the kernels take 256")
    check(in_pieces, case)


@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
def test_long_text_in_two_pieces(in_pieces: Parts, branch: str) -> None:
    """Prefill in two chunks, cut inside a block."""
    test_lengths.agrees_with_the_whole_call(in_pieces, LONG, branch, [(0, 411), (411, 700)])


@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
def test_long_documents_are_independent(in_pieces: Parts, branch: str) -> None:
    test_independence.test_documents_are_independent.check(in_pieces, DOCUMENTS, branch)


_GPU_GIB = forced.memory_bytes()[1] / 2**30 if torch.cuda.is_available() else math.inf
_ORACLE_GIB = 12  # of `values_and_gradients_within_budget` with 4096 tokens and 64 heads, inputs and masks included
_FEWER = 1 if _GPU_GIB > _ORACLE_GIB else 2
"""A GPU that cannot hold the oracle takes half the tokens, which is a quarter of the memory."""


@pytest.fixture
def turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As many of these tests at a time as two thirds of the GPU hold oracles, whatever number of workers uses it: the
    others run other tests, and keep what these took."""
    places = max(1, int(2 / 3 * _GPU_GIB // (_ORACLE_GIB / _FEWER**2)))
    folder = tmp_path_factory.getbasetemp().parent  # the workers share it
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / f"place-{gpu}-{number}").open("w")) for number in range(places)]
        while not any(_taken(file) for file in files):
            time.sleep(0.1)
        yield
        _free()  # before the next one comes


@pytest.fixture
def freed() -> Iterator[None]:
    """What a test took is left to the other workers."""
    yield
    _free()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _real(num_kv_heads: int, heads: int, dk: int, dv: int, tokens: int) -> Case:
    tokens //= _FEWER
    shape = Case(config=NSAConfig(), num_kv_heads=num_kv_heads, group=heads // num_kv_heads, dk=dk, dv=dv)
    return replace(shape, queries=tokens, keys=tokens, seed=tokens // 2 + 37)


REAL = {
    f"64 heads of 192/128 in 4 groups, {4096 // _FEWER} tokens": _real(4, 64, 192, 128, 4096),
    f"32 heads of 128 in 8 groups, {4096 // _FEWER} tokens": _real(8, 32, 128, 128, 4096),
    f"16 heads of 128 in 1 group, {8192 // _FEWER} tokens": _real(1, 16, 128, 128, 8192),
    f"32 heads of 128 in 2 groups, {4096 // _FEWER} tokens, recorded": replace(
        _real(2, 32, 128, 128, 4096), recorded=True
    ),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", REAL.values(), ids=REAL.keys())
class TestRealSize:
    """The paper's config on the paper's shapes."""

    @pytest.mark.usefixtures("turn")
    @pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
    def test_values_and_gradients(self, backend: str, dtype: torch.dtype, case: Case, branch: str) -> None:
        parts = Parts(backend, torch.device("cuda"))
        values_and_gradients_within_budget(parts, replace(case, dtype=dtype), branch, steady=True)

    @pytest.mark.parametrize("check", [*_CAUSALITY, test_memory.test_repeats_bit_for_bit.check], ids=_name)
    def test_causality_and_repeat(
        self, backend: str, dtype: torch.dtype, case: Case, check: Callable[..., None]
    ) -> None:
        check(Parts(backend, torch.device("cuda")), replace(case, dtype=dtype), "all")

    @pytest.mark.parametrize("check", [check for check in _WHOLE if "band_mask" not in check.__name__], ids=_name)
    def test_selection_and_counts(
        self, backend: str, dtype: torch.dtype, case: Case, check: Callable[..., None]
    ) -> None:
        check(Parts(backend, torch.device("cuda")), replace(case, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.usefixtures("turn")
@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
def test_reference_at_a_real_size(branch: str) -> None:
    """The reference takes one query at a time, so 1024 tokens are its real size."""
    case = replace(_real(4, 64, 192, 128, 1024), dtype=torch.bfloat16)
    values_and_gradients_within_budget(Parts("reference", torch.device("cuda")), case, branch, steady=True)

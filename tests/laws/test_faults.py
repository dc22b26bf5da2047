"""The laws can fail: each injected fault is caught by the law named beside it, which passes without the fault."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, attention, geometry, reference, torch_backend
from nsa.geometry import Layout
from tests.laws import (
    faults,
    test_aux,
    test_causality,
    test_empty_rows,
    test_growth,
    test_independence,
    test_indices,
    test_lengths,
    test_memory,
    test_precision,
    test_selection,
)
from tests.laws import faulty_selection as selection
from tests.laws.cases import Case
from tests.laws.faulty_selection import Choice
from tests.laws.parts import Parts

PLAIN = Case(batch=2, group=2, queries=24, keys=24, seed=17)
FREE = replace(
    PLAIN, config=NSAConfig(l=4, d=2, l_sel=4, n_sel=2, w=8, init_blocks=0, local_blocks=0), queries=40, keys=40
)
LOCAL = replace(FREE, config=replace(FREE.config, n_sel=3, local_blocks=2))
TIED = replace(PLAIN, config=NSAConfig(l=4, d=4, l_sel=4, n_sel=3, init_blocks=0, local_blocks=1))
PACKED = replace(PLAIN, batch=1, documents=(7, 0, 1, 16))


@dataclass(frozen=True)
class Fault:
    """What replaces which function, and the law that must notice."""

    law: Callable[..., None]
    case: Case
    branch: str | None
    patches: dict[tuple[Any, str], Any]

    def check(self, parts: Parts) -> None:
        self.law(parts, self.case, *([self.branch] if self.branch else []))


def _fault(law: Any, case: Case, branch: str | None = None, *, of: Any = reference, **replacements: Any) -> Fault:
    return Fault(getattr(law, "check", law), case, branch, {(of, name): new for name, new in replacements.items()})


PAST = test_causality.test_past_ignores_a_changed_future
ONE_BY_ONE = test_lengths.test_batched_is_one_token_at_a_time

FAULTS = {
    "single query with is_causal": _fault(ONE_BY_ONE, PLAIN, "window", window_attention=faults.single_query_is_causal),
    "inverted mask": _fault(PAST, PLAIN, "window", window_attention=faults.inverted_mask),
    "window by absolute position": _fault(PAST, PLAIN, "window", window_attention=faults.window_by_absolute_position),
    "softmax over the batch": _fault(
        test_independence.test_batch_rows_are_independent,
        PLAIN,
        "window",
        window_attention=faults.softmax_over_the_batch,
    ),
    "scale of the values": _fault(
        test_precision.test_any_call_within_budget, PLAIN, "window", window_attention=faults.scale_of_the_values
    ),
    "hidden NaN": _fault(
        test_causality.test_nan_that_a_row_attends_to_shows, PLAIN, "window", window_attention=faults.hidden_nan
    ),
    "scaled in place": _fault(
        test_memory.test_inputs_are_left_as_they_were, PLAIN, "window", window_attention=faults.scaled_in_place
    ),
    "strides ignored": _fault(
        test_memory.test_strides_do_not_matter, PLAIN, "window", window_attention=faults.strides_ignored
    ),
    "state shared between configs": _fault(
        test_memory.test_two_configs_in_turn, PLAIN, "window", window_attention=faults.MasksByLength()
    ),
    "workspace kept": _fault(
        test_memory.test_other_calls_in_between_leave_no_trace, PLAIN, "window", window_attention=faults.Workspace()
    ),
    "rows never written": _fault(
        test_memory.test_garbage_in_fresh_memory_changes_nothing,
        PLAIN,
        "compressed",
        compressed_attention=faults.rows_never_written,
    ),
    "masked after the softmax": _fault(
        test_empty_rows.test_rows_without_a_chosen_block_are_zero, PLAIN, selected_attention=faults.masked_after_softmax
    ),
    "duplicates counted twice": replace(
        _fault(
            test_indices.test_invalid_indices_are_ignored_and_duplicates_count_once,
            PLAIN,
            selected_attention=faults.duplicates_counted_twice,
        ),
        patches={
            (reference, "selected_attention"): faults.duplicates_counted_twice,
            (attention, "_distinct"): faults.indices_as_given,
        },
    ),
    "keys read from the formula": _fault(
        test_aux.test_keys_read_are_those_that_were_read, PLAIN, selected_attention=faults.keys_read_from_the_formula
    ),
    "gates in reverse": _fault(
        test_aux.test_gates_are_in_the_order_compressed_selected_window, PLAIN, combine=faults.gates_in_reverse
    ),
    "grid over all documents": _fault(
        test_independence.test_packed_documents_are_the_documents_one_by_one,
        PACKED,
        "compressed",
        compress=faults.grid_over_all_documents,
    ),
    "block that is not full": replace(
        _fault(PAST, replace(PLAIN, queries=23, keys=23), "compressed"),
        patches={
            (geometry, "num_compressed_blocks"): faults.blocks_begun,
            (reference, "compress"): faults.mean_of_what_there_is,
        },
    ),
    "current block dropped": _fault(
        test_selection.test_forced_blocks_are_in_every_row, LOCAL, select_blocks=Choice(force_current=False)
    ),
    "forced blocks outside n": _fault(
        test_selection.test_indices_are_distinct_ascending_causal_and_padded,
        LOCAL,
        select_blocks=Choice(forced_outside_n=True),
    ),
    "unique by slices: duplicates": _fault(
        test_selection.test_indices_are_distinct_ascending_causal_and_padded,
        LOCAL,
        select_blocks=selection.slices_made_unique,
    ),
    "tie broken by 1e-8": _fault(
        test_selection.test_equal_scores_choose_the_lowest_index, TIED, select_blocks=Choice(jitter=True)
    ),
    "future in the normaliser": _fault(
        test_selection.test_invisible_blocks_never_move_the_indices, FREE, select_blocks=Choice(normalise_over_all=True)
    ),
    "printed minus sign": _fault(
        test_selection.test_selection_follows_equation_9, FREE, select_blocks=Choice(weigh=selection.printed_minus_sign)
    ),
    "scores in half precision": _fault(
        test_selection.near_uniform_softmax_still_ranks,
        test_selection.NEAR_UNIFORM,
        select_blocks=Choice(dtype=torch.float16),
    ),
    "first head decides": _fault(
        test_selection.test_heads_of_a_group_share_one_set, FREE, select_blocks=Choice(first_head_decides=True)
    ),
    "decode chooses otherwise": _fault(
        ONE_BY_ONE, LOCAL, "selected", select_blocks=selection.decode_forgets_the_forced
    ),
}


@pytest.fixture(scope="module")
def fault_free(device: torch.device) -> Parts:
    return Parts("reference", device)


@pytest.mark.parametrize("name", FAULTS)
def test_law_catches(name: str, fault_free: Parts) -> None:
    """Passes on the reference without a fault, fails on the faulty one."""
    fault = FAULTS[name]
    fault.check(fault_free)
    with ExitStack() as injected:
        for (module, attribute), faulty in fault.patches.items():
            injected.enter_context(mock.patch.object(module, attribute, faulty))
        with pytest.raises(AssertionError):
            fault.check(fault_free)


def test_dense_choice_is_right_without_a_fault(fault_free: Parts) -> None:
    """The faulty choices differ from this one in one field each."""
    with mock.patch.object(reference, "select_blocks", Choice()):
        test_selection.test_selection_follows_equation_9.check(fault_free, FREE)
        test_selection.test_forced_blocks_are_in_every_row.check(fault_free, LOCAL)


def test_growth_laws_catch_a_loop_over_tokens(fault_free: Parts) -> None:
    """The reference is one: some 40 operators per token and branch, forward alone."""
    with pytest.raises(AssertionError):
        test_growth.grows_with_length(fault_free, "window", lengths=(32, 64))


def _square_mask(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> faults.Branch:
    return faults.dense(q, k, v, faults.band(layout), scale)


def _read_by_the_host(x: Tensor, layout: Layout) -> Tensor:
    return reference.compress(x, layout) if x.sum().item() else x


@pytest.mark.parametrize(
    ("law", "branch", "part", "faulty"),
    [
        (test_growth.grows_with_length, "window", "window_attention", _square_mask),
        (test_growth.host_waits_for_nothing, "compressed", "compress", _read_by_the_host),
    ],
    ids=["square mask", "value read by the host"],
)
def test_growth_laws_catch(law: Callable[[Parts, str], None], branch: str, part: str, faulty: object) -> None:
    with mock.patch.object(torch_backend, part, faulty), pytest.raises(AssertionError):
        law(Parts("torch", torch.device("cpu")), branch)

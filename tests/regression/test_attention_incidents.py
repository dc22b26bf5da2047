"""The detectors of attention's incidents: each watches every backend, and what they are made of measures right."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import pytest
import torch

import nsa
from regression import listing
from regression.contract import Bound, verdict
from regression.detectors import causality, dense, memory, selection
from regression.detectors.backends import proofs, worst
from regression.detectors.calls import BRANCHES, SMALL, draw

ATTENTION = tuple(
    incident.id
    for incident in listing.load(listing.IDS)
    if getattr(sys.modules[listing.module_of(incident.id)], "proofs", None) is proofs
)
"""The incidents whose fault is put into every backend."""


@dataclass
class SilentStep:
    """A heartbeat that nobody listens to."""

    backends: tuple[str, ...]
    device: str

    def __call__(self, n: int, **figures: float) -> None:
        pass


@pytest.mark.parametrize("incident_id", ATTENTION)
def test_fault_in_a_backend_is_seen_there(incident_id: str, backend: str, device: torch.device) -> None:
    """The suite itself tries each fault on the torch backend; this is each backend's own proof."""
    module = importlib.import_module(listing.module_of(incident_id))
    with module.inject():
        assert verdict(module.product(SilentStep((backend,), device.type))) is module.INCIDENT.expects


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("rows", [(0, 24), (0, 3), (20, 24)], ids=["prefill", "no block yet", "chunk"])
def test_oracle_agrees_with_the_specification(branch: str, rows: tuple[int, int]) -> None:
    call = draw(24, "cpu", batch=2, kv_heads=2).rows(*rows)
    o = call.attend(branch, "reference")
    assert not dense.error(o, call, branch, call.select("reference")).exceeded
    assert dense.error(o + 1e-4, call, branch, call.select("reference")).exceeded


def test_worst_is_the_bound_missed_by_most() -> None:
    near, far, lost = (Bound(value, 2.0) for value in (1.0, 5.0, None))
    assert worst([near, far]) is far
    assert worst([far, lost, near]) is lost


def test_faulty_choices_start_from_healthy_scores() -> None:
    """Without a fault they choose what the specification chooses."""
    call = draw(40, "cpu", batch=2, kv_heads=2)
    layout = nsa.geometry.Layout(40, 40, SMALL, call.q.device)
    begun, forced = selection.candidates(layout)
    score = selection.block_scores(call.q, call.compressed_keys("reference"), layout, call.q.shape[-1] ** -0.5)
    score = score.masked_fill(forced, torch.inf).masked_fill(~begun, -torch.inf)
    assert torch.equal(selection.best(score, SMALL.n_sel), call.select("reference"))


def test_rows_change_where_a_number_does_and_nan_is_like_nan() -> None:
    a = torch.zeros(2, 4, 3)
    a[:, 1] = torch.nan
    b = a.clone()
    assert causality.changed_rows(a, b) == []
    b[1, 2, 0], b[0, 3] = 1.0, torch.nan
    assert causality.changed_rows(a, b) == [2, 3]


def test_another_future_keeps_the_past_and_nothing_else() -> None:
    call = draw(8, "cpu")
    other = causality.with_another_future(call, 5)
    for before, after in ((call.q, other.q), (call.k, other.k), (call.v, other.v), (call.gates, other.gates)):
        assert torch.equal(before[:, :5], after[:, :5])
        assert not (before[:, 5:] == after[:, 5:]).any()


def test_allocations_are_followed_until_they_are_freed() -> None:
    kib = torch.ones(256)  # made before: not counted
    with memory.Allocations() as seen:
        first = kib + 1
        view = first[:10]
        second = first * 2
        del first, view
        third = torch.cat([second, second])
        del second
        third.add_(1)
    assert (seen.peak_bytes, seen.largest_bytes) == (3072, 2048)


def test_triton_is_measured_where_its_scratch_is_at_its_full_size() -> None:
    scores = pytest.importorskip("nsa.triton_backend.scores", reason="needs Triton")
    assert memory.LENGTHS["triton"][0] >= scores.CHUNK


def test_square_memory_exceeds_its_bound_and_linear_does_not() -> None:
    assert not memory.peak_growth("window", "torch", "cpu").exceeded
    with importlib.import_module("regression.incidents.square_mask").inject():
        assert memory.peak_growth("selected", "torch", "cpu").exceeded
        assert not memory.peak_growth("window", "torch", "cpu").exceeded

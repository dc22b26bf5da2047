"""Figures of attention over several ranks: counted bytes, a waiting that is seen, and nothing without agreement."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import nsa
from benchmarks.parallel import measure
from benchmarks.parallel.measure import ParallelTime, Shape
from nsa.parallel import exchange
from tests.nsa.parallel import faults
from tests.nsa.parallel.pool import Pool, RankError

CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=24)
SHAPE = Shape(96, 4, 2, 8, 12, "float32", config=CONFIG)
SLEPT_S = 0.05


def _measured(mesh: DeviceMesh, shape: Shape, fault: str | None) -> ParallelTime:
    with faults.FAULTS[fault][0]() if fault else torch.no_grad(), torch.enable_grad():
        return measure.measure(mesh, shape, backend="torch", samples=2)


def test_one_device_and_two(pool: Pool) -> None:
    first, second = pool.run(2, _measured, SHAPE, None)
    assert first == second
    assert first.one_ms is not None
    assert first.share_of_ideal == pytest.approx(first.one_ms / 2 / first.parallel_ms)
    assert len(first.samples_ms) == 2
    assert all(first.greatest_difference[name] == 0 for name in measure.EXACT)
    assert first.checked_tokens == 96


def test_bytes_are_those_that_arrive(pool: Pool) -> None:
    """Of half the tokens: keys and values twice, float32 sums of the other rank's queries for the own ones once; the
    compressed rows likewise; and the rows of the halos, there and back."""
    pair = (8 + 12) * 2 * 4  # bytes of a key and a value of all kv heads
    blocks = (96 - 8) // 4 + 1
    most = -(-blocks // 2) + 1
    selected = 3 * 48 * pair
    received = pool.run(2, _measured, SHAPE, None)[0].received_gb * 1e9
    window, source = 3 * 2 * 23, 2 * 2 * 4  # the most that two pieces' halos can hold
    assert selected + 3 * (most - 1) * pair - pair <= received <= selected + (3 * most + window + source) * pair


def _waited(mesh: DeviceMesh) -> float:
    class Slow:
        def wait(self) -> None:
            time.sleep(SLEPT_S)

    with measure._waiting() as total:
        exchange.Pending(Slow(), lambda: torch.zeros(1)).wait()  # type: ignore[arg-type]
        return total()


def test_waiting_is_seen(pool: Pool) -> None:
    assert pool.run(1, _waited)[0] >= SLEPT_S * 1e3


def test_a_longer_sequence_is_checked_on_its_beginning(pool: Pool) -> None:
    shape = dataclasses.replace(SHAPE, documents=(30, 66))

    found = pool.run(2, _shortly_checked, shape)[0]
    assert found.checked_tokens == 48
    assert found.one_ms is None
    assert found.share_of_ideal is None


def _shortly_checked(mesh: DeviceMesh, shape: Shape) -> ParallelTime:
    return measure.measure(mesh, shape, backend="torch", samples=1, alone=False, check_tokens=48)


@pytest.mark.parametrize("fault", ["a dropped gather", "dk and dv never sent", "a halo of the window too short"])
def test_nothing_is_measured_of_what_is_wrong(pool: Pool, fault: str) -> None:
    with pytest.raises(RankError, match=r"IncorrectError: .* of 2 ranks is"):
        pool.run(2, _measured, SHAPE, fault)

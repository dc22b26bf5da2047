"""What the emulation of Gluon refuses, as a GPU would with a wrong result, a hang or an illegal address."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.nsa.triton_backend.gluon_memory import Barrier, KernelError, Pointer, Shared, Unfenced, load
from tests.nsa.triton_backend.gluon_partitions import Partitions


def test_a_wait_that_never_ends() -> None:
    barrier = Barrier(count=1)
    assert not barrier.passed(0)
    barrier.arrive(16)  # bytes that nothing brings
    assert not barrier.passed(0)
    with pytest.raises(KernelError, match="given back"):
        Barrier(phases=1).passed(0)


def test_partitions_run_in_turns_and_do_not_wait_for_one_another_in_a_ring() -> None:
    seen: list[str] = []
    there, back = Barrier(count=1), Barrier(count=1)

    def first() -> None:
        seen.append("first")
        there.arrive()
        partitions.wait(lambda: back.passed(0))
        seen.append("first again")

    def second() -> None:
        partitions.wait(lambda: there.passed(0))
        seen.append("second")
        back.arrive()

    partitions = Partitions([first, second], order=[1, 0])
    partitions.run()
    assert seen == ["first", "second", "first again"]
    there, back = Barrier(count=1), Barrier(count=2)  # of which one arrives
    partitions = Partitions([first, second], order=[1, 0])
    with pytest.raises(KernelError, match="every partition waits"):
        partitions.run()


def test_an_error_of_a_partition_ends_the_others() -> None:
    def wrong() -> None:
        raise ZeroDivisionError

    partitions = Partitions([lambda: partitions.wait(lambda: False), wrong], order=[0, 1])
    with pytest.raises(ZeroDivisionError):
        partitions.run()


def test_a_tile_over_what_threads_have_read_behind_no_fence() -> None:
    unfenced = Unfenced()
    tiles = Shared(torch.zeros(2, 4, 4), unfenced)
    tiles.index(1).permute((1, 0)).load(None)
    tiles.index(0).begin_copy()
    with pytest.raises(KernelError, match="TMA overwrites"):
        tiles.index(1).begin_copy()
    unfenced.clear()
    tiles.index(1).begin_copy()


def test_an_address_outside_its_tensor_unless_it_is_masked() -> None:
    x = torch.arange(8.0)
    pointer = Pointer(x[:4]) + torch.tensor([3, 4])
    assert load(pointer, torch.tensor([True, False]), 9.0).tolist() == [3.0, 9.0]
    for unmasked in (pointer, Pointer(x[:4]) + torch.tensor([-1])):
        with pytest.raises(KernelError, match="outside"):
            load(unmasked)


def test_a_product_of_what_is_stored_behind_no_fence() -> None:
    unfenced = Unfenced()
    shared = Shared(torch.zeros(4, 4), unfenced)
    shared.store(torch.ones(4, 4))
    with pytest.raises(KernelError, match="fence"):
        shared.permute((1, 0)).operand()
    unfenced.clear()
    assert shared.operand().sum() == 16

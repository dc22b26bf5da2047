"""What the emulation of Gluon refuses, as a GPU would with a wrong result, a hang or an illegal address."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.nsa.triton_backend.gluon_memory import Barrier, KernelError, Pointer, Shared, load


def test_a_wait_that_never_ends() -> None:
    barrier = Barrier(count=1)
    with pytest.raises(KernelError, match="never ends"):
        barrier.wait(0)
    barrier.arrive(16)  # bytes that nothing brings
    with pytest.raises(KernelError, match="never ends"):
        barrier.wait(0)
    with pytest.raises(KernelError, match="given back"):
        Barrier(phases=1).wait(0)


def test_an_address_outside_its_tensor_unless_it_is_masked() -> None:
    x = torch.arange(8.0)
    pointer = Pointer(x[:4]) + torch.tensor([3, 4])
    assert load(pointer, torch.tensor([True, False]), 9.0).tolist() == [3.0, 9.0]
    for unmasked in (pointer, Pointer(x[:4]) + torch.tensor([-1])):
        with pytest.raises(KernelError, match="outside"):
            load(unmasked)


def test_a_product_of_what_is_stored_behind_no_fence() -> None:
    unfenced: set[int] = set()
    shared = Shared(torch.zeros(4, 4), unfenced)
    shared.store(torch.ones(4, 4))
    with pytest.raises(KernelError, match="fence"):
        shared.permute((1, 0)).operand()
    unfenced.clear()
    assert shared.operand().sum() == 16

"""Machines are recognised by the table, and a session refuses any but its own."""

from __future__ import annotations

import pytest

from benchmarks.workloads.suite import MODES, planned, table
from harness import machines
from harness.machines import Gpu, WrongMachineError

NAMES: list[tuple[str, tuple[int, int], str, float | None]] = [
    ("NVIDIA A100-SXM4-80GB", (8, 0), "a100", 2.039),
    ("NVIDIA A100 80GB PCIe", (8, 0), "a100", 2.039),
    ("NVIDIA A100-PCIE-40GB", (8, 0), "a100", 1.555),
    ("NVIDIA GeForce RTX 3090", (8, 6), "3090", 0.936),
    ("NVIDIA GeForce RTX 3090 Ti", (8, 6), "gpu", None),
    ("NVIDIA GeForce RTX 4090", (8, 9), "4090", 1.008),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), "gpu", None),
    ("NVIDIA H100 80GB HBM3", (9, 0), "h100", 3.35),
    ("NVIDIA H100 PCIe", (9, 0), "h100", 2.0),
    ("NVIDIA H100 NVL", (9, 0), "h100", 3.9),
    ("NVIDIA H200", (9, 0), "h200", 4.8),
    ("NVIDIA B200", (10, 0), "b200", 8.0),
    ("NVIDIA H200", (8, 0), "gpu", None),  # a name that lies about its architecture
    ("NVIDIA L4", (8, 9), "gpu", None),
]
"""What a driver calls a GPU and its compute capability; which entry of machines.toml it is, and its memory in TB/s."""


@pytest.mark.parametrize(("name", "capability", "wanted", "memory_tb_per_s"), NAMES)
def test_recognises(name: str, capability: tuple[int, int], wanted: str, memory_tb_per_s: float | None) -> None:
    machine = machines.recognise(Gpu(name, capability))
    assert (machine.id, machine.memory_tb_per_s, machine.device) == (wanted, memory_tb_per_s, "cuda")


def test_without_a_gpu_it_is_the_cpu() -> None:
    assert machines.recognise(None).id == machines.machine(None, None).id == "cpu"


def test_refuses_another_machine_saying_what_it_found() -> None:
    with pytest.raises(WrongMachineError, match=r"needs an NVIDIA A100; found: NVIDIA H200$"):
        machines.machine("a100", Gpu("NVIDIA H200", (9, 0)))
    with pytest.raises(
        WrongMachineError, match=r"needs an NVIDIA GeForce RTX 3090; found: no GPU that PyTorch can use$"
    ):
        machines.machine("3090", None)


def test_a_gpu_that_is_not_listed_can_be_asked_for() -> None:
    assert "gpu" in machines.known_ids()
    assert machines.machine("gpu", Gpu("NVIDIA L4", (8, 9))).title == "NVIDIA L4"
    with pytest.raises(WrongMachineError, match=r"needs a GPU that is not listed; found: NVIDIA H200$"):
        machines.machine("gpu", Gpu("NVIDIA H200", (9, 0)))


def test_the_cpu_is_there_beside_a_gpu() -> None:
    assert machines.machine("cpu", Gpu("NVIDIA H200", (9, 0))).device == "cpu"


def test_every_id_is_a_family_and_every_suite_can_be_planned() -> None:
    found = [machines.recognise(Gpu(name, capability)) for name, capability, *_ in NAMES] + [machines.recognise(None)]
    unnamed = set(machines.known_ids()) - {machine.id for machine in found}
    assert not unnamed, f"NAMES above must have a name that the driver gives each of {unnamed}"
    for name in {machine.suite for machine in found}:
        for quick in (True, False):
            keys = planned(table(name), quick=quick, backend="auto", on_gpu=name != "cpu")
            assert {key.mode for key in keys} >= set(MODES) - {"memory"}
            assert len({key.name for key in keys}) == len(keys), "two cases of one name"


def test_quick_is_a_part_of_the_whole() -> None:
    for name in ("cpu", "24gb", "80gb"):
        quick, whole = (
            {key.name for key in planned(table(name), quick=quick, backend="auto", on_gpu=True)}
            for quick in (True, False)
        )
        assert quick < whole

"""Machines are recognised by the table, and a session refuses any but its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.workloads.suite import MODES, planned, table
from harness import machines
from harness.machines import Gpu, WrongMachineError
from tests.fake_nvml import process
from tests.fake_nvml.boards import BOARDS

NAMES: list[tuple[str, tuple[int, int], str, float | None]] = [
    ("NVIDIA A100-SXM4-80GB", (8, 0), "a100-80gb-sxm", 2.039),
    ("A100-SXM-80GB", (8, 0), "a100-80gb-sxm", 2.039),  # as drivers before 460 said it
    ("NVIDIA A100 80GB PCIe", (8, 0), "a100-80gb-pcie", 1.935),
    ("NVIDIA A100-SXM4-40GB", (8, 0), "a100-40gb-sxm", 1.555),
    ("NVIDIA A100-PCIE-40GB", (8, 0), "a100-40gb-pcie", 1.555),
    ("NVIDIA A100-SXM-64GB", (8, 0), "gpu-a100-sxm-64gb", None),  # made for one computer, with limits of its own
    ("NVIDIA GeForce RTX 3090", (8, 6), "3090", 0.936),
    ("NVIDIA GeForce RTX 3090 Ti", (8, 6), "gpu-geforce-rtx-3090-ti", None),
    ("NVIDIA GeForce RTX 4090", (8, 9), "4090", 1.008),
    ("NVIDIA L40S", (8, 9), "l40s", 0.864),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), "gpu-geforce-rtx-4090-laptop-gpu", None),
    ("NVIDIA H100 80GB HBM3", (9, 0), "h100-sxm", 3.35),
    ("NVIDIA H100 PCIe", (9, 0), "h100-pcie", 2.0),
    ("NVIDIA H100 NVL", (9, 0), "h100-nvl", 3.9),
    ("NVIDIA H200", (9, 0), "h200", 4.8),
    ("NVIDIA H200 NVL", (9, 0), "h200-nvl", 4.8),
    ("NVIDIA GH200 480GB", (9, 0), "gpu-gh200-480gb", None),
    ("NVIDIA B200", (10, 0), "b200", 8.0),
    ("NVIDIA GB200", (10, 0), "gpu-gb200", None),
    ("NVIDIA H200", (8, 0), "gpu-h200", None),  # a name that lies about its architecture
    ("NVIDIA L4", (8, 9), "gpu-l4", None),
    ("NVIDIA GeForce RTX 5090", (12, 0), "gpu-geforce-rtx-5090", None),
    ("GRID A100-40C", (8, 0), "gpu-grid-a100-40c", None),  # a vGPU has no share of an A100 that could be named
]
"""What a driver calls a GPU and its compute capability; its id, and its memory in TB/s."""
SLICES: list[tuple[str, tuple[int, int], int | None, str, str, float | None, float]] = [
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 42, "a100-80gb-sxm-mig-3g-40gb", "24gb", 312 * 42 / 108, 2.039 / 2),
    ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", (8, 0), 42, "a100-40gb-sxm-mig-3g-20gb", "24gb", 312 * 42 / 108, 1.555 / 2),
    ("NVIDIA A100 80GB PCIe MIG 1g.10gb", (8, 0), 14, "a100-80gb-pcie-mig-1g-10gb", "24gb", 312 * 14 / 108, 1.935 / 8),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", (8, 0), None, "a100-80gb-sxm-mig-1g-10gb-me", "24gb", None, 2.039 / 8),
    ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", (8, 0), 98, "a100-80gb-sxm-mig-7g-80gb", "80gb", 312 * 98 / 108, 2.039),
    ("NVIDIA H200 MIG 1c.3g.71gb", (9, 0), 16, "h200-mig-1c-3g-71gb", "24gb", 989 * 16 / 132, 4.8 / 2),
]
"""What CUDA calls a slice, its multiprocessors; its id, its suite, its bf16 TFLOP/s and memory TB/s."""


@pytest.mark.parametrize(("name", "capability", "wanted", "memory_tb_per_s"), NAMES)
def test_recognises(name: str, capability: tuple[int, int], wanted: str, memory_tb_per_s: float | None) -> None:
    machine = machines.recognise(Gpu(name, capability))
    assert (machine.id, machine.memory_tb_per_s, machine.device) == (wanted, memory_tb_per_s, "cuda")


@pytest.mark.parametrize(("name", "capability", "sms", "wanted", "suite", "tflops", "tb_per_s"), SLICES)
def test_a_mig_slice_is_a_machine_of_its_own(
    name: str, capability: tuple[int, int], sms: int | None, wanted: str, suite: str, tflops: float, tb_per_s: float
) -> None:
    machine = machines.recognise(Gpu(name, capability, sms=sms))
    assert (machine.id, machine.suite, machine.memory_tb_per_s) == (wanted, suite, pytest.approx(tb_per_s))
    assert machine.bf16_tflops == (None if tflops is None else pytest.approx(tflops))
    assert machine.memory_gb is not None
    assert str(int(machine.memory_gb)) in name
    assert machines.is_id(wanted)
    assert machine.fits(machine.family or "")
    assert machine.fits(machines.whole_board(wanted)) is (machines.whole_board(wanted) == machine.family)


@pytest.mark.parametrize(
    ("gpu", "wanted"),
    [
        (Gpu("NVIDIA GeForce RTX 3090", (8, 6), capped_w=280), "3090-capped-280w"),
        (Gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), capped_w=300), "a100-80gb-sxm-mig-3g-40gb-capped-300w"),
        (Gpu("NVIDIA GeForce RTX 5090", (12, 0), capped_w=400), "gpu-geforce-rtx-5090-capped-400w"),
    ],
)
def test_a_power_cap_makes_a_machine_of_its_own(gpu: Gpu, wanted: str) -> None:
    capped, whole = machines.recognise(gpu), machines.recognise(dataclasses.replace(gpu, capped_w=None))
    words = f", capped to {gpu.capped_w} W"
    assert capped == dataclasses.replace(whole, id=wanted, title=f"{whole.title}{words}")
    assert machines.is_id(wanted)
    assert machines.whole_board(wanted) == machines.whole_board(whole.id)
    assert not machines.same_family(wanted, capped.family or "3090")
    assert machines.named(wanted) == f"{machines.named(whole.id)}{words}"
    assert machines.machine(wanted, gpu) == machines.machine(whole.family or "gpu", gpu) == capped
    with pytest.raises(WrongMachineError, match=f"{words}; found: {gpu.name}$"):
        machines.machine(wanted, dataclasses.replace(gpu, capped_w=None))


def test_a_laptop_stays_one_machine_whatever_its_power_limit() -> None:
    """It moves the limit by itself."""
    laptop = Gpu("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9))
    ids = {machines.recognise(dataclasses.replace(laptop, capped_w=watts)).id for watts in (None, 80, 115)}
    assert ids == {"gpu-geforce-rtx-4090-laptop-gpu"}


def test_one_board_is_not_asked_for_by_its_whole_power_where_it_is_capped() -> None:
    capped = Gpu("NVIDIA A100 80GB PCIe", (8, 0), capped_w=200)
    with pytest.raises(WrongMachineError, match=r"found: NVIDIA A100 80GB PCIe, capped to 200 W$"):
        machines.machine("a100-80gb-pcie", capped)


@pytest.mark.parametrize(("board", "wanted"), [("a100-80gb-pcie-capped-200w", 200), ("h200", None)])
def test_the_gpu_that_is_seen_tells_its_power_cap(
    board: str, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible_gpu, stand_in = machines.visible_gpu, BOARDS[board]
    process.install(monkeypatch, stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert visible_gpu() == Gpu(stand_in.name, stand_in.compute_capability, sms=stand_in.sms, capped_w=wanted)


def test_no_two_boards_share_an_id_and_records_of_before_keep_theirs() -> None:
    boards = [board.id for family in machines.families().values() for board in family.boards]
    assert len(set(boards)) == len(boards)
    assert {"h200", "3090", "4090", "b200"} <= set(boards)


@pytest.mark.parametrize(
    "name",
    [
        "a101",
        "a100-mig",
        "a100-mig-",
        "gpu-",
        "cpu-mig-1g-5gb",
        "A100",
        "../h200",
        "",
        "cpu-capped-9w",
        "a101-capped-200w",
        "h200-capped-0w",
        "h200-capped",
    ],
)
def test_no_machine_has_such_a_name(name: str) -> None:
    assert not machines.is_id(name)


def test_the_profile_of_a_virtual_gpu_is_told_by_its_name() -> None:
    virtual = [
        "GRID A100-40C",
        "NVIDIA A100-3-20C",
        "GRID T4-16Q",
        "NVIDIA A16-2B",
        "NVIDIA A16-1B4",
        "NVIDIA A40-2B4",
        "NVIDIA A100-1-5CME",
    ]
    assert all(map(machines.is_virtual, virtual))
    assert not any(machines.is_virtual(name) for name, *_ in NAMES if not name.startswith("GRID"))


def test_without_a_gpu_it_is_the_cpu() -> None:
    assert machines.recognise(None).id == machines.machine(None, None).id == "cpu"


def test_refuses_another_machine_saying_what_it_found() -> None:
    with pytest.raises(WrongMachineError, match=r"needs an NVIDIA A100; found: NVIDIA H200$"):
        machines.machine("a100", Gpu("NVIDIA H200", (9, 0)))
    with pytest.raises(
        WrongMachineError, match=r"needs an NVIDIA GeForce RTX 3090; found: no GPU that PyTorch can use$"
    ):
        machines.machine("3090", None)
    with pytest.raises(WrongMachineError, match=r"needs an NVIDIA A100 SXM 80 GB; found: NVIDIA A100 80GB PCIe$"):
        machines.machine("a100-80gb-sxm", Gpu("NVIDIA A100 80GB PCIe", (8, 0)))
    with pytest.raises(WrongMachineError, match=r"needs the slice 1g-10gb of an NVIDIA A100 SXM 80 GB; found: NVIDIA"):
        machines.machine("a100-80gb-sxm-mig-1g-10gb", Gpu("NVIDIA A100-SXM4-80GB", (8, 0)))
    assert machines.machine("a100", Gpu("NVIDIA A100 80GB PCIe", (8, 0))).id == "a100-80gb-pcie"


def test_a_gpu_that_is_not_listed_can_be_asked_for() -> None:
    assert "gpu" in machines.known_ids()
    assert machines.machine("gpu", Gpu("NVIDIA L4", (8, 9))).title == "NVIDIA L4"
    with pytest.raises(WrongMachineError, match=r"needs a GPU that is not listed; found: NVIDIA H200$"):
        machines.machine("gpu", Gpu("NVIDIA H200", (9, 0)))


def test_the_cpu_is_there_beside_a_gpu() -> None:
    assert machines.machine("cpu", Gpu("NVIDIA H200", (9, 0))).device == "cpu"


def test_every_id_is_a_family_and_every_suite_can_be_planned() -> None:
    found = [machines.recognise(Gpu(name, capability)) for name, capability, *_ in NAMES] + [machines.recognise(None)]
    named = {machine.id for machine in found} | {machine.family for machine in found}
    unnamed = set(machines.known_ids()) - named - {machines.UNKNOWN_GPU}
    assert not unnamed, f"NAMES above must have a name that the driver gives each of {unnamed}"
    for name in {machine.suite for machine in found}:
        for quick in (True, False):
            keys = planned(table(name), quick=quick, backend="auto", on_gpu=name != "cpu")
            long = {"first-step", "train-loop"} if quick and name != "cpu" else set()
            assert {key.mode for key in keys} >= set(MODES) - {"memory"} - long
            assert len({key.name for key in keys}) == len(keys), "two cases of one name"


def test_quick_is_a_part_of_the_whole() -> None:
    for name in ("cpu", "24gb", "80gb"):
        quick, whole = (
            {key.name for key in planned(table(name), quick=quick, backend="auto", on_gpu=True)}
            for quick in (True, False)
        )
        assert quick < whole

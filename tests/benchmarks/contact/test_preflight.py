"""Which machines can be measured, and what is said of those that cannot."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contact import preflight, session
from benchmarks.contact.cause import Cause, diagnose
from benchmarks.contact.preflight import MachineFacts
from harness import machines
from harness.machines import Gpu
from tests.fake_nvml import process
from tests.fake_nvml.boards import BOARDS, OnGpu, Refused

GPU_3090 = Gpu("NVIDIA GeForce RTX 3090", (8, 6))
MIB_24GB = 24_100.0


def facts(gpu: Gpu | None = GPU_3090, **changes: Any) -> MachineFacts:
    """An idle machine with this GPU."""
    of_gpu = MachineFacts(
        machine=machines.recognise(gpu),
        asked_for_cpu=False,
        device=gpu.name if gpu else "A CPU",
        image=None,
        driver="580.65.06" if gpu else None,
        driver_loaded=gpu is not None,
        compute_capability=gpu.compute_capability if gpu else None,
        memory_mib=MIB_24GB,
        in_use_mib=400.0 if gpu else None,
        other_processes=0 if gpu else None,
        idle_processes=0,
        triton="3.7.1",
        torch="2.11.0",
        free_disk_mib=9000.0,
        load=0.1,
        cores=8,
    )
    return dataclasses.replace(of_gpu, **changes)


@pytest.mark.parametrize(
    "found",
    [
        facts(),
        facts(Gpu("NVIDIA A100-SXM4-40GB", (8, 0)), image="nsa:a100-12ab"),
        facts(Gpu("NVIDIA GeForce RTX 5090", (12, 0))),
        facts(other_processes=None, driver=None),
        facts(in_use_mib=2300.0),
        facts(idle_processes=2),
        facts(None),
        facts(None, load=7.9),
        facts(None, driver_loaded=True, asked_for_cpu=True),
    ],
    ids=[
        "3090",
        "a100 in its image",
        "unlisted",
        "without NVML",
        "a display",
        "idle",
        "cpu",
        "busy cpu",
        "cpu on purpose",
    ],
)
def test_a_machine_that_can_be_measured(found: MachineFacts) -> None:
    assert session.refusal(preflight.findings(found)) is None


REFUSED: list[tuple[MachineFacts, str, Cause, str]] = [
    (facts(other_processes=2), "other work", Cause.MACHINE, "2 other processes compute on the GPU"),
    (facts(in_use_mib=2500.0), "memory", Cause.MACHINE, "2,500 of 24,100 MiB in use"),
    (facts(Gpu("Tesla T4", (7, 5))), "compute capability", Cause.MACHINE, "7.5; the Triton kernels need 8.0"),
    (facts(virtual=True), "GPU", Cause.MACHINE, "a vGPU: other guests use it in turn"),
    (facts(triton=None), "Triton", Cause.TRITON, "not installed"),
    (facts(None, driver_loaded=True), "GPU", Cause.DRIVER, "PyTorch 2.11.0 can use no GPU"),
    (facts(free_disk_mib=100.0), "disk", Cause.MACHINE, "100 MiB free"),
]


@pytest.mark.parametrize(("found", "name", "cause", "message"), REFUSED, ids=[row[3] for row in REFUSED])
def test_a_machine_that_cannot(found: MachineFacts, name: str, cause: Cause, message: str) -> None:
    refused = session.refusal(preflight.findings(found))
    assert refused is not None
    assert (refused.name, refused.cause) == (name, cause)
    assert message in refused.message
    assert refused.do
    told = session.of_preflight(refused)
    assert told.cause is cause
    assert told.message.startswith(name)


def test_an_unlisted_gpu_is_named_as_one() -> None:
    messages = {one.name: one.message for one in preflight.findings(facts(Gpu("NVIDIA GeForce RTX 5090", (12, 0))))}
    assert messages["GPU"].startswith("NVIDIA GeForce RTX 5090 (gpu-geforce-rtx-5090, not listed")


def test_an_idle_process_is_told() -> None:
    messages = {one.name: one.message for one in preflight.findings(facts(idle_processes=1))}
    assert messages["other work"] == "none computes on the GPU; 1 idle process holds memory of it"


@pytest.mark.parametrize(
    ("board", "sm_percent", "counted"),
    [("a100-80gb-sxm", 60, (1, 0)), ("a100-80gb-sxm", 2, (0, 1)), ("a100-80gb-sxm-mig-3g-40gb", 60, (1, 0))],
)
def test_counts_other_processes_as_a_session_does(
    board: str, sm_percent: int, counted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.getppid()
    busy = BOARDS[board].telling(processes=(OnGpu(sm_percent=sm_percent), OnGpu(os.getpid())))
    process.install(monkeypatch, busy, other)
    assert preflight._other_processes() == counted
    process.install(monkeypatch, BOARDS[board].telling(processes=Refused("NOT_SUPPORTED")))
    assert preflight._other_processes() == (None, 0)


def test_reads_this_machine(tmp_path: Path) -> None:
    found = preflight.read(machines.recognise(None), tmp_path, asked_for_cpu=True)
    assert found.in_use_mib is found.driver is found.compute_capability is found.other_processes is None
    assert found.memory_mib > 0
    assert found.cores >= 1
    session.keep_preflight(tmp_path, preflight.findings(found))
    assert (tmp_path / session.PREFLIGHT).exists()


LOGS = [
    (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", Cause.MACHINE),
    (1, "FAILED tests/laws/x.py - torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB", Cause.MACHINE),
    (1, "OSError: [Errno 28] No space left on device", Cause.MACHINE),
    (-9, "collected 12 items", Cause.MACHINE),
    (2, "python -m benchmarks: this session needs an NVIDIA A100; found: NVIDIA L4", Cause.MACHINE),
    (1, "The NVIDIA driver on your system is too old (found version 11040)", Cause.DRIVER),
    (1, "RuntimeError: CUDA error: no kernel image is available for execution on the device", Cause.DRIVER),
    (1, "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch", Cause.DRIVER),
    (1, "ERROR: GPU is lost", Cause.MACHINE),
    (2, "python -m benchmarks: NVIDIA A10-24Q is a vGPU: other guests use its multiprocessors", Cause.MACHINE),
    (2, "python -m benchmarks: python (pid 7) computed on the GPU too, for as long as was waited", Cause.MACHINE),
    (1, "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", Cause.MACHINE),
    (1, "torch.AcceleratorError: CUDA-capable device(s) is/are busy or unavailable", Cause.MACHINE),
    (1, "RuntimeError: Failed to find C compiler. Please specify via CC environment variable", Cause.MACHINE),
    (1, "cuda_utils.c:7:10: fatal error: Python.h: No such file or directory", Cause.MACHINE),
    (1, "RuntimeError: Found no NVIDIA driver on your system", Cause.DRIVER),
    (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", Cause.DRIVER),
    (1, "triton.compiler.errors.CompilationError: at 12:4", Cause.TRITON),
    (1, "RuntimeError: PassManager::run failed", Cause.TRITON),
    (1, "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072", Cause.OURS),
    (1, "[1/2 3 s] decode/8x2x64/nsa   INCORRECT  o: 0.1 > 0.01\nx/nsa  OUT_OF_MEMORY  out of memory", Cause.OURS),
    (1, "E  AssertionError: row 3 sees the future\nFAILED tests/laws/test_causality.py::test_x", Cause.OURS),
    (1, "", Cause.OURS),
]  # fmt: skip


@pytest.mark.parametrize(("code", "log", "cause"), LOGS)
def test_whose_matter_a_failure_is(code: int, log: str, cause: Cause) -> None:
    found = diagnose(code, f"before\n{log}\n" if log else "")
    assert found.cause is cause
    assert found.message
    assert found.do
    assert found.send


def test_the_line_that_was_seen_is_told() -> None:
    assert diagnose(1, "a\n  no kernel image is available\nb\n").message == "no kernel image is available"
    assert diagnose(1, "a\nFAILED tests/x.py::test_y\n2 failed\n").message == "FAILED tests/x.py::test_y"

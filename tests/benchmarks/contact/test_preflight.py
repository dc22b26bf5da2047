"""Which machines can be measured, and what is said of those that cannot."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contact import preflight, session
from benchmarks.contact.cause import Cause
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
        c_compiler="/usr/bin/gcc",
        python_headers=True,
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
        facts(None, c_compiler=None, python_headers=False),
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
        "cpu without a compiler",
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
    (facts(c_compiler=None), "C compiler", Cause.MACHINE, "none found: Triton builds its launcher with one"),
    (facts(python_headers=False), "C compiler", Cause.MACHINE, "/usr/bin/gcc, but no Python.h"),
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


def test_looks_for_a_compiler_and_headers_where_triton_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> tuple[str | None, bool]:
        found = preflight.read(machines.recognise(None), tmp_path, asked_for_cpu=True)
        return found.c_compiler, found.python_headers

    include = tmp_path / "include"
    include.mkdir()
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda name, scheme: str(include))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert seen() == (None, False)
    (include / "Python.h").touch()
    for name in ("clang", "gcc", "my-cc"):  # Triton takes gcc where there are both
        (tmp_path / name).touch(mode=0o755)
        asked = tmp_path / name
        if name == "my-cc":
            monkeypatch.setenv("CC", str(asked))
        assert seen() == (str(asked), True)
    monkeypatch.setenv("CC", "not-there")
    assert seen() == (None, True)


def test_reads_this_machine(tmp_path: Path) -> None:
    found = preflight.read(machines.recognise(None), tmp_path, asked_for_cpu=True)
    assert found.in_use_mib is found.driver is found.compute_capability is found.other_processes is None
    assert found.memory_mib > 0
    assert found.cores >= 1
    session.keep_preflight(tmp_path, preflight.findings(found))
    assert (tmp_path / session.PREFLIGHT).exists()

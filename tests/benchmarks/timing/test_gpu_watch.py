"""Other processes and heat are waited for, refused or written down, each by its name; a session on a vGPU is refused.

The fake's time passes only while somebody sleeps; `Course` gives one value for each reading.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.timing import gpu_watch
from benchmarks.timing.gpu_watch import (
    COOLED,
    HOT,
    IDLE_PROCESS,
    LONGEST_IN_ALL_S,
    LONGEST_WAIT_S,
    OTHER_PROCESS,
    UNSEEN,
    WAITED,
    WARMER,
    GpuWatch,
    UnfitGpuError,
)
from harness import machines, nvml
from tests.fake_nvml import process
from tests.fake_nvml.boards import ALONE, BOARDS, Board, Course, OnGpu, Refused

A100 = BOARDS["a100-80gb-sxm"]
NOT_HERE = 2**22 + 1
"""No process of this machine has such a number, as the host's have none in a container."""


@pytest.fixture
def other() -> Iterator[int]:
    """Another process than ours: its parent is not this one, so that it is none of our children."""
    start = "sleep 1000 >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", start], stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout)
    yield pid
    psutil.Process(pid).kill()


def watch(monkeypatch: pytest.MonkeyPatch, board: Board, other: int | None = None) -> GpuWatch:
    process.install(monkeypatch, board, other)
    return GpuWatch()


def test_a_free_and_cool_gpu_is_ready_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(monkeypatch, A100).ready() == {}
    assert gpu_watch.time.monotonic() == 0.0


def test_a_process_that_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    course = Course((ALONE, ALONE, *[(OnGpu(),)] * 4, ALONE))
    noticed = watch(monkeypatch, A100.telling(processes=course), other).ready()
    assert noticed == {WAITED: f"waited 30 s for sleep (pid {other}, 8000 MiB, SMs 97 % busy) to end"}


def test_a_process_that_goes_on_is_named_and_not_waited_for_again(monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    seen = watch(monkeypatch, A100.telling(processes=(OnGpu(),)), other)
    assert seen.ready() == {OTHER_PROCESS: f"sleep (pid {other}, 8000 MiB, SMs 97 % busy) computed on the GPU too"}
    assert gpu_watch.time.monotonic() == LONGEST_WAIT_S
    assert OTHER_PROCESS in seen.ready()
    assert gpu_watch.time.monotonic() == LONGEST_WAIT_S


def test_one_that_holds_memory_alone_is_told_and_one_that_draws_is_not(
    monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    noticed = watch(monkeypatch, A100.telling(processes=(OnGpu(sm_percent=2),)), other).ready()
    assert list(noticed) == [IDLE_PROCESS]
    assert f"sleep (pid {other}, 8000 MiB, SMs 2 % busy) held memory of the GPU" in noticed[IDLE_PROCESS]
    assert watch(monkeypatch, A100.telling(processes=(OnGpu(sm_percent=2, draws=True),)), other).ready() == {}
    game = A100.telling(processes=(OnGpu(sm_percent=60, draws=True),))
    assert OTHER_PROCESS in watch(monkeypatch, game, other).ready()


def test_where_it_is_not_told_how_busy_a_process_is_it_counts_as_busy(
    monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    blind = BOARDS["a100-80gb-sxm-mig-3g-40gb"]
    assert OTHER_PROCESS in watch(monkeypatch, blind.telling(processes=(OnGpu(),)), other).ready()
    assert watch(monkeypatch, blind.telling(processes=(OnGpu(draws=True),)), other).ready() == {}


def test_this_process_and_its_children_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        ours = (OnGpu(os.getpid()), OnGpu(child.pid))
        assert watch(monkeypatch, A100.telling(processes=ours)).ready() == {}
        child.kill()


def test_in_a_container_only_a_process_of_before_the_session_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (OnGpu(NOT_HERE),)
    later = Course((ALONE, hosts))
    assert watch(monkeypatch, A100.telling(processes=later)).ready() == {}
    before = watch(monkeypatch, A100.telling(processes=hosts))
    assert before.ready()[OTHER_PROCESS].startswith(f"a process (pid {NOT_HERE}, ")
    untold = A100.telling(processes=hosts, utilisation=Refused("NOT_SUPPORTED"))
    noticed = watch(monkeypatch, untold).ready()
    assert noticed == {IDLE_PROCESS: f"a process (pid {NOT_HERE}, 8000 MiB) held memory of the GPU"}  # it may be ours


def test_a_hot_gpu_cools_first(monkeypatch: pytest.MonkeyPatch) -> None:
    board = A100.telling(nvmlDeviceGetTemperature=Course((85, 85, 85, 80, 76, 73, 72, 71)))
    assert watch(monkeypatch, board).ready() == {COOLED: "waited 40 s to cool from 85 to 71 degrees C"}
    warm = A100.telling(nvmlDeviceGetTemperature=83)  # 9 below the slowdown
    assert watch(monkeypatch, warm).ready() == {}


def test_one_that_stays_hot_is_told_and_the_waits_of_a_session_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch, A100.telling(nvmlDeviceGetTemperature=90))
    assert seen.ready() == {HOT: "90 degrees C before the case, after 120 s of waiting"}
    for _ in range(30):
        assert HOT in seen.ready()
    assert gpu_watch.time.monotonic() == LONGEST_IN_ALL_S


def test_a_gpu_that_has_warmed_since_the_session_began_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = (30,) * 3 + (49,) * 3 + (50,) * 3  # each time: is it told, is it hot, has it warmed
    seen = watch(monkeypatch, A100.telling(nvmlDeviceGetTemperature=Course(readings)))
    assert (seen.ready(), seen.ready()) == ({}, {})
    assert seen.ready() == {WARMER: "50 degrees C before the case, 30 when the session began"}


def test_without_a_slowdown_temperature_a_usual_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = A100.telling(nvmlDeviceGetTemperatureThreshold=Refused("NOT_SUPPORTED"))
    assert HOT in watch(monkeypatch, blind.telling(nvmlDeviceGetTemperature=82)).ready()
    assert watch(monkeypatch, blind.telling(nvmlDeviceGetTemperature=81)).ready() == {}


@pytest.mark.parametrize(
    ("field", "what"), [("processes", "other processes"), ("nvmlDeviceGetTemperature", "its temperature")]
)
def test_what_cannot_be_seen_is_said(field: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board = A100.telling(**{field: Refused("NO_PERMISSION")})
    assert watch(monkeypatch, board).ready() == {UNSEEN: f"NVML does not tell {what}"}


def test_without_nvml_all_of_it_is_unseen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    process.install(monkeypatch, A100)
    monkeypatch.setattr(nvml, "device", lambda: None)
    seen = gpu_watch.begin(machines.machine(None, machines.visible_gpu()))
    assert seen is not None
    assert seen.ready() == {UNSEEN: "NVML does not tell other processes and its temperature"}
    assert "note: NVML does not answer" in capsys.readouterr().out


def test_the_cpu_has_no_watch() -> None:
    assert gpu_watch.begin(machines.recognise(None)) is None


def begin(monkeypatch: pytest.MonkeyPatch, board: Board, other: int | None = None) -> GpuWatch | None:
    process.install(monkeypatch, board, other)
    return gpu_watch.begin(machines.machine(None, machines.visible_gpu()))


def test_a_session_beside_a_process_that_goes_on_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    with pytest.raises(UnfitGpuError, match=rf"^sleep \(pid {other}, 8000 MiB, SMs 97 % busy\) computed .*End it"):
        begin(monkeypatch, A100.telling(processes=(OnGpu(),)), other)


def test_what_a_session_waited_for_at_first_is_told_of_its_first_case(
    monkeypatch: pytest.MonkeyPatch, other: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = begin(monkeypatch, BOARDS["3090"], other)
    assert seen is not None
    said = capsys.readouterr().out
    assert f"note: waited 20 s for sleep (pid {other}, " in said
    assert "note: waited 20 s to cool from 90 to 74 degrees C" in said
    assert set(seen.ready()) == {WAITED, COOLED}
    assert seen.ready() == {}


@pytest.mark.parametrize("board", [BOARDS["vgpu"], Board("GRID A100-40C", (8, 0), 108)])
def test_a_vgpu_is_refused(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnfitGpuError, match=r"is a vGPU: other guests use its multiprocessors in turn"):
        begin(monkeypatch, board)


@pytest.mark.parametrize(
    ("board", "said"),
    [
        (
            "a100-80gb-pcie-capped-200w",
            "the power limit is 200 W, the board's own is 300 W: this is the machine a100-80gb-pcie-capped-200w",
        ),
        ("a100-80gb-sxm-mig-3g-40gb", "a MIG slice: clocks, power and heat are the whole board's"),
        ("gpu-geforce-rtx-5090", "persistence mode is off"),
        ("a100-40gb-pcie", "no right to lock the clocks"),
        ("a100-80gb-sxm", ""),
    ],
)
def test_how_the_gpu_is_set_up_is_printed(
    board: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    begin(monkeypatch, BOARDS[board])
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(printed) is bool(said)

"""Each field of NVML stands alone: what one board, driver or user is not told is None, and the rest is still read."""

from __future__ import annotations

import hashlib
import os
import time
from types import SimpleNamespace

import pytest

from harness import nvml
from tests.fake_nvml import process
from tests.fake_nvml.boards import BOARDS, OnGpu, Refused
from tests.fake_nvml.library import FUNCTIONS, UUID, real

A100 = BOARDS["a100-80gb-sxm"]
REFUSALS = ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "ABSENT")
FIELDS = {
    "nvmlDeviceGetEnforcedPowerLimit": lambda: (nvml.settings(), "power_limit_w"),
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda: (nvml.settings(), "default_power_limit_w"),
    "nvmlDeviceGetPersistenceMode": lambda: (nvml.settings(), "persistence"),
    "nvmlDeviceGetDisplayActive": lambda: (nvml.settings(), "display"),
    "nvmlDeviceGetAPIRestriction": lambda: (nvml.settings(), "may_lock_clocks"),
    "nvmlDeviceGetVirtualizationMode": lambda: (nvml.settings(), "virtual"),
    "nvmlDeviceGetMaxClockInfo": lambda: (nvml.limits(), "max_sm_mhz"),
    "nvmlDeviceGetTemperature": lambda: (SimpleNamespace(value=nvml.temperature_c()), "value"),
    "nvmlDeviceGetTemperatureThreshold": lambda: (SimpleNamespace(value=nvml.slowdown_c()), "value"),
    "processes": lambda: (SimpleNamespace(value=nvml.processes()), "value"),
}


@pytest.fixture(autouse=True)
def _no_administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_a_fake_board_is_forgotten_with_its_test() -> None:
    before = nvml.device()
    with pytest.MonkeyPatch.context() as patch:
        library = process.install(patch, A100)
        assert (nvml.device() or ())[:1] == (library,)
    assert nvml.device() == before


def test_all_fields_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    process.install(monkeypatch, A100)
    board = hashlib.sha256(UUID.encode()).hexdigest()[:12]
    assert nvml.settings() == nvml.GpuSettings(400.0, 400.0, True, False, True, False, board)
    assert nvml.limits() == nvml.ClockLimits(1410, 1410, 400.0)
    assert (nvml.driver(), nvml.temperature_c(), nvml.slowdown_c(), nvml.processes()) == ("580.82.07", 41, 92, [])


@pytest.mark.parametrize("why", REFUSALS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_not_told_is_none_and_the_others_stand(
    field: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.install(monkeypatch, A100.telling(**{field: Refused(why)}))
    for name, read in FIELDS.items():
        found, value = read()
        assert (getattr(found, value) is None) is (name == field), name


def test_without_nvml_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "device", lambda: None)
    assert (nvml.settings(), nvml.limits(), nvml.driver(), nvml.temperature_c(), nvml.processes()) == (None,) * 5


@pytest.mark.parametrize(
    ("limit_mw", "default_mw", "capped", "capped_w"),
    [
        (200_400, 300_000, True, 200),
        (284_000, 300_000, True, 280),  # to ten watts
        (279_600, 300_000, True, 280),
        (0, 300_000, True, None),
        (286_000, 300_000, True, None),
        (300_000, 300_000, False, None),
        (Refused("NOT_SUPPORTED"), 300_000, False, None),
        (200_000, Refused("NOT_SUPPORTED"), False, None),
    ],
)
def test_a_power_cap_is_a_limit_below_the_board_s_own(
    limit_mw: object, default_mw: object, capped: bool, capped_w: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells = {"nvmlDeviceGetEnforcedPowerLimit": limit_mw, "nvmlDeviceGetPowerManagementDefaultLimit": default_mw}
    process.install(monkeypatch, A100.telling(**tells))
    settings = nvml.settings()
    assert settings is not None
    assert (settings.capped, settings.capped_w) == (capped, capped_w)


def test_processes_are_told_by_name_memory_and_how_busy_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = (OnGpu(os.getpid(), 512, 97), OnGpu(2**22 + 1, None, 0, draws=True))
    process.install(monkeypatch, A100.telling(processes=on_gpu))
    screen, computing = nvml.processes() or []
    assert (computing.pid, computing.memory_mib, computing.sm_percent, computing.draws) == (os.getpid(), 512, 97, False)
    assert (screen.name, screen.memory_mib, screen.sm_percent, screen.draws) == ("a process", None, 0, True)
    assert str(computing).endswith(f"(pid {os.getpid()}, 512 MiB, SMs 97 % busy)")


@pytest.mark.parametrize("why", REFUSALS)
def test_how_busy_a_process_is_need_not_be_told(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process.install(monkeypatch, A100.telling(processes=(OnGpu(os.getpid()),), utilisation=Refused(why)))
    (found,) = nvml.processes() or []
    assert found.sm_percent is None
    assert str(found).endswith(f"(pid {os.getpid()}, 8000 MiB)")


@pytest.mark.parametrize("distance_c", [-2, 0, 12])
def test_a_distance_is_no_slowdown_temperature(distance_c: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process.install(monkeypatch, A100.telling(nvmlDeviceGetTemperatureThreshold=distance_c))
    assert nvml.slowdown_c() is None


def test_what_a_process_did_long_ago_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    library = process.install(monkeypatch, A100.telling(processes=(OnGpu(os.getpid()),)))
    old_us = int((time.time() - 60) * 1e6)
    sample = SimpleNamespace(pid=os.getpid(), smUtil=97, timeStamp=old_us)
    monkeypatch.setattr(library, "_nvmlDeviceGetProcessUtilization", lambda handle, since_us: [sample])
    (found,) = nvml.processes() or []
    assert found.sm_percent == 0


def test_of_a_slice_the_clocks_are_the_board_s_and_the_processes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library = process.install(monkeypatch, BOARDS["a100-80gb-sxm-mig-3g-40gb"])
    assert nvml.temperature_c() == 41
    assert nvml.processes() == []  # the fake asserts which handle is asked
    assert library.readings["nvmlDeviceGetDeviceHandleFromMigDeviceHandle"] == 1


def test_every_name_of_the_fake_is_one_of_nvml_s(monkeypatch: pytest.MonkeyPatch) -> None:
    library = process.install(monkeypatch, A100)
    assert [name for name in FUNCTIONS if not hasattr(real(), name)] == []
    with pytest.raises(NotImplementedError, match="no nvmlDeviceGetName"):
        library.nvmlDeviceGetName("a handle")

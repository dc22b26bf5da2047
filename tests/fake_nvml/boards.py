"""What NVML tells of each board: a value for ever, one value after the other, or a refusal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BUSY, AT_REST = 97, 0
"""Per cent of the multiprocessors."""
POWER_CAP, HEAT, IDLE = 0x4, 0x20, 0x1
"""NVML's bits for why a clock is lowered."""


@dataclass(frozen=True)
class Course:
    """One value for each reading; the last for ever."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Refused:
    """A field that NVML does not tell."""

    why: str
    """"NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND" (an older driver), or "ABSENT" (an older pynvml, which
    has no such name)."""


@dataclass(frozen=True)
class OnGpu:
    """A process on the GPU; `pid` None stands for the one that the test starts."""

    pid: int | None = None
    mib: int | None = 8000
    sm_percent: int = BUSY
    draws: bool = False


ALONE: tuple[OnGpu, ...] = ()
DEFAULTS: Mapping[str, Any] = {
    "nvmlSystemGetDriverVersion": "580.82.07",
    "nvmlDeviceGetClockInfo": 1410,
    "nvmlDeviceGetMaxClockInfo": 1410,
    "nvmlDeviceGetCurrentClocksThrottleReasons": IDLE,
    "nvmlDeviceGetPowerUsage": 250_000,
    "nvmlDeviceGetEnforcedPowerLimit": 400_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 400_000,
    "nvmlDeviceGetTemperature": 41,
    "nvmlDeviceGetTemperatureThreshold": 92,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetDisplayActive": 0,
    "nvmlDeviceGetAPIRestriction": 0,
    "nvmlDeviceGetVirtualizationMode": 0,
    "processes": ALONE,
    "utilisation": None,
}
"""By NVML's own names; milliwatts, MHz, degrees C. `processes` are the ones on the GPU, `utilisation` a `Refused` where
NVML tells none."""


@dataclass(frozen=True)
class Board:
    """One GPU."""

    name: str
    compute_capability: tuple[int, int]
    sms: int
    tells: Mapping[str, Any] = field(default_factory=dict)
    """What differs from `DEFAULTS`."""

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice."""
        return " MIG " in self.name

    def telling(self, **changes: Any) -> Board:
        """The same board, which tells something else."""
        return dataclasses.replace(self, tells={**self.tells, **changes})

    def field(self, name: str) -> Any:
        """What it tells of one field: a value, a `Course` or a `Refused`."""
        return {**DEFAULTS, **self.tells}[name]


_A100, _GEFORCE = (8, 0), {"nvmlDeviceGetPersistenceMode": 0, "nvmlDeviceGetAPIRestriction": 1}
_300_W = {"nvmlDeviceGetEnforcedPowerLimit": 300_000, "nvmlDeviceGetPowerManagementDefaultLimit": 300_000}
BOARDS: Mapping[str, Board] = {
    "a100-80gb-sxm": Board("NVIDIA A100-SXM4-80GB", _A100, 108),
    "a100-80gb-pcie": Board("NVIDIA A100 80GB PCIe", _A100, 108, _300_W),
    "a100-80gb-pcie-capped-200w": Board(
        "NVIDIA A100 80GB PCIe", _A100, 108, {**_300_W, "nvmlDeviceGetEnforcedPowerLimit": 200_000}
    ),
    "a100-40gb-sxm": Board("NVIDIA A100-SXM4-40GB", _A100, 108),
    "a100-40gb-pcie": Board("NVIDIA A100-PCIE-40GB", _A100, 108, {"nvmlDeviceGetAPIRestriction": 1}),
    "a100-80gb-sxm-mig-3g-40gb": Board(
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb", _A100, 42, {"utilisation": Refused("NOT_SUPPORTED")}
    ),
    "3090": Board(
        "NVIDIA GeForce RTX 3090",
        (8, 6),
        82,
        {
            **_GEFORCE,
            "nvmlDeviceGetDisplayActive": 1,
            "nvmlDeviceGetTemperature": Course((91, 90, 86, 81, 74)),
            "nvmlDeviceGetTemperatureThreshold": 95,
            "processes": Course((*[(OnGpu(),)] * 5, ALONE)),
        },
    ),
    "gpu-geforce-rtx-5090": Board("NVIDIA GeForce RTX 5090", (12, 0), 170, _GEFORCE),
    "h200": Board("NVIDIA H200", (9, 0), 132),
    "vgpu": Board("NVIDIA A100", _A100, 108, {"nvmlDeviceGetVirtualizationMode": 2}),
}
"""By the id that the benches are to give them. Strangers' machines: an A100 under a power cap, one whose user may not
lock its clocks, a slice that tells of no process how busy it is, an RTX 3090 that draws a screen, begins hot and is
used by another process at first, one that nobody has listed; an H200, which can stand in for most of them; and a vGPU
behind the name of a whole board."""

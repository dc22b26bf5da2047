"""The NSA_* variables, read once at the edge. An unknown one is an error that suggests the nearest name.

| variable | default | what it does |
|---|---|---|
| NSA_TB_DISABLE=1 | 0 | telemetry.tensorboard = false |
| NSA_DISABLE_CSV_LOGS=1 | 0 | telemetry.csv = false |
| NSA_DISABLE_AUX_STATS=1 | 0 | telemetry.statistics = false |
| NSA_SDPA_NO_FLASH=1 | 0 | runtime.use_flash = false |
| NSA_COMMIT, NSA_IMAGE | none | what env.json names as commit and container image |

The variables of the suites and the images (CONTRIBUTING.md) have no meaning here and are no errors.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SWITCHES = {
    "NSA_TB_DISABLE": "telemetry.tensorboard",
    "NSA_DISABLE_CSV_LOGS": "telemetry.csv",
    "NSA_DISABLE_AUX_STATS": "telemetry.statistics",
    "NSA_SDPA_NO_FLASH": "runtime.use_flash",
}
"""Variables that turn something off, and what."""

_KERNELS = "model.backend chooses the kernels; heartbeats count fallbacks"
RETIRED = {
    "NSA_PREFILL_BATCHED": "training always takes all tokens in one call",
    "NSA_USE_FA2": _KERNELS,
    "NSA_USE_TRITON_SEL": _KERNELS,
    "NSA_FORCE_SEL_MASK": _KERNELS,
    "NSA_USE_SEL_MASK": _KERNELS,
    "NSA_USE_SEL_PACK": _KERNELS,
    "NSA_FORCE_PARITY": "nsa.reference is the specification, and the tests hold every backend to it",
    "CONFIG": "--profile names the profile",
}
"""What the field set, and what replaced it."""

_TOLD = ("NSA_COMMIT", "NSA_IMAGE")
_OTHERS = (
    "NSA_BASE_IMAGE", "NSA_DIRTY", "NSA_ENGINE", "NSA_EXPECT", "NSA_FAMILY", "NSA_RESULTS", "NSA_WHEELS",
)  # fmt: skip
"""What the suites and the images are told; training has no use for it."""


@dataclass(frozen=True)
class Environment:
    """What the variables said."""

    values: Mapping[str, tuple[Any, str]]
    """(value, variable) by the dotted name of a setting."""
    notes: tuple[str, ...] = ()
    """Variables without an effect, and what replaced them."""
    commit: str | None = None
    image: str | None = None


def read(variables: Mapping[str, str]) -> Environment:
    """Raises ValueError naming an unknown NSA_* variable, or a switch that is neither 0 nor 1."""
    values: dict[str, tuple[Any, str]] = {}
    notes = []
    for name in sorted(variables):
        if name in SWITCHES:
            if variables[name] not in ("0", "1"):
                raise ValueError(f"{name} must be 0 or 1; got {variables[name]!r}")
            values[SWITCHES[name]] = (variables[name] == "0", f"{name}={variables[name]}")
        elif name in RETIRED:
            notes.append(f"{name} has no effect (environment): {RETIRED[name]}")
        elif name.startswith("NSA_") and name not in (*_TOLD, *_OTHERS):
            known = [*SWITCHES, *_TOLD, *_OTHERS, *(retired for retired in RETIRED if retired.startswith("NSA_"))]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ValueError(f"unknown variable {name}; " + (f"did you mean {near[0]}?" if near else ", ".join(known)))
    return Environment(values, tuple(notes), variables.get("NSA_COMMIT"), variables.get("NSA_IMAGE"))

"""Lines of replayed incidents, results/regression/*/*.jsonl, from elsewhere: whether they contradict themselves.

The incidents are another suite's, so that what its lines say is known here by its words; a test holds them to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.history import plausible
from harness import schema
from harness.nvml import GpuSettings

FOLDER = "regression"
SCHEMA_VERSION = 1
FAULTY, PRODUCT, SOAK = PARTS = ("faulty", "product", "soak")
PASSED, SKIPPED = "PASSED", "SKIPPED"
VERDICTS = (
    PASSED, "STALLED", "OUT_OF_MEMORY", "CRASHED", "NONFINITE", "LEAK", "TOO_GOOD", "WRONG", "SLOW", SKIPPED,
)  # fmt: skip
_NEEDED = ("fingerprint", "incident", "part", "expects", "verdict", "ok", "schema_version")
WORDS = frozenset({*_NEEDED, *PARTS, *map(str.lower, VERDICTS)})
"""What every line is made of, in small letters."""


def require_sound(line: Mapping[str, Any], machine: str) -> None:
    """Raises ValueError or TypeError naming the field of a line that cannot be; `machine` is that of its folder."""
    if missing := [name for name in _NEEDED if name not in line]:
        raise ValueError(f"a replayed incident must have {', '.join(missing)}")
    if line["schema_version"] != SCHEMA_VERSION or line["schema_version"] is True:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION}; got {line['schema_version']!r}")
    for name, known in (("part", PARTS), ("expects", VERDICTS), ("verdict", VERDICTS)):
        if line[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {line[name]!r}")
    _require_ok_follows(line)
    _require_of_machine(line["fingerprint"], machine)


def _require_ok_follows(line: Mapping[str, Any]) -> None:
    part, expects, verdict, ok = (line[name] for name in ("part", "expects", "verdict", "ok"))
    if not isinstance(ok, bool):
        raise TypeError(f"ok must be bool; got {ok!r}")
    if (part == FAULTY) is (expects == PASSED) or expects == SKIPPED:
        raise ValueError(f"expects must be {'a fault' if part == FAULTY else PASSED} of the part {part}; got {expects}")
    if ok and verdict != expects and (verdict != SKIPPED or part == SOAK):
        raise ValueError(f"ok must be false with the verdict {verdict} where {expects} is expected; got true")
    if not ok and verdict == expects and part != FAULTY:  # a fault may be found for another reason than the incident's
        raise ValueError(f"ok must be true with the verdict {verdict} that is expected; got false")


def _require_of_machine(fingerprint: Any, machine: str) -> None:
    if not isinstance(fingerprint, Mapping):
        raise TypeError(f"fingerprint must be a JSON object; got {type(fingerprint).__name__}")
    named, device = fingerprint.get("machine"), fingerprint.get("device")
    if not isinstance(device, str):
        raise TypeError(f"fingerprint.device must be str; got {device!r}")
    if named != machine:
        raise ValueError(f"fingerprint.machine must be that of its folder, {machine!r}; got {named!r}")
    settings = fingerprint.get("gpu_settings")
    made = None if settings is None else schema.build(GpuSettings, settings, "fingerprint.gpu_settings")
    if why := plausible.not_of_device(machine, device, fingerprint.get("cpu"), made.capped_w if made else None):
        raise ValueError(why)

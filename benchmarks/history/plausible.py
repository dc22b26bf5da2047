"""What no record can hold, whatever its types allow: characters that steer a terminal, and figures of no machine.

A record from elsewhere is asked before it is merged (`merge`). Records of this machine are not: what measures them says
nothing of the kind.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from harness import forced, machines

_HIDDEN = ("Cc", "Cf", "Zl", "Zp")
"""Unicode's categories of characters that steer a terminal or hide what stands there."""
_LINES = "\n\t"
"""Which are of them, and may stand in a text: a message of several lines, the stacks of a process."""
_BOUNDS_BY_UNIT = {
    "tokens_per_s": (0, 1e12), "tb_per_s": (0, 1e5), "gb_per_s": (0, 1e7), "tflops": (0, 1e6), "ms": (0, 1e9),
    "s": (0, 1e7), "seconds": (0, 1e7), "mib": (0, 1e9), "gb": (0, 1e7), "mhz": (0, 1e6), "w": (0, 1e6),
    "c": (-50, 150), "calls": (0, 1e12),
}  # fmt: skip
"""By the unit that a field's name carries: at least nothing, and at most twelve days of ms, a petabyte of MiB, and so
on; a chip works from -50 to 150 degrees C at the very most."""
_ENDING = r"(.*_)?{}(_min|_median|_max)?(\[\d+\])*"
_MOST = 3.5e38
"""Of any other figure: what float32 holds, in which a fault may overflow."""


def objection(value: Any, name: str) -> str | None:
    """The first thing in parsed JSON (or `dataclasses.asdict`) that cannot be, with its field; None where all can.

    `name` is what stands before the field in the message: "record" of "record.clocks.power_w_median".
    """
    if isinstance(value, str):
        return hidden(value, name, allowed=_LINES)
    if isinstance(value, Mapping):
        for key, part in value.items():
            if found := objection(key, f"a name in {name}") or objection(part, f"{name}.{key}"):
                return found
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            if found := objection(part, f"{name}[{number}]"):
                return found
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        least, most = _bounds(name)
        if not value <= most:
            return f"{name} must be at most {most:g}; got {value:.4g}"
        if value < least:
            return f"{name} must be at least {least:g}; got {value:.4g}"
    return None


def not_of_device(machine: str, device: str, processor: str | None, capped_w: int | None) -> str | None:
    """Why no record of a device of this name and power limit, beside the host's processor, can be of this machine, and
    what to do; None where it can."""
    if forced.of(machine) is not None and forced.itself(machine) == machines.CPU:
        why: str | None = f"machine {machine!r} is forced, which a CPU cannot be"
    else:
        why = machines.why_not_of(forced.itself(machine), device, processor, capped_w)
    return None if why is None else f"fingerprint.{why}; leave this out, and have it measured again"


def hidden(text: str, name: str, *, allowed: str = "") -> str | None:
    """Why a text is refused; None where all of it can be seen."""
    if any(unicodedata.category(one) in _HIDDEN and one not in allowed for one in text):
        return f"{name} must hold no control characters; got {text[:80]!a}"
    return None


def _bounds(name: str) -> tuple[float, float]:
    """Of several units that fit ("tokens_per_s", "s") the one that stands first in the table."""
    field = name.rpartition(".")[2]
    units = (unit for unit in _BOUNDS_BY_UNIT if re.fullmatch(_ENDING.format(unit), field))
    return _BOUNDS_BY_UNIT.get(next(units, ""), (-_MOST, _MOST))

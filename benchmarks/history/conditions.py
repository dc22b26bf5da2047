"""Which conditions of a run a series can be followed across, and by what.

Hard ones act on the device or on what is compiled for it (driver, CUDA, PyTorch, Triton, the GPU itself): figures on
both sides are not compared unless the same sources were measured under both (`anchors`). A board whose power limit is
well below its own is a machine of its own (`harness.machines`); a smaller difference of the limit (in `gpu_clocks`) is
such a condition. `SOFT` ones change often and mostly touch the host: dense attention of the same runs makes up for
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.fingerprint import CONDITIONS, Fingerprint

Conditions = tuple[object, ...]
"""`Fingerprint.conditions`."""
SOFT = frozenset({"platform", "threads", "flash_attn", "benchmarks_sha256"})
"""Conditions whose change a dense baseline of the same run makes up for."""
UNRECORDED = frozenset({"cudnn", "gpu_clocks"})
"""What records of earlier versions leave out: on a GPU, None is not known there."""
_HARD = [number for number, name in enumerate(CONDITIONS) if name not in SOFT]
_MAY_BE_UNKNOWN = [name in UNRECORDED for name in CONDITIONS if name not in SOFT]
_DRIVER = CONDITIONS.index("driver")


def hard(conditions: Conditions) -> Conditions:
    """The conditions that no baseline makes up for."""
    return tuple(conditions[number] for number in _HARD)


def may_be_same(a: Conditions, b: Conditions) -> bool:
    """Whether all hard conditions that both records know are equal, and what one does not know is `UNRECORDED`."""
    if a[_DRIVER] is None or b[_DRIVER] is None:  # without a GPU, None says that there is none
        return hard(a) == hard(b)
    return all(
        x == y or (unknown and (x is None or y is None))
        for x, y, unknown in zip(hard(a), hard(b), _MAY_BE_UNKNOWN, strict=True)
    )


def groups(fingerprints: Sequence[Fingerprint]) -> list[list[int]]:
    """Indices of the runs that share all their conditions, in the order in which these began."""
    found: dict[Conditions, list[int]] = {}
    for i, one in enumerate(fingerprints):
        found.setdefault(one.conditions, []).append(i)
    return list(found.values())

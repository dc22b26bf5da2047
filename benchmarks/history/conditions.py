"""Which conditions of a run a series can be followed across, and by what.

Hard ones act on the device or on what is compiled for it (driver, CUDA, PyTorch, Triton, the GPU itself): figures on
both sides are not compared unless the same sources were measured under both (`anchors`). A board whose power limit is
well below its own is a machine of its own (`harness.machines`); a smaller difference of the limit (in `gpu_clocks`) is
such a condition. `SOFT` ones change often and mostly touch the host: dense attention of the same runs makes up for
them. The board, one GPU of a kind or another, is no condition, since its figures are compared in any case; dense
attention makes up for it too where it ran on both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

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
    return _alike([one.conditions for one in fingerprints])


def groups_of_a_board(fingerprints: Sequence[Fingerprint]) -> list[list[int]]:
    """The same of the runs that share the board too; records that do not know theirs are taken for those of one."""
    return _alike([(one.conditions, one.gpu_settings and one.gpu_settings.board) for one in fingerprints])


def _alike(keys: Sequence[Hashable]) -> list[list[int]]:
    found: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return list(found.values())

"""From a key to its work, unless the implementation is absent or the case cannot fit: then neither inputs are made."""

from __future__ import annotations

from benchmarks.baselines import BASELINES
from benchmarks.cases import NSA, Work, attention, footprint, parts, train_step
from benchmarks.records import Key


def prepare(key: Key, device: str) -> Work:
    """The work of any key. Raises NotPresentError or MemoryError before anything is allocated."""
    if key.implementation != NSA:
        BASELINES[key.implementation].require(device)
    footprint.require(key, device)
    if key.mode == "train-step":
        return train_step.prepare(key, device)
    return (parts if key.mode in parts.PARTS else attention).prepare(key, device)

"""Which commit is measured again under new conditions, and on which cases; from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import inputs
from benchmarks.cases.key import NSA, Key
from benchmarks.history import anchors, conditions
from benchmarks.history.conditions import SOFT, hard
from benchmarks.history.store import Store
from harness import fingerprint
from harness.fingerprint import Fingerprint


@dataclass(frozen=True)
class AnchorPlan:
    """One commit that could be measured again."""

    commit: str
    nsa_sha256: str | None
    """What its nsa/ must be, as the earlier runs measured it; None where no earlier run is asked."""
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class AnchorRequest:
    """After a change of a hard condition."""

    differences: tuple[str, ...]
    """Of the hard conditions, from the run before: "driver 555 -> 560"."""
    plans: tuple[AnchorPlan, ...]
    """The best first; the next one serves where a commit cannot be had."""


def request(store: Store, now: Fingerprint, keys: Sequence[Key], preferred: Sequence[str]) -> AnchorRequest | None:
    """What the run that `now` begins should measure beside its own `keys`; None where nothing is to be bridged.

    The change is that before the first run under these hard conditions: an interrupted run leaves its anchors to the
    next. Nothing is measured twice, also not what failed. `preferred`: commits to take where the earlier runs measured
    them (the last release, say), before that of the machine's last run under the earlier conditions.
    """
    runs = [run for run in store.runs(now.machine) if run.utc < now.utc and _same_computer(run, now)]
    first = next((i for i, run in enumerate(runs) if _alike(run, now)), len(runs))
    if first == 0:
        return None
    before = runs[first - 1]
    earlier = [run for run in runs[:first] if _alike(run, before)]
    if any(run.nsa_sha256 == now.nsa_sha256 for run in earlier):
        return None  # the run itself measures the same sources as one of them did
    tried = {key.identity for key, run in store.anchors_tried(now.machine) if _alike(run, now)}
    of_nsa = [key for key in keys if key.implementation == NSA]
    plans = []
    for run in _candidates(earlier, preferred):
        known = {
            one.series[2:]
            for one in store.figures(now.machine, {run.nsa_sha256})
            if hard(one.conditions) == hard(before.conditions)
        }
        cases = anchors.cases([key for key in of_nsa if (key.identity, inputs.followed(key) or "") in known])
        chosen = tuple(key for key in cases if key.identity not in tried)
        if chosen:
            assert run.commit is not None
            plans.append(AnchorPlan(run.commit, run.nsa_sha256, chosen))
    told = fingerprint.differences(before, now)
    hard_ones = tuple(one for one in told if one.partition(" ")[0] not in SOFT)
    return AnchorRequest(hard_ones, tuple(plans)) if plans else None


def _same_computer(a: Fingerprint, b: Fingerprint) -> bool:
    """Records of another processor are no history of this one; a GPU's board may be exchanged."""
    return a.driver is not None or a.cpu == b.cpu


def _alike(a: Fingerprint, b: Fingerprint) -> bool:
    return conditions.may_be_same(a.conditions, b.conditions)


def _candidates(earlier: Sequence[Fingerprint], preferred: Sequence[str]) -> list[Fingerprint]:
    """A run of each commit whose sources can be had again: the preferred ones, then the last."""
    clean = [run for run in earlier if run.commit is not None and not run.dirty]
    found = [run for commit in preferred for run in clean if run.commit == commit] + clean[-1:]
    return list({run.nsa_sha256: run for run in found}.values())

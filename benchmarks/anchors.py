"""Measuring an earlier commit beside a run's own: today's benches over its nsa/, so that an upgrade can be bridged.

The commit's nsa/ is checked out into a folder of its own and measured by guarded children that find it first on their
path. It costs a few seconds a case, and the compilation of its kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import watched, worker
from benchmarks.ab import checkout
from benchmarks.cases.key import NSA, Key
from benchmarks.history import accepted, anchors
from benchmarks.history.anchor_plan import AnchorPlan, AnchorRequest, request
from benchmarks.history.records import Anchor, Record
from benchmarks.history.store import Store
from benchmarks.runner import Measurement
from benchmarks.timing.gpu_watch import GpuWatch
from benchmarks.timing.latency import SamplingPlan
from harness import repository
from harness.fingerprint import Fingerprint

AUTO, NONE = "auto", "none"


class TooOldError(ValueError):
    """A commit's nsa/ lacks what the benches of today import."""


def find(asked: str, results: Path, now: Fingerprint, keys: Sequence[Key]) -> AnchorRequest | None:
    """What to measure; `asked` is `AUTO`, `NONE` or a commit, whose cases then need no earlier figure."""
    if asked == NONE:
        return None
    if asked == AUTO:
        return request(Store(results, now.machine), now, keys, _preferred(results, now.machine))
    of_nsa = [key for key in keys if key.implementation == NSA]
    return AnchorRequest((), (AnchorPlan(checkout.resolve(asked), None, tuple(anchors.cases(of_nsa))),))


def _preferred(results: Path, machine: str) -> list[str]:
    """The last release, then the commit of the newest accepted level; not the ones that there are not."""
    tag = repository.git("describe", "--tags", "--abbrev=0")
    release = repository.git("rev-parse", f"{tag}^{{commit}}") if tag else None
    levels = [entry.commit for entry in accepted.read(results)[0] if entry.machine == machine and entry.commit]
    return [commit for commit in (release, *levels[-1:]) if commit]


def measure(
    plan: AnchorPlan,
    device: str,
    sampling: SamplingPlan,
    now: Fingerprint,
    command: Callable[[Key], str],
    seed: int,
    watch: GpuWatch | None = None,
) -> Iterator[Record]:
    """A record for each case. Raises ValueError where the commit, or the sources that were measured, cannot be had;
    TooOldError where the benches cannot be imported over them, before any case is measured."""
    with checkout.sources([plan.commit]) as (sources,):
        found = sources.side.nsa_sha256
        if plan.nsa_sha256 not in (None, found):
            raise ValueError(f"nsa/ of {plan.commit[:10]} is not what the earlier runs measured: {found} now")
        anchor = Anchor(plan.commit, found)
        path = (sources.folder, sources.benches)
        if (error := worker.import_error(path)) is not None:
            raise TooOldError(f"its nsa/ is too old for today's benches, which cannot be imported over it ({error})")

        def of_commit(keys: Sequence[Key]) -> Iterator[Measurement]:
            return worker.run(keys, device, sampling, now, command, seed=seed, path=path)

        for measured in watched.run(plan.keys, of_commit, watch):
            yield dataclasses.replace(measured.record, anchor=anchor)

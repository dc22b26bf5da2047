"""From incidents to findings: each repro in a child of its own, judged by what it sent and by how it ended."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from harness import schema
from harness.isolate import Child
from harness.watch import ChildEnd, Deadline, watch
from regression import listing
from regression.contract import Aspect, Evidence, Incident, Needs, ReproVerdict, aspects, gravest
from regression.injection import NeverEnteredError

FAULTY, PRODUCT = "faulty", "product"
_NEEDED_GPUS = {Needs.CPU: 0, Needs.GPU: 1, Needs.TWO_GPUS: 2}


@dataclass(frozen=True)
class Repro:
    """One child: one half of an incident on one device."""

    incident: Incident
    part: str
    """"faulty" or "product"."""
    device: str
    inject: str | None = None
    """Id of the incident whose fault is put into the product."""

    @property
    def expects(self) -> ReproVerdict:
        """What the verdict must be."""
        return self.incident.expects if self.part == FAULTY else ReproVerdict.PASSED


@dataclass(frozen=True)
class Pace:
    """How the child moved."""

    seconds: float
    """From its start to its end."""
    import_s: float | None
    first_step_s: float | None
    steps: int
    """Heartbeats."""
    longest_silence_s: float | None
    allowed_silence_s: float
    """As it was scaled last."""
    figures: Mapping[str, float | None]
    """Of the last heartbeat that had some."""


@dataclass(frozen=True)
class Finding:
    """One repro, judged."""

    repro: Repro
    evidence: Evidence
    pace: Pace

    @property
    def aspects(self) -> tuple[Aspect, ...]:
        return aspects(self.evidence)

    @property
    def verdict(self) -> ReproVerdict:
        return gravest(self.aspects).verdict

    @property
    def allowed_skip(self) -> bool:
        """Skipped because the machine lacks GPUs; any other skip is a failure."""
        never_started = self.evidence.exit_status is None
        return self.verdict is ReproVerdict.SKIPPED and never_started

    @property
    def never_entered(self) -> bool:
        """A fault was injected, and the run ended without a call of it: whatever it found is of a healthy product."""
        return self.evidence.uncaught and (self.evidence.exception or "").startswith(NeverEnteredError.__name__)

    @property
    def ok(self) -> bool:
        """As expected: the detector fired on the fault, the product is free of it."""
        return self.allowed_skip or (self.verdict is self.repro.expects and not self._difference)

    @property
    def _difference(self) -> str:
        """What tells a faulty variant's verdict from the one that its incident describes; "" if nothing does."""
        incident = self.repro.incident
        if self.repro.part != FAULTY:
            return ""
        if self.evidence.uncaught:
            return "from a detector that observed it, not from a repro that died"
        if incident.says not in gravest(self.aspects).why:
            return f"saying {incident.says!r}"
        red = {aspect.name for aspect in self.aspects if aspect.verdict is not ReproVerdict.PASSED}
        if silent := [name for name in incident.fires if name not in red]:
            return f"with {', '.join(silent)} red too"
        return ""

    @property
    def reason(self) -> str | None:
        """Why it is not as it should be, or why it was skipped; None for a green one."""
        decisive = gravest(self.aspects)
        if self.allowed_skip:
            return decisive.why
        if self.ok:
            return None
        if self.verdict is ReproVerdict.SKIPPED:
            return f"skipped although the machine has what it needs: {decisive.why}"
        if self.repro.part == FAULTY:
            got = f"{self.verdict.value} {decisive.why}".strip()
            wanted = f"{self.repro.expects.value} {self._difference}".strip()
            return f"the detector did not fire: expected {wanted}, got {got}"
        return f"{self.verdict.value}: {decisive.name}: {decisive.why}"


def plan(incidents: Sequence[Incident], device: str, inject: str | None = None) -> list[Repro]:
    """Both halves of each incident; with `inject` the product alone."""
    parts = (PRODUCT,) if inject else (FAULTY, PRODUCT)
    return [Repro(incident, part, device, inject) for incident in incidents for part in parts]


def run(repros: Sequence[Repro], *, gpus: int, jobs: int) -> Iterator[Finding]:
    """Findings as they come: `jobs` children at a time, then one by one those that must be alone.

    On any exit, also by an exception, no child is left.
    """
    together = [repro for repro in repros if not repro.incident.alone]
    alone = [[repro] for repro in repros if repro.incident.alone]
    stop, longest_import = Event(), _LongestImport()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for batch in (together, *alone):
                futures = [pool.submit(_judged, repro, gpus, stop, longest_import) for repro in batch]
                for future in as_completed(futures):
                    yield future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


@dataclass
class _LongestImport:
    """The longest import so far: the next child's allowance before it says anything."""

    seconds: float = 0.0


def _judged(repro: Repro, gpus: int, stop: Event, longest_import: _LongestImport) -> Finding:
    found = gpus if repro.device == "cuda" else 0
    if _NEEDED_GPUS[repro.incident.needs] > found:
        why = f"needs {repro.incident.needs.value}; this run has {found}"
        return Finding(repro, Evidence(skipped=why), Pace(0.0, None, None, 0, None, 0.0, {}))
    task: dict[str, Any] = {
        "module": listing.module_of(repro.incident.id),
        "function": repro.part,
        "device": repro.device,
        "inject": listing.module_of(repro.inject) if repro.inject else None,
        "options": {},
    }
    deadline = Deadline(repro.incident.floor_s, longest_import.seconds)
    result = run_child(task, deadline, stop)
    longest_import.seconds = max(longest_import.seconds, deadline.import_s or 0.0)
    return Finding(repro, result.evidence, result.pace(deadline))


@dataclass
class ChildResult:
    """What a child sent, and how it ended."""

    evidence_sent: Evidence | None = None
    steps: int = 0
    figures: Mapping[str, float | None] = field(default_factory=dict)
    end: ChildEnd = field(default_factory=ChildEnd)
    seconds: float = 0.0

    def on_event(self, event: Mapping[str, Any]) -> None:
        """One event of the child."""
        if event["event"] == "step":
            self.steps += 1
            self.figures = event["figures"] or self.figures
        elif event["event"] == "evidence":
            self.evidence_sent = schema.build(Evidence, event["evidence"], "evidence")

    @property
    def evidence(self) -> Evidence:
        """The child's own facts and how it ended."""
        end = self.end
        if end.unreadable is not None:
            return Evidence(exception=f"what it sent cannot be read: {end.unreadable}", uncaught=True)
        sent = self.evidence_sent or Evidence()
        if end.stalled_after_s is not None:
            return dataclasses.replace(sent, stalled_after_s=end.stalled_after_s, stacks=end.stacks)
        if self.evidence_sent is None:
            words = f"ended with status {end.status} without evidence; the end of its log: {end.log_tail}"
            return Evidence(exception=words, uncaught=True, exit_status=end.status)
        return dataclasses.replace(sent, exit_status=end.status)

    def pace(self, deadline: Deadline) -> Pace:
        """Its times, as they stood at the end."""
        return Pace(
            round(self.seconds, 3),
            deadline.import_s,
            deadline.first_step_s,
            self.steps,
            deadline.longest_s,
            deadline.allowed_s,
            self.figures,
        )


def run_child(task: Mapping[str, Any], deadline: Deadline, stop: Event) -> ChildResult:
    """The task in a child of its own, until it has ended or was ended. Raises CancelledError once `stop` is set."""
    result, begin = ChildResult(), time.monotonic()
    with Child("regression.child", task, _environment(task["device"]), own_tmpdir=True) as child:
        result.end = watch(child, deadline, stop, result.on_event)
    result.seconds = time.monotonic() - begin
    return result


def _environment(device: str) -> dict[str, str]:
    """What a child for this device finds beside the runner's own environment."""
    return {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}

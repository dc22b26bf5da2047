"""What the evidence says: pure functions, one verdict per aspect that was looked at and one for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from regression.evidence import Bound, Evidence


class Verdict(str, Enum):
    """How a repro, or one aspect of it, is judged."""

    PASSED = "PASSED"
    STALLED = "STALLED"
    """No sign of life before the deadline."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The allocator gave up, or memory grew beyond its bound."""
    CRASHED = "CRASHED"
    """An exception or an exit status that nobody asked for."""
    NONFINITE = "NONFINITE"
    """NaN or infinity where a number is due."""
    LEAK = "LEAK"
    """A row depends on a later token."""
    TOO_GOOD = "TOO_GOOD"
    """A loss below what the data's entropy allows."""
    WRONG = "WRONG"
    """Anything else that contradicts a promise."""
    SLOW = "SLOW"
    """More operators, host syncs or time than the bound."""
    SKIPPED = "SKIPPED"
    """Not run; the reason is given."""


@dataclass(frozen=True)
class Aspect:
    """One thing that was looked at. That a run did not hang says nothing about its numbers."""

    name: str
    verdict: Verdict
    why: str
    """What was found, with the figure; "" for PASSED without one."""


_FINDINGS = (("nonfinite", Verdict.NONFINITE), ("future_seen", Verdict.LEAK), ("wrong", Verdict.WRONG))
_BOUNDS = (
    ("error", Verdict.WRONG),
    ("ops", Verdict.SLOW),
    ("host_syncs", Verdict.SLOW),
    ("slowdown", Verdict.SLOW),
    ("silence_s", Verdict.STALLED),
    ("memory", Verdict.OUT_OF_MEMORY),
)
ASPECTS = ("end", *(name for name, _ in _FINDINGS), "loss_nats", *(name for name, _ in _BOUNDS))
"""Names of all aspects."""
_SEVERITY = tuple(Verdict)[1:]  # the enum's order: what ends a run, then what falsifies it, then what slows it


def aspects(evidence: Evidence) -> tuple[Aspect, ...]:
    """Every aspect that the evidence speaks of, each with its own verdict."""
    if evidence.skipped is not None:
        return (Aspect("skipped", Verdict.SKIPPED, evidence.skipped),)
    found = [*_end(evidence)]
    for name, verdict in _FINDINGS:
        findings: tuple[str, ...] | None = getattr(evidence, name)
        if findings is not None:
            found.append(Aspect(name, verdict if findings else Verdict.PASSED, _in_short(findings)))
    if evidence.loss_nats is not None:
        found.append(_loss(evidence.loss_nats))
    for name, verdict in _BOUNDS:
        bound: Bound | None = getattr(evidence, name)
        if bound is not None:
            found.append(Aspect(name, verdict if bound.exceeded else Verdict.PASSED, str(bound)))
    return tuple(found) or (Aspect("nothing", Verdict.WRONG, "no evidence: nothing was looked at"),)


def verdict(evidence: Evidence) -> Verdict:
    """The gravest verdict of all aspects; PASSED only if something was looked at and all of it passed."""
    return gravest(aspects(evidence)).verdict


def gravest(judged: tuple[Aspect, ...]) -> Aspect:
    """The aspect that decides: the first of the gravest kind."""
    for kind in _SEVERITY:
        for aspect in judged:
            if aspect.verdict is kind:
                return aspect
    return judged[0]


def _in_short(findings: tuple[str, ...]) -> str:
    return "".join(findings[:1]) + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else "")


def _end(evidence: Evidence) -> list[Aspect]:
    """How the process ended, where that was seen or is a fault."""
    if evidence.stalled_after_s is not None:
        return [Aspect("end", Verdict.STALLED, f"no heartbeat for {evidence.stalled_after_s:.1f} s")]
    if evidence.out_of_memory is not None:
        return [Aspect("end", Verdict.OUT_OF_MEMORY, evidence.out_of_memory)]
    if evidence.exception is not None:
        return [Aspect("end", Verdict.CRASHED, evidence.exception)]
    if evidence.exit_status:
        return [Aspect("end", Verdict.CRASHED, f"exit status {evidence.exit_status}")]
    return []


def _loss(loss: Bound) -> Aspect:
    """The one bound from below: value is the loss, limit the floor that the data's entropy sets."""
    if loss.value is None:
        return Aspect("loss_nats", Verdict.NONFINITE, "the loss is not finite")
    too_good = loss.value < loss.limit
    return Aspect(
        "loss_nats",
        Verdict.TOO_GOOD if too_good else Verdict.PASSED,
        f"{loss.value:.4g} against a floor of {loss.limit:.4g} nats",
    )

"""The soak: the profiles of the field reports, trained in every precision and prefilled both ways, lane by lane."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event

from harness.watch import Deadline
from regression.contract import Aspect, Evidence, ReproVerdict, aspects, gravest
from regression.runner import Pace, run_child

PROFILE_NAMES = ("3090", "a100")
PRECISIONS = ("fp16", "bf16", "fp32")
PREFILLS = ("sequential", "batched")
FLOOR_S = 30.0


@dataclass(frozen=True)
class Lane:
    """One combination."""

    profile: str
    precision: str
    """"fp16" has float32 weights, autocast and a gradient scaler."""
    prefill: str
    """"sequential": token by token through the cache; "batched": one call."""

    @property
    def name(self) -> str:
        return f"soak-{self.profile}-{self.precision}-{self.prefill}"


@dataclass(frozen=True)
class LaneResult:
    """One lane, judged."""

    lane: Lane
    evidence: Evidence
    pace: Pace

    @property
    def aspects(self) -> tuple[Aspect, ...]:
        return aspects(self.evidence)

    @property
    def verdict(self) -> ReproVerdict:
        return gravest(self.aspects).verdict

    @property
    def reason(self) -> str | None:
        decisive = gravest(self.aspects)
        return None if decisive.verdict is ReproVerdict.PASSED else f"{decisive.name}: {decisive.why}"


LANES = tuple(Lane(*combination) for combination in itertools.product(PROFILE_NAMES, PRECISIONS, PREFILLS))


def run(device: str, minutes: float, lanes: Sequence[Lane] = LANES) -> Iterator[LaneResult]:
    """The lanes one after another, each for its share of the time, in a child of its own."""
    for lane in lanes:
        options = {
            "profile": lane.profile,
            "precision": lane.precision,
            "prefill": lane.prefill,
            "seconds": 60 * minutes / len(lanes),
        }
        task = {
            "module": "regression.soak_lane",
            "function": "run",
            "device": device,
            "inject": None,
            "options": options,
        }
        deadline = Deadline(FLOOR_S)
        result = run_child(task, deadline, Event())
        yield LaneResult(lane, result.evidence, result.pace(deadline))


def table(results: Sequence[LaneResult]) -> str:
    """One line per lane: steps, stalls, what was not finite, the loss against its floor, memory."""
    lines = [
        f"{'lane':<30} {'verdict':<13} {'stalls':>6} {'not finite':>10} {'longest step, s':>15}"
        f" {'loss, floor (nats)':>20} {'MiB per round':>13}  steps"
    ]
    for one in results:
        evidence = one.evidence
        loss, memory = evidence.loss_nats, evidence.memory
        lines.append(
            f"{one.lane.name:<30} {one.verdict.value:<13} {int(evidence.stalled_after_s is not None):>6} "
            f"{_count(evidence.nonfinite):>10} {_figure(one.pace.longest_silence_s, 2):>15} "
            f"{f'{_figure(loss.value, 4)}, {loss.limit:.4f}' if loss else '':>20} "
            f"{_figure(memory.value, 3) if memory else '':>13}  {'; '.join(evidence.notes) or one.reason}"
        )
    return "\n".join(lines)


def _count(found: tuple[str, ...] | None) -> str:
    return "" if found is None else str(len(found))


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"

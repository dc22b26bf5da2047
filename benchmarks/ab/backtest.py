"""How often a change is called, an alert is right and its commit is found, over histories whose truth is known.

`replay` makes the histories from the pairs of processes that `calibrate` recorded. What came of them is kept in
results/calibration/<machine>.backtest.json; every share follows from the events.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ab.calibration import bounds
from benchmarks.ab.result import CompareVerdict
from harness import schema
from nsa.io import atomic_write

PRECISION_GOAL = 0.95
RECALL_GOAL = 0.9
RECALL_AT = 0.03
"""The size of a change, slower or faster, that is to be found."""
COMMIT_GOAL = 0.9
_SUFFIX = ".backtest.json"


@dataclass(frozen=True)
class BacktestEvent:
    """One history of eight commits, and what was said of its last one."""

    case: str
    half: int
    """Of the recorded pairs, 0 or 1: the rules were fitted on the other one."""
    change: float
    """What one commit did: 0.03 is 3 % more work, -0.03 the same work taken away, 0.0 is no such commit."""
    commit: int | None
    """Which commit did it, the first one after the good commit being 0."""
    verdict: CompareVerdict
    """The last commit beside the good one."""
    suspects: tuple[int, ...]
    """What the search for the commit of a slowdown left; empty where there was none."""
    pairs: int
    """Pairs of processes that all comparisons took."""

    def __post_init__(self) -> None:
        if (self.change == 0.0) != (self.commit is None):
            raise ValueError(f"commit must be None where nothing changed, and there alone; got {self.commit}")

    @property
    def called(self) -> bool:
        return self.verdict in (CompareVerdict.SLOWER, CompareVerdict.FASTER)

    @property
    def right(self) -> bool:
        """Whether the change was called, in its direction."""
        wanted = CompareVerdict.SLOWER if self.change > 0 else CompareVerdict.FASTER
        return self.change != 0.0 and self.verdict is wanted


@dataclass(frozen=True)
class Share:
    """A share of events, with what it is to be."""

    name: str
    hits: int
    trials: int
    goal: float | None
    """At least; None where none is set."""

    @property
    def share(self) -> float | None:
        """None where there was nothing to count."""
        return self.hits / self.trials if self.trials else None

    @property
    def least(self) -> float:
        """What the share is at least, with 95 % confidence, one-sided, if the events are independent."""
        return bounds(self.hits, self.trials)[0]

    @property
    def met(self) -> bool:
        """Whether the share reaches its goal; not where there was nothing to count."""
        return self.goal is None or (self.share is not None and self.share >= self.goal)


@dataclass(frozen=True)
class Backtest:
    """Every event of one machine."""

    machine: str
    identity: str
    """Of the pairs (`calibration_samples.identity`)."""
    recorded: int
    """Pairs of processes; the later ones may be of some cases alone."""
    cases: int
    seed: int
    utc: str
    """When it was made."""
    commit: str | None
    """Of the rules that were tried."""
    dirty: bool | None
    command: str
    events: tuple[BacktestEvent, ...]
    case_pairs: int | None = None
    """Pairs of one case, over all cases; None in earlier backtests, of which each pair is of every case."""

    @property
    def uses(self) -> float:
        """How often a recorded pair of a case was used, on average; above 1 the bounds are too narrow."""
        case_pairs = self.recorded * self.cases if self.case_pairs is None else self.case_pairs
        return sum(event.pairs for event in self.events) / case_pairs

    @property
    def shares(self) -> tuple[Share, ...]:
        """What is judged, and beside it what is not."""
        return shares(self.events)


def shares(events: Sequence[BacktestEvent]) -> tuple[Share, ...]:
    """Precision, recall at each size and direction, the right commit, and what was left alone."""
    called = [event for event in events if event.called]
    changed = [event for event in events if event.change]
    same = [event for event in events if not event.change]
    slower = [event for event in changed if event.right and event.change > 0]
    judged = [event for event in changed if abs(event.change) == RECALL_AT]
    found = [
        Share("calls that are right", sum(event.right for event in called), len(called), PRECISION_GOAL),
        Share(f"changes of {RECALL_AT:.0%} found", sum(event.right for event in judged), len(judged), RECALL_GOAL),
        Share(
            "slowdowns traced to their commit",
            sum(event.suspects == (event.commit,) for event in slower),
            len(slower),
            COMMIT_GOAL,
        ),
        Share("unchanged code left alone", sum(not event.called for event in same), len(same), None),
    ]
    for change in sorted({event.change for event in changed}):
        of_size = [event for event in changed if event.change == change]
        name = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}, found"
        found.append(Share(name, sum(event.right for event in of_size), len(of_size), None))
    return tuple(found)


def path(results: Path, machine: str) -> Path:
    """The machine's file."""
    return results / "calibration" / f"{machine}{_SUFFIX}"


def is_backtest(file: Path) -> bool:
    """Whether a file beside the calibrations is one of these, by its name."""
    return file.name.endswith(_SUFFIX)


def machines(results: Path) -> list[str]:
    """Those that have a file."""
    files = sorted((results / "calibration").glob(f"*{_SUFFIX}"))
    return [file.name.removesuffix(_SUFFIX) for file in files]


def save(results: Path, backtest: Backtest) -> Path:
    """Replace the machine's backtest in one step, on the disk when this returns."""
    file = path(results, backtest.machine)
    atomic_write(file, json.dumps(dataclasses.asdict(backtest), allow_nan=False, indent=1) + "\n")
    return file


def load(results: Path, machine: str) -> Backtest | None:
    """The machine's backtest; None where there is none. ValueError naming the file where it is damaged."""
    file = path(results, machine)
    if not file.exists():
        return None
    try:
        return schema.build(Backtest, json.loads(file.read_text()), "backtest")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is no backtest: {error}; run backtest again or remove it") from error

"""Which processes make a pair: stand-ins that say what launch interval they drew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.ab import starter
from benchmarks.ab.checkout import Sources
from benchmarks.ab.child import WorkerError
from benchmarks.ab.result import Side
from benchmarks.ab.starter import PairStarter, SideError
from benchmarks.cases.outcome import CaseOutcome

BASE, HEAD = (Sources(Side(name, None, None, "0"), Path(name), Path("benches")) for name in ("base", "head"))
SLOW, FAST = 1750.0, 1600.0


class Child:
    """A process that notes when it is started, and drew the next launch interval."""

    started: list[Child]
    asked: list[Child]
    waited: list[Child]
    draws: Iterator[float]

    def __init__(self, sources: Sources) -> None:
        self.side, self.interval_ns, self.begun, self.closed = sources.folder.name, next(Child.draws), False, False
        Child.started.append(self)

    def begin(self, core: int | None) -> None:
        if self.side == "broken":
            raise WorkerError(CaseOutcome.CRASHED, "SyntaxError")
        self.begun, self.core = True, core

    def ask_for_context(self) -> None:
        assert self.begun
        if self not in Child.asked:
            Child.asked.append(self)

    def wait_for_context(self) -> None:
        Child.waited.append(self)

    def launch_interval_ns(self) -> float:
        """Nobody makes a context meanwhile."""
        assert self in Child.asked
        assert set(Child.asked) <= set(Child.waited)
        return self.interval_ns

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "WorkerProcess", Child)
    Child.started, Child.draws = [], itertools.repeat(SLOW)
    Child.asked, Child.waited = [], []


def test_on_a_gpu_two_that_launch_alike_are_taken() -> None:
    """Of three and three: base slow, slow, fast; head fast, 1 % more, slow by 5 %."""
    Child.draws = itertools.chain([SLOW, SLOW, FAST, FAST * 1.04, FAST * 1.01, SLOW * 1.05], itertools.repeat(SLOW))
    with PairStarter(BASE, HEAD, "cuda") as pairs:
        base, head = pairs.start()
        assert (base.launch_interval_ns(), head.launch_interval_ns()) == (FAST, FAST * 1.01)
        assert [child.side for child in (base, head)] == ["base", "head"]
        ready = [child for child in Child.started if child not in (base, head)]
        assert [child.side for child in ready] == ["base"] * 2 + ["head"] * 2 + ["base"] * 3 + ["head"] * 3
        assert [child.begun for child in ready] == [True] * 4 + [False] * 6, "the new ones import meanwhile"
        second = pairs.start()
        assert [child.begun for child in ready] == [True] * 5 + [False] * 2 + [True] + [False] * 2, "the oldest of each"
        assert len(Child.started) - len(ready) - 2 == 2, "one for each that was taken"
        assert [child.begun for child in second] == [True, True]
    assert all(child.closed for child in ready if child not in second)
    assert not base.closed


def test_where_none_fits_another_is_drawn() -> None:
    Child.draws = itertools.chain([SLOW] * 3, [FAST] * 3, [SLOW, FAST], itertools.repeat(SLOW))
    with PairStarter(BASE, HEAD, "cuda") as pairs:
        base, head = pairs.start()
        assert base.launch_interval_ns() == head.launch_interval_ns() == FAST
        assert sum(child.closed for child in Child.started) == 2


def test_after_some_draws_the_nearest_are_taken_all_the_same() -> None:
    Child.draws = (FAST if n in (3, 4, 5) else SLOW for n in itertools.count())
    with PairStarter(BASE, HEAD, "cuda") as pairs:
        base, head = pairs.start()
        assert (base.launch_interval_ns(), head.launch_interval_ns()) == (SLOW, FAST)
        assert sum(child.closed for child in Child.started) == starter._MOST_DRAWS


def test_on_a_cpu_a_pair_is_started_when_it_is_asked_for() -> None:
    """What imports beside a measurement disturbs it there."""
    with PairStarter(BASE, HEAD, "cpu") as pairs:
        assert Child.started == []
        pairs.start()
        assert [(child.side, child.begun) for child in Child.started] == [("base", False), ("head", False)]


def test_a_side_that_cannot_begin_is_named_and_nothing_is_left() -> None:
    broken = Sources(BASE.side, Path("broken"), Path("benches"))
    with PairStarter(BASE, broken, "cuda") as pairs, pytest.raises(SideError, match="HEAD CRASHED: SyntaxError"):
        pairs.start()
    assert all(child.closed for child in Child.started)

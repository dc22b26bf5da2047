"""Pairs of workers: one that is lost, which is sampled next, when samples are enough, and pairs side by side."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.ab import moderated, stages, trial, worker
from benchmarks.ab.checkout import Sources
from benchmarks.ab.child import WorkerError, WorkerProcess
from benchmarks.ab.result import Rules, Side
from benchmarks.ab.sequential import PairFailure
from benchmarks.ab.stages import StageClock
from benchmarks.ab.starter import PairStarter
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.timing.latency import SamplingPlan
from harness import isolate, repository
from tests.benchmarks.synthetic import key


def sources(folder: Path, worker_source: str) -> Sources:
    """An empty side, and benches that have this worker."""
    benches = folder / "benches"
    shutil.copytree(repository.ROOT / "harness", benches / "harness")
    (benches / "benchmarks" / "ab").mkdir(parents=True)
    (benches / "benchmarks" / "__init__.py").touch()
    (benches / "benchmarks" / "ab" / "__init__.py").touch()
    (benches / "benchmarks" / "ab" / "worker.py").write_text(worker_source)
    (folder / "side0").mkdir()
    return Sources(Side("x", None, None, "0"), folder / "side0", benches)


def child(folder: Path, worker_source: str) -> WorkerProcess:
    return WorkerProcess(sources(folder, worker_source))


@pytest.mark.parametrize(
    ("worker_source", "outcome", "reason"),
    [
        ("import time; time.sleep(60)", CaseOutcome.STALLED, "no answer within 1 s"),
        ("raise RuntimeError('boom')", CaseOutcome.CRASHED, "the child ended with code 1: RuntimeError: boom"),
        ("import os; os.abort()", CaseOutcome.CRASHED, "the child ended with code -6: no word"),
    ],
    ids=["stalls", "raises", "aborts"],
)
def test_a_lost_child_has_an_outcome(tmp_path: Path, worker_source: str, outcome: CaseOutcome, reason: str) -> None:
    lost = child(tmp_path, worker_source)
    try:
        with pytest.raises(WorkerError, match=reason) as caught:
            lost.answer(1.0 if outcome is CaseOutcome.STALLED else 30.0)
        assert caught.value.outcome is outcome
    finally:
        lost.close()


def test_a_child_that_measures_another_nsa_is_refused(tmp_path: Path) -> None:
    lost = child(tmp_path, 'input(); print(\'{"nsa": "/elsewhere/nsa/__init__.py"}\', flush=True); input()')
    try:
        with pytest.raises(WorkerError, match=r"the child imported /elsewhere/nsa/__init__\.py, which is not of"):
            lost.begin(None)
    finally:
        lost.close()


def test_a_child_may_be_closed_twice(tmp_path: Path) -> None:
    """By whoever stops the trial, and by the context in which it stood ready."""
    one = child(tmp_path, "input()")
    one.close()
    one.close()


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    """Killed without a word, the parent leaves no process behind, however busy, and no file."""
    sources(tmp_path, "import os, sys, time\nprint(os.getpid(), os.getppid(), flush=True)\ntime.sleep(600)\n")
    program = (
        "import os, pathlib, sys; from benchmarks.ab import checkout, child; folder = pathlib.Path(sys.argv[1]);"
        " child = child.WorkerProcess(checkout.Sources(None, folder / 'side0', folder / 'benches'));"
        " print(child._child.stdout.readline().decode().strip(), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(repository.ROOT), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == -9, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    for _ in range(100):
        if not any(map(_alive, pids)) and not list(tmp_path.glob(f"{isolate.SCRATCH_PREFIX}*")):
            return
        time.sleep(0.05)
    pytest.fail(f"of {pids} some still run, or a folder is left: {list(tmp_path.iterdir())}")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_lanes_share_the_cases_keep_their_order_and_survive_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real children of benches that answers at once: the third case kills its child."""
    worker_source = """
import json, os, pathlib, sys
for line in sys.stdin:
    request = json.loads(line)
    if "threads" in request:
        answer = {"nsa": os.getcwd() + "/nsa/__init__.py"}
    elif "prepare" in request:
        length = request["prepare"]["num_keys"]
        if length == 3 and os.getcwd().endswith("side1"):
            os.abort()
        answer = {"outcome": "PASSED", "reason": None, "stages_s": {"inputs": 0.25}}
    elif "sample" in request:
        answer = {"sample_ms": [float(length + 100 * os.getcwd().endswith("side1"))]}
    elif "slowdowns" in request:
        answer = {"latency_ms": 1.0}
    else:
        answer = {"outcome": "PASSED", "reason": None}
    print(json.dumps(answer), flush=True)
"""
    base = sources(tmp_path, worker_source)
    (tmp_path / "side1").mkdir()
    head = dataclasses.replace(base, folder=tmp_path / "side1")
    monkeypatch.setattr(trial, "_cores", lambda: [None, None])
    keys = [key(length=length) for length in (1, 2, 3, 4, 5)]
    clock = StageClock()
    played = trial.run(PairStarter(base, head, "cpu"), keys, Rules(), 0, clock=clock)
    base_ms = [found.base_ms[0] if isinstance(found, trial.PairedSamples) else None for found in played]
    assert base_ms == [1.0, 2.0, None, 4.0, 5.0]
    assert [found.head_ms[0][0] for found in played if isinstance(found, trial.PairedSamples)] == [
        101.0,
        102.0,
        104.0,
        105.0,
    ]
    lost = played[2]
    assert isinstance(lost, PairFailure)
    assert (lost.base, lost.head) == (CaseOutcome.PASSED, CaseOutcome.CRASHED)
    assert lost.reason == "HEAD CRASHED: the child ended with code -6: no word"
    seconds = clock.seconds()
    assert set(seconds) == {stages.START, stages.INPUTS, stages.WARM_UP, stages.SAMPLES, stages.FINISH, stages.END}
    assert seconds[stages.INPUTS] == 4 * 0.25, "of two sides that work together the longer one, of a lost case nothing"
    assert seconds[stages.START] > 0


@pytest.mark.parametrize("as_a_lane_starts", [False, True])
def test_an_interrupt_ends_the_children_of_every_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_a_lane_starts: bool
) -> None:
    """The parent alone gets the signal, as from a cancelled job; its children would go on for ten minutes.

    Each ends by the parent's kill, and not as one that stalled: `answer` would wait two minutes for that.
    """
    side = sources(tmp_path, "import time; time.sleep(600)")
    monkeypatch.setattr(trial, "_cores", lambda: [None, None])
    started: list[WorkerProcess] = []
    lost: list[CaseOutcome] = []
    all_there, noticed = threading.Event(), threading.Event()
    make, answer, start = WorkerProcess.__init__, WorkerProcess.answer, threading.Thread.start

    def note(child: WorkerProcess, sources: Sources) -> None:
        make(child, sources)
        started.append(child)
        if len(started) == 4:
            all_there.set()
            if not as_a_lane_starts:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def hear(child: WorkerProcess, deadline_s: float) -> dict[str, object]:
        try:
            return answer(child, deadline_s)
        except WorkerError as error:
            lost.append(error.outcome)
            raise
        finally:
            if threading.current_thread().name == "unjoined":
                noticed.wait()  # what this thread does comes too late

    def interrupted(thread: threading.Thread) -> None:
        last = len(threads) == 1
        if last and as_a_lane_starts:
            thread.name = "unjoined"
        threads.append(thread)
        start(thread)
        if last and as_a_lane_starts:
            all_there.wait()
            raise KeyboardInterrupt  # the pool does not know this thread, and will not wait for it

    threads: list[threading.Thread] = []
    monkeypatch.setattr(WorkerProcess, "__init__", note)
    monkeypatch.setattr(WorkerProcess, "answer", hear)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial.run(PairStarter(side, side, "cpu"), [key(length=1), key(length=2)], Rules(), 0)
    codes = [child._child.wait() for child in started]
    noticed.set()
    for thread in threads:
        thread.join()
    assert codes == [-9] * 4
    assert CaseOutcome.STALLED not in lost


def test_lanes_are_different_cores() -> None:
    cores = trial._cores()
    assert 1 <= len(cores) <= 2
    assert len(set(cores)) == len(cores)


class Fake:
    """A child that answers from a script and notes what it was asked."""

    def __init__(self, log: list[str], name: str, latency_ms: float, fails: Mapping[str, str] | None = None) -> None:
        self._log, self._name, self._latency_ms, self._fails = log, name, latency_ms, fails or {}
        self._asked, self.fits = "", False
        self.other_inputs: object = None

    def ask(self, request: Mapping[str, object]) -> None:
        self._asked = next(iter(request))
        self.other_inputs = request.get("other_inputs")
        calls = f":{request['sample']}" if self._asked == "sample" else ""
        self._log.append(f"{self._name}:{self._asked}{calls}")

    def answer(self, deadline_s: float) -> dict[str, object]:
        if self._asked in ("prepare", "finish"):
            outcome = self._fails.get(self._asked, "PASSED")
            return {"outcome": outcome, "reason": None if outcome == "PASSED" else "why", "stages_s": {}}
        return {"sample_ms": [self._latency_ms], "latency_ms": self._latency_ms, "fits": self.fits}


def pair_of(log: list[str], device: str = "cpu", **fails: Mapping[str, str]) -> trial.WorkerPair:
    children = [Fake(log, name, latency_ms, fails.get(name)) for name, latency_ms in (("base", 10.0), ("head", 12.0))]
    return trial.WorkerPair(children[0], children[1], device, StageClock())  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "order"), [(0, "ABBAABBA"), (1, "BAABBAAB")])
def test_the_two_are_interleaved_and_neither_is_always_first(first: int, order: str) -> None:
    log: list[str] = []
    found = pair_of(log).run(key(), dataclasses.replace(Rules(), min_samples=4), first)
    samples = [entry for entry in log if ":sample:" in entry]
    assert "".join("A" if entry.startswith("base:") else "B" for entry in samples) == order
    assert {entry.split(":")[2] for entry in samples} == {"6"}  # of the faster side's 10 ms: five beside the first
    assert isinstance(found, trial.PairedSamples)
    assert found.timed().change == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("latency_ms", "device", "calls"),
    [
        (0.1, "cpu", 21),
        (10.0, "cpu", 6),
        (19.9, "cpu", 4),
        (20.0, "cpu", 1),
        (0.1, "cuda", 9),
        (5.0, "cuda", 4),
        (29.9, "cuda", 2),
        (30.0, "cuda", 1),
    ],
)
def test_a_long_call_is_a_sample(latency_ms: float, device: str, calls: int) -> None:
    assert trial.calls_per_sample(latency_ms, device) == calls


@pytest.mark.parametrize(
    ("device", "check", "fits", "order"),
    [
        ("cpu", True, False, ["base:prepare", "head:prepare"]),
        ("cuda", True, False, ["base:fits_twice", "base answers", "base:prepare", "base answers", "head:prepare"]),
        ("cuda", True, True, ["base:fits_twice", "base answers", "base:prepare", "head:prepare"]),
        ("cuda", False, False, ["base:prepare", "head:prepare"]),
    ],
)
def test_on_a_gpu_both_sides_ask_the_oracle_at_a_time_only_where_it_has_the_memory(
    device: str, check: bool, fits: bool, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are asked in the end takes time, so there one has the GPU alone."""
    log: list[str] = []
    answer = Fake.answer

    def note(child: Fake, deadline_s: float) -> dict[str, object]:
        log.append(f"{child._name} answers")
        child.fits = fits
        return answer(child, deadline_s)

    monkeypatch.setattr(Fake, "answer", note)
    pair_of(log, device).run(key(), Rules(), 0, check=check)
    assert log[: len(order)] == order
    if check:
        between = log[log.index("base:finish") + 1 : log.index("head:finish")]
        assert between == (["base answers"] if device == "cuda" else [])


@pytest.mark.parametrize(("device", "of_base"), [("cpu", True), ("cuda", False)])
def test_on_a_gpu_head_alone_meets_the_oracle_on_other_inputs(device: str, of_base: bool) -> None:
    pair = pair_of([], device)
    pair.run(key(), Rules(), 0)
    assert [child.other_inputs for child in pair._children] == [of_base, True]  # type: ignore[attr-defined]


def test_both_sides_make_the_calls_of_the_faster_one() -> None:
    log: list[str] = []
    children = [Fake(log, name, latency_ms) for name, latency_ms in (("base", 30.0), ("head", 15.0))]
    trial.WorkerPair(children[0], children[1], "cpu", StageClock()).run(key(), Rules(), 0)  # type: ignore[arg-type]
    assert {entry.split(":", 1)[1] for entry in log if ":sample:" in entry} == {"sample:5"}  # one call for 30 ms alone


@pytest.mark.parametrize(("calls", "counted_ms"), [(1, 9.0), (2, 2.0), (4, 3.0)])
def test_the_first_of_several_calls_does_not_count(calls: int, counted_ms: float) -> None:
    case = object.__new__(worker._Case)
    taken_ms = [9.0, 2.0, 3.0, 4.0]

    def timed(plan: SamplingPlan, *_: object) -> SimpleNamespace:
        return SimpleNamespace(samples_ms=taken_ms[: plan.min_samples])

    rotating = SimpleNamespace(time=timed)
    vars(case).update(_rotating=rotating, _staged=None)
    assert case.sample(calls) == [counted_ms]


@pytest.mark.parametrize(("steps", "calls", "counted"), [(1, 1, [4]), (1, 4, [2, 3, 4]), (2, 2, [3, 4])])
def test_slowdowns_are_read_of_the_samples_alone(steps: int, calls: int, counted: list[int]) -> None:
    """Neither of the calls before them, nor of the first sample, nor of those that look for unjoined work."""
    case = object.__new__(worker._Case)
    later = 2
    taken_ms = [(100.0 + i, 200.0 + i) for i in range(5)] + later * steps * [(900.0, 900.0)]
    timed = SimpleNamespace(samples_ms=calls * [1.0], later_calls=later)
    rotating = SimpleNamespace(time=lambda *_: timed, steps=steps)
    vars(case).update(_rotating=rotating, _staged=SimpleNamespace(take_samples_ms=lambda: taken_ms))
    middle = statistics.median(counted)
    assert case.sample(calls) == [100.0 + middle, 200.0 + middle]


@pytest.mark.parametrize(("allocated", "collections"), [((0, 0, 0), 0), ((64, 64, 64), 1), ((64, 200, 64), 2)])
def test_a_worker_collects_garbage_where_some_of_it_holds_memory_of_the_gpu(
    allocated: tuple[int, ...], collections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of three cases; a library's workspace stays, whoever collects."""
    collected: list[int] = []
    held = 0

    def collect() -> None:
        nonlocal held
        collected.append(held)
        held = min(held, 64)

    monkeypatch.setattr(worker.gc, "collect", collect)
    monkeypatch.setattr(worker.torch.cuda, "memory_allocated", lambda: held)
    emptied: list[int] = []
    monkeypatch.setattr(worker.torch.cuda, "empty_cache", lambda: emptied.append(held))
    one = worker.Worker()
    for allocated_bytes in allocated:
        held = allocated_bytes
        one._free("cuda")
    assert len(collected) == collections
    assert len(emptied) == 3
    assert max(emptied) <= 64, "nothing of a case is left before the next one"


def test_a_worker_keeps_nothing_of_the_gpu_that_its_oracle_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 65,536 tokens of 192/128 one side kept 39 of 79 GiB, and the other one's oracle had no room."""
    log: list[str] = []
    monkeypatch.setattr(worker, "_Case", lambda *_: log.append("oracle"))
    monkeypatch.setattr(worker.torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(worker.torch.cuda, "empty_cache", lambda: log.append("emptied"))
    worker.Worker()._prepare(StageClock(), dataclasses.asdict(key()), "cuda", check=True)
    assert log == ["emptied", "oracle", "emptied"]


@pytest.mark.parametrize("step", ["prepare", "finish"])
def test_a_case_that_fails_before_or_after_the_samples_has_no_time(step: str) -> None:
    found = pair_of([], head={step: "NONFINITE"}).run(key(), Rules(), 0)
    assert found == PairFailure(CaseOutcome.PASSED, CaseOutcome.NONFINITE, "HEAD NONFINITE: why")


def test_an_outlier_in_four_samples_does_not_count() -> None:
    calm = trial.PairedSamples((10.0,) * 8, ((11.0,),) * 8)
    disturbed = dataclasses.replace(calm, base_ms=(10.0, 30.0, 10.0, 10.0, 10.0, 99.0, 10.0, 10.0))
    lucky = dataclasses.replace(calm, head_ms=((5.0,), *calm.head_ms[1:]))
    assert calm.timed() == disturbed.timed() == lucky.timed()


def test_samples_go_on_until_the_ratio_is_known_well_enough() -> None:
    rules = Rules(min_samples=4, max_samples=8)
    calm, noisy = [10.0, 10.1], [10.0, 14.0]
    for base_ms, wanted in ((calm, 4), (noisy, 8)):
        ended = next(n for n in range(20) if trial.PairedSamples(tuple(base_ms * 5)[:n], ((10.0,),) * n).enough(rules))
        assert ended == wanted
    assert trial.PairedSamples((10.0,) * 4, ((10.0,),) * 4).enough(rules)
    assert not trial.PairedSamples((10.0,) * 5, ((10.0,),) * 5).enough(
        rules
    )  # each side has begun as often as the other


def test_the_standard_error_is_that_of_repeated_pairs() -> None:
    r = random.Random(0)
    pairs = [[r.gauss(0.0, 0.03) for _ in range(16)] for _ in range(400)]
    spread = statistics.pstdev(map(moderated.pseudomedian, pairs))
    assert statistics.median(map(trial.standard_error, pairs)) == pytest.approx(spread, rel=0.15)

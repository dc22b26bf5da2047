"""Measuring the cases of a comparison, group by group and pair by pair, until `sequential` has decided each of them.

Every group has its first analysis before any group goes on to the next one. So a comparison that is interrupted keeps
the verdicts that it has, and one whose time is over has spent it on as many cases as possible.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.ab import checkout, sequential, trial
from benchmarks.ab.calibration import Calibration
from benchmarks.ab.checkout import Sources
from benchmarks.ab.child import THREADS
from benchmarks.ab.result import CompareVerdict, ComparisonResult, Rules
from benchmarks.ab.sequential import CaseResult, PairFailure, PairTiming
from benchmarks.ab.stages import StageClock
from benchmarks.ab.starter import PairStarter
from benchmarks.cases.key import Key
from benchmarks.timing import gpu_watch
from benchmarks.timing.gpu_watch import GpuWatch
from harness import fingerprint
from harness.machines import Machine

CASES_OF_A_GROUP = 32
"""At most, as many as `calibrate` measures at a time. They tell together whether the machine is noisier than it was
(`moderated.inflation`)."""
SAME_CODE = "not measured: both versions launch the same instructions on the device"
"""Why a case is SAME without a pair."""
_WORTH_SAYING_S = 1.0
"""A stage of a pair that takes less is not named."""


@dataclasses.dataclass(frozen=True)
class CaseRules:
    """What each case is judged by."""

    schedule: Rules
    """The interim analyses and the sampling of every case, and the thresholds where there is no calibration."""
    calibrated: Calibration | None

    def __call__(self, case: str, base_ms: float) -> Rules:
        rules = self.calibrated.rules(case, base_ms) if self.calibrated else None
        if rules is None:
            return self.schedule
        return dataclasses.replace(rules, interim_analyses=self.schedule.interim_analyses)


class _BudgetOverError(Exception):
    """The time that was given is over."""


def measure(
    machine: Machine,
    keys: Sequence[Key],
    base: Sources,
    head: Sources,
    rules: CaseRules,
    budget_s: float | None = None,
    same_code: Sequence[Key] = (),
) -> tuple[list[ComparisonResult], bool]:
    """One result per key, with a line of progress per pair of processes; and whether it was interrupted.

    After `budget_s` no further pair begins; what is open then is UNDECIDED. `same_code` are further cases, which are
    SAME because both versions run the same on the device (`device_code`).
    """
    watch = gpu_watch.begin(machine)
    identity = fingerprint.take(machine.id, machine.device)
    if machine.device == "cpu":
        identity = dataclasses.replace(identity, threads=THREADS)
    tested, interrupted = [sequential.CaseResult(key.name) for key in keys], False
    with PairStarter(base, head, machine.device) as starter:
        measure_pair = _PairMeasurement(starter, {key.name: key for key in keys}, rules.schedule, budget_s, watch)
        try:
            for analysis in rules.schedule.interim_analyses:
                for group in _groups(tested):
                    sequential.extend(group, measure_pair, rules, (analysis,))
        except (KeyboardInterrupt, _BudgetOverError) as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            why = "interrupted" if interrupted else "the budget was over"
            for case_result in tested:
                undecided = case_result.verdict is CompareVerdict.UNDECIDED and case_result.stopped is None
                if undecided and len(case_result.pairs) < rules.schedule.interim_analyses[-1]:
                    case_result.reason = f"{why} after {len(case_result.pairs)} pairs of processes"
    for case_result in tested:
        said = [case_result.reason, *measure_pair.disturbed.get(case_result.case, [])]
        case_result.reason = "; ".join(one for one in said if one) or None
    paired = zip(tested, keys, strict=True)
    found = [_result(case_result, key, identity, base, head, rules) for case_result, key in paired]
    return [*found, *(_unmeasured(key, identity, base, head, rules) for key in same_code)], interrupted


def _groups(cases: Sequence[CaseResult]) -> list[Sequence[CaseResult]]:
    """Of nearly equal size, each with cases from the whole list: of every mode, since cases are listed by mode."""
    count = -(-len(cases) // CASES_OF_A_GROUP)
    return [cases[number::count] for number in range(count)]


class _PairMeasurement:
    """Measures pairs of processes for `sequential.extend` and prints the progress."""

    def __init__(
        self,
        starter: PairStarter,
        keys: Mapping[str, Key],
        rules: Rules,
        budget_s: float | None = None,
        watch: GpuWatch | None = None,
    ) -> None:
        self._starter, self._keys, self._rules, self._budget_s, self._watch = starter, keys, rules, budget_s, watch
        self.disturbed: dict[str, list[str]] = {}
        """Of each case, what could not be waited for before its pairs."""
        self._seconds = 0.0
        self._pairs = Counter[str]()
        """Of each case; those that are measured together have as many."""

    def __call__(self, cases: Sequence[str]) -> Mapping[str, PairTiming | PairFailure]:
        if self._budget_s is not None and self._seconds > self._budget_s:
            raise _BudgetOverError
        self._make_ready(cases)
        begin, clock = time.perf_counter(), StageClock()
        keys, before = [self._keys[case] for case in cases], self._pairs[cases[0]]
        found = trial.run(self._starter, keys, self._rules, before % 2, check=before == 0, clock=clock)
        self._pairs.update(cases)
        seconds = time.perf_counter() - begin
        self._seconds += seconds
        print(self._progress(cases, seconds, clock), flush=True)
        timed = (result if isinstance(result, PairFailure) else result.timed() for result in found)
        return dict(zip(cases, timed, strict=True))

    def _make_ready(self, cases: Sequence[str]) -> None:
        noticed = self._watch.ready() if self._watch else {}
        for text in noticed.values():
            print(f"GPU: {text}", flush=True)
        for text in (noticed[name] for name in gpu_watch.UNTRUSTED if name in noticed):
            for case in cases:
                self._note(case, f"before pair {self._pairs[case] + 1} {text}")

    def _note(self, case: str, text: str) -> None:
        self.disturbed.setdefault(case, []).append(text)

    def _progress(self, cases: Sequence[str], seconds: float, clock: StageClock) -> str:
        """[10 cases, pair 1 of at most 12; 20 of 32 cases begun] 62 s (first_call 30, finish 20), 62 s in all ...

        In brackets stand seconds by stage, on a CPU summed over its cores.
        """
        pairs, analyses = self._pairs[cases[0]], self._rules.interim_analyses
        spent = ", ".join(f"{name} {taken:.0f}" for name, taken in clock.seconds().items() if taken >= _WORTH_SAYING_S)
        of_stages = f" ({spent})" if spent else ""
        many = f"{len(cases)} case{'s' if len(cases) > 1 else ''}"
        begun = f"{len(self._pairs)} of {len(self._keys)} cases begun"
        said = f"[{many}, pair {pairs} of at most {analyses[-1]}; {begun}] {seconds:.0f} s{of_stages}"
        next_analysis = next((found for found in analyses if found >= pairs), pairs)
        left_s = (next_analysis - pairs) * seconds
        left = f", about {left_s:.0f} s to the analysis after pair {next_analysis}" if next_analysis > pairs else ""
        return f"{said}, {self._seconds:.0f} s in all{left}"


def _result(
    case_result: sequential.CaseResult,
    key: Key,
    identity: fingerprint.Fingerprint,
    base: Sources,
    head: Sources,
    rules: CaseRules,
) -> ComparisonResult:
    measured = rules(case_result.case, case_result.base_ms) if case_result.pairs else rules.schedule
    judged_by = case_result.rules or measured
    effect = case_result.effect(judged_by)
    return ComparisonResult(
        identity.utc,
        base.side,
        head.side,
        identity,
        key,
        judged_by,
        case_result.verdict,
        case_result.reason,
        _command(base, head, identity.machine, key, judged_by),
        change=effect.change if effect else None,
        interval=effect.interval if effect else None,
        detectable=effect.detectable if effect else None,
        p_value=effect.p_value if effect else None,
        base_ms=effect.base_ms if effect else None,
        head_ms=effect.head_ms if effect else None,
        changes=tuple(pair.change for pair in case_result.pairs),
        base_outcome=case_result.stopped.base if case_result.stopped else None,
        head_outcome=case_result.stopped.head if case_result.stopped else None,
        peaks_mib=case_result.peaks_mib,
    )


def _unmeasured(
    key: Key, identity: fingerprint.Fingerprint, base: Sources, head: Sources, rules: CaseRules
) -> ComparisonResult:
    """Of a case of which both versions run the same on the device."""
    command = shlex.join(["python", "-m", "benchmarks", "compare", *_refs(base, head), "--gpu", identity.machine])
    return ComparisonResult(
        identity.utc, base.side, head.side, identity, key, rules.schedule, CompareVerdict.SAME, SAME_CODE, command,
        same_device_code=True,
    )  # fmt: skip


def _refs(base: Sources, head: Sources) -> list[str]:
    return [side.ref for side in (base.side, head.side) if side.ref != checkout.WORKING_TREE]


def _command(base: Sources, head: Sources, machine: str, key: Key, rules: Rules) -> str:
    refs = _refs(base, head)
    rest = ["--gpu", machine, "--cases", key.name, "--pairs", str(rules.interim_analyses[-1])]
    return shlex.join(["python", "-m", "benchmarks", "compare", *refs, *rest])

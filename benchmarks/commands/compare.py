"""`compare`: is HEAD slower than BASE? Both are measured now, here, with interleaved samples, by today's benches.

Answers FASTER, SLOWER, SAME or UNDECIDED for each case, with the smallest change that could have been seen; FAILED
where HEAD does not pass it. On a GPU it also says where memory grew or shrank. Exit code 1 for SLOWER, FAILED or memory
that grew, 0 otherwise: UNDECIDED is no verdict.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import budget, peak_memory
from benchmarks.ab import calibration, checkout, reach, result, sequential, trial
from benchmarks.ab.calibration import Calibration
from benchmarks.ab.checkout import Sources
from benchmarks.ab.child import THREADS
from benchmarks.ab.result import CompareVerdict, ComparisonResult, Rules
from benchmarks.ab.sequential import PairFailure, PairTiming
from benchmarks.ab.starter import PairStarter
from benchmarks.budget import BudgetPlan
from benchmarks.cases.key import Key
from benchmarks.commands import options
from benchmarks.history.store import Store
from benchmarks.peak_memory import MemoryVerdict
from harness import fingerprint, jsonl, machines
from harness.interrupt import INTERRUPTED
from harness.machines import Machine

SUMMARY = "measure two commits side by side: FASTER, SLOWER, SAME or UNDECIDED for each case"
BAD = (CompareVerdict.SLOWER, CompareVerdict.FAILED)
_MOST_FILES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two commits, which cases, and how long."""
    parser.add_argument("base", metavar="BASE", help="a commit: main, HEAD~1, v1.0")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="another one (default: the working tree)")
    options.add_gpu(parser)
    options.add_cases(parser, default="those of the quick suite, but memory, that the difference can reach")
    parser.add_argument("--quick", action="store_true", help="of the named cases only those of the quick suite")
    options.add_budget(parser)
    add_pairs(parser)
    options.add_out(parser)


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """--pairs, and --rounds, its earlier name, which stored commands have."""
    parser.add_argument(
        "--pairs",
        type=int,
        default=Rules.interim_analyses[-1],
        metavar="N",
        help="most pairs of processes per case; what they leave open is UNDECIDED"
        f" (default: {Rules.interim_analyses[-1]})",
    )
    parser.add_argument("--rounds", dest="pairs", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    """Measure and answer; the last line of stdout is JSON."""
    machine = machines.machine(arguments.gpu, machines.visible_gpu())
    keys = options.nsa_cases(machine, arguments.cases, quick=arguments.quick)
    rules = rules_for(arguments.out, machine, arguments.pairs)
    options.check_writable(arguments.out / "verdicts")
    begin = time.perf_counter()
    refs = [arguments.base, arguments.head or checkout.WORKING_TREE]
    with checkout.sources(refs) as (base, head):
        keys = keys if arguments.cases else _reached(keys, base, head)
        if not keys:
            print(json.dumps({"verdicts": {}, "bad": [], "undecided": []}))
            return 0
        planned = _planned(arguments, machine, keys, rules)
        keys = keys if planned is None else [key for case in planned.chosen for key in case.keys]
        print(f"{machine.title}: {len(keys)} cases, {_name(base)} against {_name(head)}", flush=True)
        found, interrupted = measure(machine, keys, base, head, rules, arguments.budget)
    path = result.path(arguments.out, found[0].utc, base.side, head.side)
    for one in found:
        jsonl.append(path, one)
    print("\n" + table(found))
    summary = {
        "verdicts": dict(Counter(one.verdict.value for one in found)),
        "bad": [one.key.name for one in found if one.verdict in BAD],
        "undecided": [one.key.name for one in found if one.verdict is CompareVerdict.UNDECIDED],
        "memory_grew": [one.key.name for one in found if one.memory is MemoryVerdict.GREW],
        "unmeasured": [case.case for case in planned.left_out] if planned else [],
        "seconds": round(time.perf_counter() - begin, 1),
        "results": str(path),
    }
    print(json.dumps(summary))
    if interrupted:
        return INTERRUPTED
    return 1 if summary["bad"] or summary["memory_grew"] else 0


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


def _reached(keys: Sequence[Key], base: Sources, head: Sources) -> list[Key]:
    """Those that run a file which differs; says which files and how many cases these are."""
    found, changed = reach.reached(keys, base, head), reach.changed_files(base, head)
    if not changed:
        print("nsa/ is the same on both sides: no case is reached. --cases names some to be compared all the same")
        return []
    more = f" and {len(changed) - _MOST_FILES} more" if len(changed) > _MOST_FILES else ""
    files = ", ".join(changed[:_MOST_FILES]) + more
    print(f"{len(found)} of {len(keys)} cases are reached by what differs in {files}; --cases names others")
    return found


def _planned(
    arguments: argparse.Namespace, machine: Machine, keys: Sequence[Key], rules: CaseRules
) -> BudgetPlan | None:
    """What --budget chooses of the cases, which is said; None without it.

    A case costs what it cost in a run, for each pair of processes before the first analysis.
    """
    if arguments.budget is None:
        return None
    last = {one.key.name: one.utc for one in result.read(arguments.out)[0] if one.fingerprint.machine == machine.id}
    pairs = rules.schedule.interim_analyses[0]
    visits = {
        name: [visit._replace(utc=last.get(name, ""), case_s=visit.case_s and pairs * visit.case_s) for visit in found]
        for name, found in Store(arguments.out, machine.id).visits(machine.id).items()
    }
    now = datetime.now(timezone.utc).isoformat()
    found = budget.choose(budget.cases(keys, visits, rules.calibrated), arguments.budget, now)
    print(budget.said(found), flush=True)
    return found


def rules_for(results: Path, machine: Machine, pairs: int) -> CaseRules:
    """This machine's calibrated thresholds, or the defaults, up to so many pairs. ValueError for too few.

    Machines of one name ("cpu") differ in their noise: thresholds of another processor or GPU are not taken.
    """
    schedule = Rules.of_device(machine.device).up_to(pairs)
    here = fingerprint.device_name(machine)
    try:
        found = calibration.load(results, machine.id)
    except ValueError as error:
        print(f"thresholds: the defaults; {error}")
        return CaseRules(schedule, None)
    if found is None:
        print(f"thresholds: the defaults, which need more pairs; calibrate --gpu {machine.id} measures better ones")
    elif found.fingerprint.device != here:
        file = calibration.path(results, machine.id)
        print(f"thresholds: the defaults; {file} is of {found.fingerprint.device}, and this is {here}")
        found = None
    return CaseRules(schedule, found)


class _BudgetOverError(Exception):
    """The time that was given is over."""


def measure(
    machine: Machine,
    keys: Sequence[Key],
    base: Sources,
    head: Sources,
    rules: CaseRules,
    budget_s: float | None = None,
) -> tuple[list[ComparisonResult], bool]:
    """One result per key, with a line of progress per pair of processes; and whether it was interrupted.

    After `budget_s` no further pair begins; what is open then is UNDECIDED.
    """
    identity = fingerprint.take(machine.id, machine.device)
    if machine.device == "cpu":
        identity = dataclasses.replace(identity, threads=THREADS)
    tested, interrupted = [sequential.CaseResult(key.name) for key in keys], False
    with PairStarter(base, head, machine.device) as starter:
        measure_pair = _Measure(starter, {key.name: key for key in keys}, rules.schedule, budget_s)
        try:
            sequential.extend(tested, measure_pair, rules, rules.schedule.interim_analyses)
        except (KeyboardInterrupt, _BudgetOverError) as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            why = "interrupted" if interrupted else "the budget was over"
            for case_result in tested:
                if case_result.verdict is CompareVerdict.UNDECIDED and case_result.stopped is None:
                    case_result.reason = f"{why} after {len(case_result.pairs)} pairs of processes"
    paired = zip(tested, keys, strict=True)
    return [_result(case_result, key, identity, base, head, rules) for case_result, key in paired], interrupted


class _Measure:
    """Measures pairs of processes for `sequential.extend` and prints the progress."""

    def __init__(self, starter: PairStarter, keys: Mapping[str, Key], rules: Rules, budget_s: float | None) -> None:
        self._starter, self._keys, self._rules, self._budget_s = starter, keys, rules, budget_s
        self._done, self._seconds, self._cases = 0, 0.0, 0

    def __call__(self, cases: Sequence[str]) -> Mapping[str, PairTiming | PairFailure]:
        if self._budget_s is not None and self._seconds > self._budget_s:
            raise _BudgetOverError
        begin = time.perf_counter()
        keys = [self._keys[case] for case in cases]
        found = trial.run(self._starter, keys, self._rules, self._done % 2, check=self._done == 0)
        self._done += 1
        self._seconds += time.perf_counter() - begin
        self._cases += len(cases)
        print(self._progress(len(cases)), flush=True)
        timed = (result if isinstance(result, PairFailure) else result.timed() for result in found)
        return dict(zip(cases, timed, strict=True))

    def _progress(self, cases: int) -> str:
        """Time left to the next interim analysis; how many cases go on after it is not known before it."""
        what, analyses = f"pair {self._done}, {cases} case{'s' if cases > 1 else ''}", self._rules.interim_analyses
        next_analysis = next((pairs for pairs in analyses if pairs >= self._done), self._done)
        if next_analysis == self._done:
            return f"[{what}] {self._seconds:.0f} s"
        left_s = (next_analysis - self._done) * cases * self._seconds / self._cases
        progress = f"[{what}] {self._seconds:.0f} s, {left_s:.0f} s to the analysis after pair {next_analysis}"
        return f"{progress}, {analyses[-1]} at most"


def _result(
    case_result: sequential.CaseResult,
    key: Key,
    identity: fingerprint.Fingerprint,
    base: Sources,
    head: Sources,
    rules: CaseRules,
) -> ComparisonResult:
    judged_by = rules(case_result.case, case_result.base_ms) if case_result.pairs else rules.schedule
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


def _command(base: Sources, head: Sources, machine: str, key: Key, rules: Rules) -> str:
    refs = [side.ref for side in (base.side, head.side) if side.ref != checkout.WORKING_TREE]
    rest = ["--gpu", machine, "--cases", key.name, "--pairs", str(rules.interim_analyses[-1])]
    return shlex.join(["python", "-m", "benchmarks", "compare", *refs, *rest])


def _name(sources: Sources) -> str:
    side = sources.side
    return f"{side.ref} ({(side.commit or side.nsa_sha256)[:10]}{', changed' if side.dirty else ''})"


def table(found: Sequence[ComparisonResult]) -> str:
    """One line per case, what needs a person first."""
    order = [
        CompareVerdict.FAILED,
        CompareVerdict.SLOWER,
        CompareVerdict.UNDECIDED,
        CompareVerdict.FASTER,
        CompareVerdict.SAME,
    ]
    return "\n".join(map(_line, sorted(found, key=lambda one: order.index(one.verdict))))


def _line(one: ComparisonResult) -> str:
    words = [f"{one.verdict.value:<10} {one.key.name:<58}"]
    if one.change is not None and one.interval is not None and one.detectable is not None:
        low, high = one.interval
        words.append(f"{one.change:+.1%} [{low:+.1%}, {high:+.1%}]")
        words.append(f"{one.base_ms:.4g} -> {one.head_ms:.4g} ms")
        words.append(f"could see {one.detectable:.1%}")
    if one.peaks_mib is not None and one.memory in (MemoryVerdict.GREW, MemoryVerdict.SHRANK):
        words.append(f"{one.memory.value} {peak_memory.said(*one.peaks_mib)}")
    return "  ".join([*words, one.reason or ""]).rstrip()

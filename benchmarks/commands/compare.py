"""`compare`: is HEAD slower than BASE? Both are measured now, here, with interleaved samples, by today's benches.

Answers FASTER, SLOWER, SAME or UNDECIDED for each case, with the smallest change that could have been seen; FAILED
where HEAD does not pass it. On a GPU it also says where memory grew or shrank. Exit code 1 for SLOWER, FAILED or memory
that grew, 0 otherwise: UNDECIDED is no verdict.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import budget, peak_memory
from benchmarks.ab import calibration, checkout, paired_run, reach, result
from benchmarks.ab.checkout import Sources
from benchmarks.ab.paired_run import CaseRules
from benchmarks.ab.result import CompareVerdict, ComparisonResult, Rules
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
_NOISY = 1.5
"""Times the calibrated noise: from here on it is said."""


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
            print(json.dumps(_summary([], begin, None)))
            return 0
        planned = _planned(arguments, machine, keys, rules)
        keys = keys if planned is None else [key for case in planned.chosen for key in case.keys]
        print(f"{machine.title}: {len(keys)} cases, {_name(base)} against {_name(head)}", flush=True)
        found, interrupted = paired_run.measure(machine, keys, base, head, rules, arguments.budget)
    path = result.path(arguments.out, found[0].utc, base.side, head.side)
    for one in found:
        jsonl.append(path, one)
    print("\n" + table(found))
    if noisier := _noisier(found, rules):
        print(noisier)
    summary = _summary(found, begin, path, planned)
    print(json.dumps(summary))
    if interrupted:
        return INTERRUPTED
    return 1 if summary["bad"] or summary["memory_grew"] else 0


def _summary(
    found: Sequence[ComparisonResult], begin: float, path: Path | None, planned: BudgetPlan | None = None
) -> dict[str, Any]:
    """The last line of stdout. `path` is None where no case is reached, so that nothing is written."""
    return {
        "verdicts": dict(Counter(one.verdict.value for one in found)),
        "bad": [one.key.name for one in found if one.verdict in BAD],
        "undecided": [one.key.name for one in found if one.verdict is CompareVerdict.UNDECIDED],
        "memory_grew": [one.key.name for one in found if one.memory is MemoryVerdict.GREW],
        "unmeasured": [case.case for case in planned.left_out] if planned else [],
        "seconds": round(time.perf_counter() - begin, 1),
        "results": None if path is None else str(path),
    }


def _noisier(found: Sequence[ComparisonResult], rules: CaseRules) -> str | None:
    """What to say where the noise that cases were judged by is far above the calibrated one."""
    noise = [(one.rules.noise.sd, rules(one.key.name, one.base_ms).noise.sd) for one in found if one.base_ms]
    ratios = [today / calibrated for today, calibrated in noise if calibrated and today > _NOISY * calibrated]
    if not ratios:
        return None
    return (
        f"pairs of processes differ up to {max(ratios):.1f} times as much as at the calibration: {len(ratios)} of"
        f" {len(found)} cases are judged by that. Let nothing else run, or calibrate again"
    )


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
    results = result.read(arguments.out)[0]
    last = {one.key.name: one.utc for one in results if one.fingerprint.machine == machine.id and one.changes}
    pairs = rules.schedule.interim_analyses[0]
    visits = {
        name: [visit._replace(utc=last.get(name, ""), case_s=visit.case_s and pairs * visit.case_s) for visit in found]
        for name, found in Store(arguments.out, machine.id).visits(machine.id).items()
    }
    now = datetime.now(timezone.utc).isoformat()
    found = budget.choose(budget.cases(keys, visits, rules.calibrated), arguments.budget, now)
    print(budget.message(found), flush=True)
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
        words.append(f"{one.memory.value} {peak_memory.message(*one.peaks_mib)}")
    return "  ".join([*words, one.reason or ""]).rstrip()

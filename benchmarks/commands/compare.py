"""`compare`: is HEAD slower than BASE? Both are measured now, here, with interleaved samples, by today's benches.

Answers FASTER, SLOWER, SAME or UNDECIDED for each case, with the smallest change that could have been seen; FAILED
where HEAD does not pass it. On a GPU it also says where memory grew or shrank, and cases that launch the same
instructions on both sides are SAME without being measured, unless `--cases` names them. Exit code 1 for SLOWER, FAILED
or memory that grew, 0 otherwise: UNDECIDED is no verdict.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import budget, peak_memory
from benchmarks.ab import calibration, checkout, device_code, paired_run, reach, result
from benchmarks.ab.checkout import Sources
from benchmarks.ab.paired_run import CaseRules
from benchmarks.ab.result import CompareVerdict, ComparisonResult, Rules
from benchmarks.budget import BudgetPlan
from benchmarks.cases.key import Key
from benchmarks.commands import options
from benchmarks.history.store import CaseVisit, Store
from benchmarks.peak_memory import MemoryVerdict
from harness import fingerprint, forced, jsonl, machines
from harness.interrupt import INTERRUPTED
from harness.machines import Machine

SUMMARY = "measure two commits side by side: FASTER, SLOWER, SAME or UNDECIDED for each case"
BAD = (CompareVerdict.SLOWER, CompareVerdict.FAILED)
_MOST_FILES = 8
_PAIR_SHARES = {"cpu": (1.0, 1.0), "cuda": (0.76, 0.28)}
"""Of what a case takes in a run on an H200, what its first pair takes, with the oracle, and each later one: of 101
quick cases on an H100, everything compiled ahead."""
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
        end = begin + (math.inf if arguments.budget is None else arguments.budget)
        named = bool(arguments.cases)
        keys = keys if named else _reached(keys, base, head)
        keys, same_code = _by_device_code(machine, keys, base, head, end - time.perf_counter(), named=named)
        if not keys and not same_code:
            print(json.dumps(_summary([], begin, None)))
            return 0
        left_s = None if arguments.budget is None else max(0.0, end - time.perf_counter())
        planned = _planned(arguments, machine, keys, rules, left_s) if keys else None
        keys = keys if planned is None else [key for case in planned.chosen for key in case.keys]
        if keys:
            print(f"{machine.title}: {len(keys)} cases, {_name(base)} against {_name(head)}", flush=True)
        found, interrupted = paired_run.measure(machine, keys, base, head, rules, left_s, same_code)
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
        "same_device_code": [one.key.name for one in found if one.same_device_code],
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
        f" {sum(bool(one.changes) for one in found)} cases are judged by that. Let nothing else run, or calibrate again"
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


def _by_device_code(
    machine: Machine, keys: Sequence[Key], base: Sources, head: Sources, left_s: float, *, named: bool = False
) -> tuple[list[Key], list[Key]]:
    """(cases to be measured, cases of which both sides run the same on this GPU); says how many these are.

    Those that were named are measured, the same or not. Kernels are compiled meanwhile, by as many processes as there
    are cores, and lie ready in Triton's cache: the first pair would compile them one after the other.
    """
    if machine.device == "cpu" or forced.read() is not None or not keys:
        return list(keys), []
    print(f"compiling the kernels of {len(keys)} cases on the CPU, both sides", flush=True)
    begin = time.perf_counter()
    sides = device_code.of_cases((base, head), keys, device_code.visible_gpu(), min(left_s, device_code.DEADLINE_S))
    same = {key.name for key, of_base, of_head in zip(keys, *sides, strict=True) if of_base.same(of_head)}
    seconds = time.perf_counter() - begin
    verdict = "measured all the same, as --cases names them" if named else "SAME, not measured"
    print(f"{len(same)} of {len(keys)} cases launch the same instructions on both sides: {verdict} ({seconds:.0f} s)",
          flush=True)  # fmt: skip
    unknown = Counter(
        code.why for codes in sides for key, code in zip(keys, codes, strict=True)
        if code.why and key.mode not in device_code.MODES_WITHOUT
    )  # fmt: skip
    for why, count in unknown.most_common():
        print(f"  not known of {count}, each side of a case counted: {why}", flush=True)
    skipped = set() if named else same
    return [key for key in keys if key.name not in skipped], [key for key in keys if key.name in skipped]


def _planned(
    arguments: argparse.Namespace, machine: Machine, keys: Sequence[Key], rules: CaseRules, left_s: float | None
) -> BudgetPlan | None:
    """What --budget, of which `left_s` are left, chooses of the cases, which is said; None without it.

    A case costs what it cost in a run, in parts (`_PAIR_SHARES`), for the pairs before the first analysis.
    """
    if left_s is None:
        return None
    results = result.read(arguments.out)[0]
    last = {one.key.name: one.utc for one in results if one.fingerprint.machine == machine.id and one.changes}
    first, later = _PAIR_SHARES[machine.device]
    share = first + (rules.schedule.interim_analyses[0] - 1) * later
    visits = {
        name: [visit._replace(utc=last.get(name, ""), case_s=visit.case_s and share * visit.case_s) for visit in found]
        for name, found in _visits(arguments.out, machine).items()
    }
    now = datetime.now(timezone.utc).isoformat()
    found = budget.choose(budget.cases(keys, visits, rules.calibrated), left_s, now)
    print(budget.message(found), flush=True)
    return found


def _visits(results: Path, machine: Machine) -> dict[str, list[CaseVisit]]:
    """This machine's; for cases that a GPU has no record of, those of the GPU with most cases: near enough in time."""
    own = Store(results, machine.id).visits(machine.id)
    if machine.device == "cpu":
        return own
    stored = Store(results)
    others = [one for one in stored.machines() if machines.is_id(one) and one not in (machines.CPU, machine.id)]
    of_another: dict[str, list[CaseVisit]] = max(map(stored.visits, others), key=len, default={})
    return of_another | own


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
    """One line per case that was measured, what needs a person first; then how many needed no measuring."""
    order = [
        CompareVerdict.FAILED,
        CompareVerdict.SLOWER,
        CompareVerdict.UNDECIDED,
        CompareVerdict.FASTER,
        CompareVerdict.SAME,
    ]
    measured = [one for one in found if not one.same_device_code]
    lines = list(map(_line, sorted(measured, key=lambda one: order.index(one.verdict))))
    if len(measured) < len(found):
        lines.append(f"{CompareVerdict.SAME.value:<10} {len(found) - len(measured)} more cases, {paired_run.SAME_CODE}")
    return "\n".join(lines)


def _line(one: ComparisonResult) -> str:
    words = [f"{one.verdict.value:<10} {one.key.name:<58}"]
    if one.change is not None and one.interval is not None and one.detectable is not None:
        low, high = one.interval
        words.append(f"{one.change:+.1%} [{low:+.1%}, {high:+.1%}]")
        words.append(f"{one.base_ms:.4g} -> {one.head_ms:.4g} ms")
        words.append("could see more than 100%" if one.detectable > 1 else f"could see {one.detectable:.1%}")
    if one.peaks_mib is not None and one.memory in (MemoryVerdict.GREW, MemoryVerdict.SHRANK):
        words.append(f"{one.memory.value} {peak_memory.message(*one.peaks_mib)}")
    return "  ".join([*words, one.reason or ""]).rstrip()

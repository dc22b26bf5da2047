"""`run`: recognise the machine, measure its suite, write records, build the page."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks import anchors, budget, console, contenders, runner, watched, worker
from benchmarks.ab import calibration
from benchmarks.baselines import contender
from benchmarks.budget import BudgetPlan
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands import options
from benchmarks.commands.report import build_page
from benchmarks.contenders import Contender
from benchmarks.correctness import row_sampling
from benchmarks.history import reservations, run_file, speedup
from benchmarks.history.anchor_plan import AnchorRequest
from benchmarks.history.anchors import CLASSES
from benchmarks.history.memory import WillNotFit, will_not_fit
from benchmarks.history.records import Record
from benchmarks.history.store import Store
from benchmarks.runner import Measurement
from benchmarks.timing import gpu_watch, peak
from benchmarks.timing.gpu_watch import GpuWatch
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import suite
from benchmarks.workloads.prepare import memory_mib, memory_need
from harness import fingerprint, forced, machines
from harness.fingerprint import Fingerprint
from harness.interrupt import INTERRUPTED
from harness.machines import Machine
from nsa import backends

SUMMARY = "measure, write records, build the page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, on which machine, and where it is written."""
    parser.add_argument("--quick", action="store_true", help="fewer shapes and samples: about a minute on a CPU")
    options.add_gpu(parser)
    options.add_forced(parser)
    options.add_cases(parser)
    options.add_budget(parser)
    parser.add_argument("--backend", choices=backends.NAMES, default="auto", help="NSA's backend (default: auto)")
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="draws the rows that are compared with the oracle, and the inputs of the last check (default: a new one)",
    )
    parser.add_argument(
        "--anchors",
        default=anchors.AUTO,
        metavar="COMMIT",
        help="measure some cases of that older commit too: they tell an upgrade's effect from the code's; 'none': never"
        " (default: auto, where a driver, CUDA, PyTorch, Triton, ... changed since the machine's runs: up to"
        f" {sum(CLASSES.values())} cases, about a minute on a GPU)",
    )
    parser.add_argument(
        "--contenders",
        type=lambda text: text.split(","),
        default=[],
        metavar="A,B",
        help="measure these beside NSA too, with a verdict on each: what installed packages offer (entry points"
        f" {contender.GROUP!r}), or baselines of other cases; '{contenders.ALL}': all that is offered",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases and measure nothing")
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Measure; the last line of stdout is JSON. 1 where NSA is wrong on a case, 2 where it has no figure at all.

    A baseline that is wrong or broken fails no run: the last line names it under "red_baselines"; so for a contender,
    whose verdicts stand under "contenders", or which "refused_contenders" names where it could not even be asked.
    """
    machine = _machine(arguments)
    if arguments.seed is not None and arguments.seed <= row_sampling.TIMED_SEED:
        raise ValueError(
            f"--seed must be above {row_sampling.TIMED_SEED}, that of the timed inputs; got {arguments.seed}"
        )
    asked, refused = contenders.asked(arguments.contenders)
    for reason in refused:
        print(f"python -m benchmarks: {reason}", file=sys.stderr)
    keys = _cases(arguments, machine, asked)
    if arguments.list:
        print("\n".join(key.name for key in keys))
        return 0
    for folder in (arguments.out / "runs" / machine.id, arguments.out / "report"):
        options.check_writable(folder)
    timed = forced.of(machine.id) is None
    watch = gpu_watch.begin(machine) if timed else None
    identity = fingerprint.take(machine.id, machine.device, peak.measure(machine) if timed else None)
    seed = row_sampling.new_seed() if arguments.seed is None else arguments.seed
    names = [one.name for one in asked]
    command = run_command(machine.id, arguments.backend, quick=arguments.quick, seed=seed, contenders=names)
    beside = anchors.find(arguments.anchors, arguments.out, identity, keys) if timed else None
    planned = _planned(arguments, machine.id, identity, keys)
    keys = keys if planned is None else [key for case in planned.chosen for key in case.keys]
    too_large = {one.name: one for one in _too_large(arguments.out, machine, identity, keys)}
    keys = sorted(keys, key=lambda key: key.name not in too_large)  # stable: those that are not tried come first
    path = run_file.create(arguments.out, identity, command)
    print(f"{machine.title}: {len(keys)} measurements -> {path}", flush=True)
    case_command = partial(run_file.case_command, command)

    begin = time.perf_counter()
    done: list[Record] = []
    plan = runner.QUICK if arguments.quick else runner.FULL

    def measure(some: Sequence[Key]) -> Iterator[Measurement]:
        return worker.run(some, machine.device, plan, identity, case_command, seed=seed)

    try:
        with console.RunProgress(keys) as progress:
            tried = [key for key in keys if key.name not in too_large]
            not_tried = (_not_tried(key, too_large[key.name], identity, command) for key in keys[: len(too_large)])
            for measured in chain(not_tried, watched.run(tried, measure, watch)):
                run_file.append(path, measured.record)
                if measured.raw:
                    run_file.append_samples(path, measured.raw)
                progress.finished(measured.record)
                done.append(measured.record)
                if planned and _over(keys, len(done), time.perf_counter() - begin, planned.budget_s):
                    break
        bridged = _measure_anchors(beside, path, machine.device, plan, identity, command, seed, watch) if beside else []
    except KeyboardInterrupt:
        return _interrupted(arguments.out, path, len(done), len(keys))
    page = build_page(arguments.out)
    print("\n" + (console.table(speedup.comparisons(done)) if timed else console.fits(done, machine.title)))
    if warning := console.warning(done):
        print(f"\n{warning}")
    verdicts = contenders.verdicts(done, asked)
    if asked:
        print("\n" + console.verdict_table(verdicts))
    print(f"\nThe page: {page}")
    wrong = speedup.faults(done)
    summary = {
        "machine": machine.id,
        "outcomes": dict(Counter(record.outcome.value for record in done)),
        "faults": [record.key.name for record in wrong],
        "red_baselines": {record.key.name: record.outcome.value for record in speedup.red_baselines(done)},
        "contenders": {
            name: {case: found.value for case, (found, _) in by_case.items()} for name, by_case in verdicts.items()
        },
        "refused_contenders": refused,
        "not_trustworthy": reservations.count(done),
        "anchors": dict(Counter(record.outcome.value for record in bridged)),
        "unmeasured": _unmeasured(planned, done),
        "seed": seed,
        "seconds": round(time.perf_counter() - begin, 1),
        "records": str(path),
        "page": str(page),
    }
    print(json.dumps(summary))
    if speedup.nothing_measured(done):
        print("python -m benchmarks: NSA was measured on no case; the page says why", file=sys.stderr)
        return 2
    return 1 if wrong else 0


def _machine(arguments: argparse.Namespace) -> Machine:
    """The machine that is asked for and here. Raises WrongMachineError; ValueError for what cannot be forced."""
    gpu = machines.visible_gpu()
    asked = forced.enter(arguments.force_arch, arguments.memory_gb)
    if asked and (arguments.contenders or arguments.anchors not in (anchors.AUTO, anchors.NONE)):
        raise ValueError("--force-arch times nothing; --contenders and --anchors compare times: leave them out")
    return forced.machine(machines.machine(arguments.gpu, gpu), gpu, asked)


def _cases(arguments: argparse.Namespace, machine: Machine, asked: Sequence[Contender]) -> list[Key]:
    """What the options ask for of this machine's suite, each contender beside NSA; NSA alone where it is forced."""
    shapes, on_gpu = suite.table(machine.suite), machine.device == "cuda"
    quick, whole = (
        contenders.with_contenders(suite.planned(shapes, quick=part, backend=arguments.backend, on_gpu=on_gpu), asked)
        for part in (True, False)
    )
    left_out = suite.not_offered(shapes, on_gpu=on_gpu)
    keys = options.chosen(quick if arguments.quick else whole, arguments.cases, whole, left_out)
    if left_out:
        print(f"{len(left_out)} replayed cases are not offered: {next(iter(left_out.values()))}", file=sys.stderr)
    if forced.of(machine.id) is not None:
        keys = [key for key in keys if key.implementation == NSA]
    return suite.absent_once(keys, machine.device)


def _too_large(results: Path, machine: Machine, identity: Fingerprint, keys: Sequence[Key]) -> list[WillNotFit]:
    """The cases that this device has no memory for, which are said before anything runs."""
    free_mib, total_mib = memory_mib(machine.device)
    stored = Store(results)
    elsewhere_mib: dict[str, float] = {}
    for other in stored.machines():
        for name, found in stored.visits(other).items():
            if other != machines.CPU and found[-1].peak_mem_mib is not None:
                elsewhere_mib[name] = min(found[-1].peak_mem_mib, elsewhere_mib.get(name, math.inf))
    needs = {key.name: memory_need(key) for key in keys}
    sources, here = identity.nsa_sha256, stored.visits(machine.id)
    found_too_large = will_not_fit(needs, total_mib, free_mib, sources, here, elsewhere_mib)
    for one in found_too_large:
        print(f"will not fit: {one.name}: {one.reason}", flush=True)
    return found_too_large


def _not_tried(key: Key, why: WillNotFit, identity: Fingerprint, command: str) -> Measurement:
    again = run_file.case_command(command, key)
    return Measurement(Record(key, CaseOutcome.OUT_OF_MEMORY, why.reason, identity, again, out_of_memory=why.lacks))


def _planned(
    arguments: argparse.Namespace, machine: str, identity: Fingerprint, keys: Sequence[Key]
) -> BudgetPlan | None:
    """What --budget chooses, which is said; None without it."""
    if arguments.budget is None:
        return None
    try:
        calibrated = calibration.load(arguments.out, machine)
    except ValueError:  # of an earlier rule: as good as none
        calibrated = None
    visits = Store(arguments.out, machine).visits(machine)
    found = budget.choose(budget.cases(keys, visits, calibrated, identity.nsa_sha256), arguments.budget, identity.utc)
    print(budget.message(found), flush=True)
    return found


def _over(keys: Sequence[Key], done: int, elapsed_s: float, budget_s: float) -> bool:
    """Whether the time is up and the next measurement would begin another case."""
    return elapsed_s > budget_s and done < len(keys) and keys[done].case != keys[done - 1].case


def _unmeasured(planned: BudgetPlan | None, done: Sequence[Record]) -> list[str]:
    """The cases that a budget has left out, and those that it ended before; the latter are said."""
    if planned is None:
        return []
    measured = {record.key.case for record in done}
    late = [case.case for case in planned.chosen if case.case not in measured]
    if late:
        print(f"\nThe budget of {budget.minutes(planned.budget_s)} was over. UNMEASURED too: {', '.join(late)}")
    return [*late, *(case.case for case in planned.left_out)]


def _measure_anchors(
    beside: AnchorRequest,
    path: Path,
    device: str,
    plan: SamplingPlan,
    now: Fingerprint,
    command: str,
    seed: int,
    watch: GpuWatch | None,
) -> list[Record]:
    """Add them to the run's file: those of the first commit that gives a figure. They do not decide the exit code."""
    changed = "; ".join(beside.differences) or "as asked"
    found: list[Record] = []
    for one in beside.plans:
        of_commit = f"{command.removesuffix(' --cases')} --anchors {shlex.quote(one.commit)} --cases"
        print(f"\nAnchors: {len(one.keys)} cases at {one.commit[:10]} ({changed})", flush=True)
        try:
            case_command = partial(run_file.case_command, of_commit)
            for record in anchors.measure(one, device, plan, now, case_command, seed, watch):
                run_file.append(path, record)
                print(f"{record.key.name:<66} {record.outcome.value}  {record.reason or console.figure(record)}")
                found.append(record)
        except anchors.TooOldError as error:
            _say_no_anchors(one.commit, str(error))
        except ValueError as error:
            hint = "With the whole history here (git fetch --unshallow) the next run measures them"
            _say_no_anchors(one.commit, f"{error}. {hint}")
        if any(record.outcome is CaseOutcome.PASSED for record in found):
            break
    return found


def _say_no_anchors(commit: str, why: str) -> None:
    print(f"python -m benchmarks: no anchors at {commit[:10]}: {why}", file=sys.stderr)


def run_command(machine_id: str, backend: str, *, quick: bool, seed: int, contenders: Sequence[str] = ()) -> str:
    """What measures a case again, with its name behind it."""
    stands_for = forced.of(machine_id)
    words = ["python", "-m", "benchmarks", "run", "--gpu", forced.itself(machine_id), "--backend", backend]
    words += stands_for.options if stands_for else []
    if contenders:
        words += ["--contenders", ",".join(contenders)]
    return shlex.join([*words, *["--quick"] * quick, "--seed", str(seed), "--cases"])


def _interrupted(results: Path, path: Path, done: int, total: int) -> int:
    print(f"python -m benchmarks: interrupted; {done} of {total} measurements are in {path}", file=sys.stderr)
    if done:
        print(f"The page: {build_page(results)}")
    return INTERRUPTED

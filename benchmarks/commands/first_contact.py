"""`first-contact`: everything that a machine without history needs, in one command, and the bundle to send.

Preflight, laws in small, some incidents, the quick suite, a quick calibration. After an interrupt the same command goes
on where it stopped. Exit code 0 where every step is green, 1 where one is red (the last
lines say what is responsible and what to send), 2 where the machine cannot be measured as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.commands import options
from benchmarks.contact import bundle, preflight, received, session, steps
from benchmarks.contact.cause import Diagnosis
from benchmarks.contact.session import StepResult
from harness import fingerprint, machines
from harness.fingerprint import Fingerprint
from harness.interrupt import INTERRUPTED

SUMMARY = "a machine without history: its checks, its first records, and the bundle to send"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which machine, and where it is written."""
    options.add_gpu(parser)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="the least of every step, without calibration: whether the session works here; no baseline comes of it",
    )
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Check, measure, pack; the last line of stdout is JSON."""
    machine = machines.machine(arguments.gpu, machines.visible_gpu())
    options.check_writable(arguments.out)
    found = preflight.findings(preflight.read(machine, arguments.out, asked_for_cpu=arguments.gpu == machines.CPU))
    for one in found:
        print(f"{'REFUSED' if one.refused else 'ok':<8} {one.name}: {one.message}")
    identity = fingerprint.take(machine.id, machine.device)
    folder = session.folder_of(arguments.out, identity, smoke=arguments.smoke)
    session.keep_preflight(folder, found)
    if refused := session.refusal(found):
        _tell(session.of_preflight(refused))
        print(json.dumps(_pack(folder, identity, [], complete=False, smoke=arguments.smoke)))
        return 2
    plan = steps.plan(machine, folder, smoke=arguments.smoke)
    results = session.run(folder, plan, identity)
    if results and results[-1].code == INTERRUPTED:
        print("python -m benchmarks: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    complete = session.complete(plan, results)
    if red := next((one for one in results if one.diagnosis), None):
        assert red.diagnosis is not None
        print(f"\n{red.name} is RED (exit code {red.code})")
        _tell(red.diagnosis)
    summary = _pack(folder, identity, results, complete=complete, smoke=arguments.smoke)
    if complete and not arguments.smoke:
        with received.opened(Path(summary["bundle"])) as own:  # as they are sent: merged again, they are known
            for left_out in received.merge_into(own, arguments.out).refused:
                print(f"note: {left_out}")
        print(
            f"Its records are in {arguments.out}. Take its level as the first baseline:\n"
            f"  nox -s accept -- --first --gpu {machine.id} --reason TEXT"
        )
    print(json.dumps(summary))
    return 0 if complete else 1


def _tell(diagnosis: Diagnosis) -> None:
    print(
        f"responsible: {diagnosis.cause.value}\nseen: {diagnosis.message}\nto do: {diagnosis.do}\n"
        f"to send: {diagnosis.send}"
    )


def _pack(
    folder: Path, identity: Fingerprint, results: list[StepResult], *, complete: bool, smoke: bool
) -> dict[str, Any]:
    """What the last line says of the bundle."""
    target = folder.with_suffix(".tar.gz")
    made = target.with_name(f".{target.name}.new")
    try:
        sha256 = bundle.write(folder, identity, made, complete=complete, smoke=smoke)
        with received.opened(made) as own:  # what a receiver would refuse is seen here
            state = own.manifest.state
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
    print(f"\nThe bundle: {target}\n{state}\nsha256 of its manifest {sha256}")
    steps_told = {one.name: one.code for one in results}
    return {"bundle": str(target), "sha256": sha256, "complete": complete, "smoke": smoke, "steps": steps_told}

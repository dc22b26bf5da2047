"""One run of the suite: the machine, its findings in the ledger, what is printed, the exit code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import fingerprint, forced, machines
from harness.fingerprint import Fingerprint
from harness.forced import Forced
from nsa import backends
from regression import child, ledger, runner
from regression import soak as soaking
from regression.contract import Incident, ReproVerdict, gravest
from regression.runner import FAULTY, PRODUCT, Finding

NOTHING_CHECKED = 2
_LONGEST_WHY = 160  # characters; the whole is in the record and in JUnit's XML


@dataclass(frozen=True)
class ReproMachine:
    """Where the repros run."""

    title: str
    device: str
    """"cpu" or "cuda"."""
    num_gpus: int
    fingerprint: Fingerprint
    backends: tuple[str, ...]
    """NSA's backends that the repros run: without "triton" its kernels are proved by nothing."""

    @property
    def unproved(self) -> dict[str, str]:
        """Backends that no repro runs here, and why."""
        why = "Triton is not installed; no repro ran its kernels"
        return {f"backend {name}": why for name in backends.NAMES[1:] if name not in self.backends}


def find(device: str, asked: Forced | None = None) -> ReproMachine:
    """The machine for "cpu", "cuda" or "auto", under the name of what it is forced to.

    ValueError where a GPU is asked for and there is none, or one that cannot be forced.
    """
    found = None if device == "cpu" else machines.visible_gpu()
    if device == "cuda" and found is None:
        raise ValueError("--device cuda: PyTorch finds no GPU")
    here = forced.machine(machines.recognise(found), found, asked)
    num_gpus = torch.cuda.device_count() if here.device == "cuda" else 0
    return ReproMachine(here.title, here.device, num_gpus, fingerprint.take(here.id, here.device), child.backends())


def replay(
    machine: ReproMachine,
    incidents: Sequence[Incident],
    inject: str | None,
    jobs: int,
    out: Path,
    junitxml: Path | None,
) -> int:
    """Run both halves of each incident. The exit code; the last line of stdout is JSON."""
    repros = runner.plan(incidents, machine.device, inject)
    if junitxml is not None:
        ledger.junit_must_be_writable(junitxml)
    path = ledger.create(out, machine.fingerprint)
    print(f"{machine.title}: {len(repros)} repros of {len(incidents)} incident(s) -> {_from_here(path)}", flush=True)
    begin, findings = time.perf_counter(), list[Finding]()
    try:
        for finding in runner.run(repros, gpus=machine.num_gpus, jobs=jobs):
            findings.append(finding)
            ledger.append(path, ledger.entry(finding, machine.fingerprint))
            elapsed_s = time.perf_counter() - begin
            print(progress(finding, len(findings), len(repros), elapsed_s), flush=True)
    except BaseException:
        print(f"interrupted; {len(findings)} of {len(repros)} repros are in {_from_here(path)}", file=sys.stderr)
        if junitxml is not None:
            done = [finding.repro for finding in findings]
            ledger.write_junit(junitxml, findings, [repro for repro in repros if repro not in done])
        raise
    print("\n" + findings_table(findings))
    for name, why in machine.unproved.items():
        print(f"skipped: {name}: {why}")
    red = sorted({finding.repro.incident.id for finding in findings if not finding.ok})
    never_entered = sorted({finding.repro.incident.id for finding in findings if finding.never_entered})
    summary = {
        "machine": machine.fingerprint.machine,
        "device": machine.device,
        "incidents": len(incidents),
        "red": red,
        "never_entered": never_entered,
        "backends": machine.backends,
        "skipped": {**{f.repro.incident.id: f.reason for f in findings if f.allowed_skip}, **machine.unproved},
        "injected": inject,
        "seconds": round(time.perf_counter() - begin, 1),
        "records": _from_here(path),
    }
    print(json.dumps(summary), flush=True)  # before the file, which may fail
    if junitxml is not None:
        ledger.write_junit(junitxml, findings)
    if never_entered:
        return NOTHING_CHECKED
    if red:
        return 1
    return NOTHING_CHECKED if all(finding.allowed_skip for finding in findings) else 0


def _from_here(path: Path) -> str:
    """As it is typed in this folder, where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def soak(machine: ReproMachine, minutes: float, out: Path) -> int:
    """Train the profiles for this long. The exit code; the last line of stdout is JSON."""
    path = ledger.create(out, machine.fingerprint)
    shrunken = ", the models shrunken to what a CPU can train" if machine.device == "cpu" else ""
    print(
        f"{machine.title}: {len(soaking.LANES)} lanes in {minutes:g} minutes{shrunken} -> {_from_here(path)}",
        flush=True,
    )
    begin, done = time.perf_counter(), list[soaking.LaneResult]()
    for one in soaking.run(machine.device, minutes):
        done.append(one)
        ledger.append(path, ledger.soak_entry(one, machine.device, minutes, machine.fingerprint))
        head = f"[{len(done):>2}/{len(soaking.LANES)} {time.perf_counter() - begin:5.0f} s] {one.lane.name:<30}"
        print(f"{head} {one.verdict.value:<13} {one.reason or '; '.join(one.evidence.notes)}", flush=True)
    print("\n" + soaking.table(done))
    summary = {
        "machine": machine.fingerprint.machine,
        "device": machine.device,
        "shrunken": machine.device == "cpu",
        "lanes": {one.lane.name: one.verdict.value for one in done},
        "steps": sum(int(one.pace.figures.get("optimizer_steps") or 0) for one in done),
        "stalls": sum(one.evidence.stalled_after_s is not None for one in done),
        "nonfinite": sum(len(one.evidence.nonfinite or ()) for one in done),
        "seconds": round(time.perf_counter() - begin, 1),
        "records": _from_here(path),
    }
    print(json.dumps(summary))
    return 0 if all(one.verdict is ReproVerdict.PASSED for one in done) else 1


def progress(finding: Finding, done: int, total: int, elapsed_s: float) -> str:
    """[ 3/62   12 s] dup-blocks             faulty   WRONG         caught: row 3 lists block 2 twice"""
    width = len(str(total))
    repro = finding.repro
    head = f"[{done:>{width}}/{total} {elapsed_s:4.0f} s] {repro.incident.id:<22} {repro.part:<8}"
    return f"{head} {finding.verdict.value:<13} {_in_a_line(_outcome(finding))}".rstrip()


def _in_a_line(why: str) -> str:
    words = " ".join(why.split())
    return words if len(words) <= _LONGEST_WHY else f"{words[: _LONGEST_WHY - 1]}…"


def _outcome(finding: Finding) -> str:
    if finding.reason is not None:
        return finding.reason if finding.allowed_skip else f"RED: {finding.reason}"
    return f"caught: {gravest(finding.aspects).why}" if finding.repro.part == FAULTY else ""


def findings_table(findings: Sequence[Finding]) -> str:
    """One line per incident: whether its detector fired, what was judged on the product, and how long both took."""
    lines = [f"{'incident':<22} {'fault':<24} {'product':<13} {'seconds':>8}  looked at"]
    for incident_id in dict.fromkeys(finding.repro.incident.id for finding in findings):
        own = [finding for finding in findings if finding.repro.incident.id == incident_id]
        by_part = {finding.repro.part: finding for finding in own}
        product = by_part.get(PRODUCT)
        looked_at = ", ".join(f"{aspect.name} {aspect.verdict.value}" for aspect in product.aspects) if product else ""
        seconds = sum(finding.pace.seconds for finding in own)
        lines.append(
            f"{incident_id:<22} {_detector(by_part.get(FAULTY)):<24} {product.verdict.value if product else '':<13} "
            f"{seconds:>8.1f}  {looked_at}".rstrip()
        )
    return "\n".join(lines)


def _detector(faulty: Finding | None) -> str:
    if faulty is None:
        return ""
    if faulty.allowed_skip:
        return faulty.verdict.value
    return f"{'caught' if faulty.ok else 'NOT CAUGHT'}: {faulty.verdict.value}"

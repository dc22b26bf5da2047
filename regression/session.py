"""One run of the suite: the machine, its findings in the ledger, what is printed, the exit code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import gpus
from benchmarks.history import fingerprint
from benchmarks.history.fingerprint import Fingerprint
from nsa import backends
from regression import child, console, junit, ledger, runner
from regression import soak as soaking
from regression.incident import Incident
from regression.runner import Finding
from regression.verdict import Verdict

NOTHING_CHECKED = 2


@dataclass(frozen=True)
class Machine:
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


def find(device: str) -> Machine:
    """The machine for "cpu", "cuda" or "auto". ValueError where a GPU is asked for and there is none."""
    found = None if device == "cpu" else gpus.visible_gpu()
    if device == "cuda" and found is None:
        raise ValueError("--device cuda: PyTorch finds no GPU")
    here = gpus.recognise(found)
    num_gpus = torch.cuda.device_count() if here.device == "cuda" else 0
    return Machine(here.title, here.device, num_gpus, fingerprint.take(here.id, here.device), child.backends())


def replay(
    machine: Machine, incidents: Sequence[Incident], inject: str | None, jobs: int, out: Path, junitxml: Path | None
) -> int:
    """Run both halves of each incident. The exit code; the last line of stdout is JSON."""
    repros = runner.plan(incidents, machine.device, inject)
    if junitxml is not None:
        junit.must_be_writable(junitxml)
    path = ledger.create(out, machine.fingerprint)
    print(f"{machine.title}: {len(repros)} repros of {len(incidents)} incident(s) -> {_from_here(path)}", flush=True)
    begin, findings = time.perf_counter(), list[Finding]()
    try:
        for finding in runner.run(repros, gpus=machine.num_gpus, jobs=jobs):
            findings.append(finding)
            ledger.append(path, ledger.entry(finding, machine.fingerprint))
            elapsed_s = time.perf_counter() - begin
            print(console.progress(finding, len(findings), len(repros), elapsed_s), flush=True)
    except BaseException:
        print(f"interrupted; {len(findings)} of {len(repros)} repros are in {_from_here(path)}", file=sys.stderr)
        if junitxml is not None:
            done = [finding.repro for finding in findings]
            junit.write(junitxml, findings, [repro for repro in repros if repro not in done])
        raise
    print("\n" + console.table(findings))
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
        "skipped": {**{f.repro.incident.id: f.reason for f in findings if f.lawful_skip}, **machine.unproved},
        "injected": inject,
        "seconds": round(time.perf_counter() - begin, 1),
        "records": _from_here(path),
    }
    print(json.dumps(summary), flush=True)  # before the file, which may fail
    if junitxml is not None:
        junit.write(junitxml, findings)
    if never_entered:
        return NOTHING_CHECKED
    if red:
        return 1
    return NOTHING_CHECKED if all(finding.lawful_skip for finding in findings) else 0


def _from_here(path: Path) -> str:
    """As it is typed in this folder, where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def soak(machine: Machine, minutes: float, out: Path) -> int:
    """Train the profiles for this long. The exit code; the last line of stdout is JSON."""
    path = ledger.create(out, machine.fingerprint)
    shrunken = ", the models shrunken to what a CPU can train" if machine.device == "cpu" else ""
    print(
        f"{machine.title}: {len(soaking.LANES)} lanes in {minutes:g} minutes{shrunken} -> {_from_here(path)}",
        flush=True,
    )
    begin, done = time.perf_counter(), list[soaking.Soaked]()
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
    return 0 if all(one.verdict is Verdict.PASSED for one in done) else 1

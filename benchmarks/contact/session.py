"""First contact, step by step; one that was interrupted goes on where it stopped.

Each step is a command of its own, whose end is a line of steps.jsonl. A step is done where that line says so, its
records are there, and nothing that decides them has changed since: sources, device, driver, PyTorch and Triton name the
folder. The first red step ends the session, because what comes after it would prove nothing; the bundle is made of what
there is, and says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.contact import steps
from benchmarks.contact.bundle import STEPS
from benchmarks.contact.cause import Cause, Diagnosis, diagnose
from benchmarks.contact.preflight import PreflightFinding
from benchmarks.contact.steps import ContactStep
from harness import jsonl, stream
from harness.fingerprint import Fingerprint
from harness.interrupt import INTERRUPTED
from nsa.io import atomic_write

FOLDER = "first-contact"
PREFLIGHT = "preflight.json"
_LOG_END_BYTES = 2**16
"""Of a log, where the reason is looked for."""
_DECIDING = ("device", "driver", "torch", "triton", "nsa_sha256", "benchmarks_sha256")

Run = Callable[[Sequence[str], Path], int]
"""Runs python with these words, keeps what it prints in a file; its exit code."""


@dataclass(frozen=True)
class StepResult:
    """How a step ended."""

    name: str
    code: int
    """Exit code; negative for a signal."""
    seconds: float
    utc: str
    """When it ended."""
    diagnosis: Diagnosis | None = None
    """None of a step that is green, or was interrupted."""

    @property
    def green(self) -> bool:
        return self.code == 0


def folder_of(results: Path, identity: Fingerprint, *, smoke: bool) -> Path:
    """Where a first contact of this machine, with these sources, keeps everything."""
    words = "\0".join(str(getattr(identity, name)) for name in _DECIDING) + ("\0smoke" if smoke else "")
    return results / FOLDER / f"{identity.machine}-{hashlib.sha256(words.encode()).hexdigest()[:10]}"


def refusal(found: Sequence[PreflightFinding]) -> PreflightFinding | None:
    """The first finding for which nothing is measured."""
    return next((one for one in found if one.refused), None)


def keep_preflight(folder: Path, found: Sequence[PreflightFinding]) -> None:
    """Write what was looked at."""
    entries = [dataclasses.asdict(one) for one in found]
    atomic_write(folder / PREFLIGHT, json.dumps(entries, indent=1) + "\n")


def run(
    folder: Path, plan: Sequence[ContactStep], identity: Fingerprint, run_step: Run | None = None
) -> list[StepResult]:
    """Every step that is not done yet, to the first one that is red; how each of them ended, also earlier ones."""
    run_step = run_step or _run_step
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    known = done(folder)
    results: list[StepResult] = []
    for number, step in enumerate(plan, start=1):
        where = f"[{number}/{len(plan)}] {step.name}"
        before = known.get(step.name)
        if before is not None and before.green and step.recorded(folder):
            print(f"{where}: done at {before.utc}", flush=True)
            results.append(before)
            continue
        print(f"\n{where}", flush=True)
        log, begin = folder / "logs" / f"{step.name}.log", time.perf_counter()
        code = run_step(step.words, log)
        if step.name == "laws" and code != INTERRUPTED:
            code = _keep_laws(folder, identity, log) or code
        if code == 0 and not step.recorded(folder):
            code = 1
            with log.open("a") as file:
                file.write(f"\nthe step left no {step.records}\n")
        results.append(StepResult(step.name, code, round(time.perf_counter() - begin, 1), _utc(), _why(code, log)))
        jsonl.append(folder / STEPS, results[-1])
        if code:
            break
    return results


def done(folder: Path) -> dict[str, StepResult]:
    """The last end of each step; a line that is damaged counts as a step that was not run."""
    return {one.name: one for one in jsonl.read(folder / STEPS, StepResult)[0]}


def complete(plan: Sequence[ContactStep], results: Sequence[StepResult]) -> bool:
    """Whether every step is green."""
    return [step.name for step in plan] == [one.name for one in results if one.green]


def _run_step(words: Sequence[str], log: Path) -> int:
    return stream.run([sys.executable, *words], log)[0]


def _keep_laws(folder: Path, identity: Fingerprint, log: Path) -> int:
    """1 where pytest's report cannot be read; a step without one is found by `recorded`."""
    day, moment = identity.utc[:10].replace("-", ""), identity.utc[11:19].replace(":", "")
    name = f"{identity.machine}-{day}-{(identity.commit or '0' * 10)[:10]}-first-contact-{moment}"
    try:
        steps.keep_laws(folder, name)
    except ValueError as error:
        with log.open("a") as file:
            file.write(f"\n{error}\n")
        return 1
    return 0


def _why(code: int, log: Path) -> Diagnosis | None:
    if code in (0, INTERRUPTED):
        return None
    return diagnose(code, log.read_bytes()[-_LOG_END_BYTES:].decode(errors="replace"))


def _utc() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def of_preflight(found: PreflightFinding) -> Diagnosis:
    """A refusal in the words of a step that failed."""
    send = "nothing: nobody else can repair it" if found.cause in (Cause.MACHINE, Cause.DRIVER) else "the bundle"
    return Diagnosis(found.cause or Cause.OURS, f"{found.name}: {found.message}", found.do, send)

"""One run of what must see a mutant: pytest, then incidents, in a copy of the tree, ended after a limit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from xml.etree import ElementTree

import psutil

from harness.interrupt import CancelledError
from tests.mutants.standing import Suite
from tests.mutants.tree import Copy

_POLL_S = 0.05
_COPY = "MUTANT_COPY"
"""Environment variable of all that runs in a copy: what outlives its tests is found by it."""
_NOTHING_COLLECTED = 5
_PYTEST = ("pytest", "-x", "-q", "-n", "0", "-p", "no:benchmark", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")


@dataclass(frozen=True)
class SuiteRun:
    """How it ended."""

    red: str | None
    """The first test that failed, the incident that was red, or why neither was started; None where all passed."""
    timed_out: bool
    duration_s: float
    nothing_ran: bool = False
    """pytest collected no test."""


def run(copy: Copy, suite: Suite, limit_s: float, stop: Event) -> SuiteRun:
    """Run the tests, then the incidents, until one is red. Raises CancelledError once `stop` is set."""
    begin, collected = time.monotonic(), True
    for number, command in enumerate(_commands(copy, suite)):
        log = copy.scratch / f"log-{number}"
        left_s = limit_s - (time.monotonic() - begin)
        code = _ended(command, copy, log, left_s, stop)
        if code is None:
            return SuiteRun(None, True, time.monotonic() - begin)
        if code == _NOTHING_COLLECTED and command[2] == "pytest":
            collected = False
        elif code:
            red = _first_failure(copy, code, log) if command[2] == "pytest" else _red_incident(code, log)
            return SuiteRun(red, False, time.monotonic() - begin)
    return SuiteRun(None, False, time.monotonic() - begin, nothing_ran=not collected and not suite.incidents)


def _commands(copy: Copy, suite: Suite) -> Iterator[list[str]]:
    if suite.tests:
        yield [sys.executable, "-m", *_PYTEST, f"--junitxml={_junit(copy)}", *suite.tests]
    if suite.incidents:
        yield [sys.executable, "-m", "regression", "run", *suite.incidents, "--out", str(copy.scratch / "results")]


def _junit(copy: Copy) -> Path:
    return copy.scratch / "junit.xml"


def _ended(command: Sequence[str], copy: Copy, log: Path, limit_s: float, stop: Event) -> int | None:
    """The exit code; None after the limit. Nothing that it started is left."""
    shutil.rmtree(copy.scratch, ignore_errors=True)
    (copy.scratch / "tmp").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("NSA_RESULTS", "PYTEST_ADDOPTS")}
    environment |= {
        "PYTHONPATH": str(copy.tree),
        "PYTHONDONTWRITEBYTECODE": "1",  # a cache is told apart by size and second: a mutant may share both
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(copy.scratch / "tmp"),
        _COPY: str(copy.tree),
    }
    end = time.monotonic() + limit_s
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=copy.tree, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                if stop.is_set():
                    raise CancelledError
                if time.monotonic() > end:
                    return None
                time.sleep(_POLL_S)
            return process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _end_leftovers(copy)


def _end_leftovers(copy: Copy) -> None:
    """A mutant of what ends processes leaves some, in whatever session."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_COPY) == str(copy.tree):
                process.kill()


def _first_failure(copy: Copy, code: int, log: Path) -> str:
    """The node id of the first test that failed, from pytest's own JUnit file."""
    with contextlib.suppress(OSError, ElementTree.ParseError):
        for case in ElementTree.parse(_junit(copy)).iter("testcase"):
            if case.find("failure") is None and case.find("error") is None:
                continue
            module, *inner = _split(copy, (case.get("classname") or "").split("."))
            if not module:
                return f"collection of {case.get('name')}"
            return "::".join((module, *inner, case.get("name") or ""))
    return f"pytest ended with {_code(code)}: {_last_words(log)}"


def _split(copy: Copy, names: Sequence[str]) -> tuple[str, ...]:
    """(the test's file, its classes) of a dotted name: what JUnit calls its file may be where a helper is defined."""
    for count in range(len(names), 0, -1):
        file = "/".join(names[:count]) + ".py"
        if (copy.tree / file).is_file():
            return (file, *names[count:])
    return ("",)


def _red_incident(code: int, log: Path) -> str:
    with contextlib.suppress(ValueError, IndexError, KeyError, TypeError):
        if red := json.loads(log.read_text(errors="replace").splitlines()[-1])["red"]:
            return f"incident {red[0]}"
    return f"python -m regression ended with {_code(code)}: {_last_words(log)}"


def _code(code: int) -> str:
    return f"code {code}" if code >= 0 else signal.Signals(-code).name


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:120] for line in reversed(lines) if line.strip()), "no word")

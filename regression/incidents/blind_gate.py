"""blind-gate: a decode guard with baseline 0.0, and `pytest | tee` in CI, both always green.

What really happened: 0.0 stood for "not measured", which nothing is slower than; and a pipe has the exit code of its
last command, unless pipefail is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import __main__ as bench
from benchmarks import runner, worker
from benchmarks.ab import checkout, result, trial
from benchmarks.ab.checkout import Sources
from benchmarks.ab.result import Rules, Side
from benchmarks.ab.sequential import PairFailure
from benchmarks.ab.trial import PairedSamples
from benchmarks.cases.key import Key
from benchmarks.commands import run as bench_run
from benchmarks.history import run_file, speedup
from benchmarks.history.records import Record
from benchmarks.workloads import attention
from harness import forced
from harness.repository import ROOT
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="blind-gate",
    symptom="a decode guard with baseline 0.0; pytest | tee without pipefail",
    cause="gates that could not fire",
    detector="every gate: exit code 0 as it is, 1 on an injected fault, also through a pipe; unknown is None",
    expects=ReproVerdict.WRONG,
    fires=("wrong",),
)

RED = 1
"""Exit code of a gate that found the fault; any other says that the gate itself broke."""


class GateResult(NamedTuple):
    """How a gate ended."""

    code: int
    out: str
    """What it printed."""


Gate = Callable[[bool], GateResult]
"""Run it with or without a fault."""
_TEE = re.compile(r"\|&?\s*tee\b")
_PIPEFAIL = re.compile(r"^\s*(?:[^#\n]*[;&\s])?(?:set|shell:\s*bash)\s+-[^#\n]*\bpipefail\b", re.MULTILINE)
"""A command, not a comment, also behind another (`set -o pipefail; pytest | tee log`), or a workflow's shell."""
_CASE = "prefill-forward/*/s512/float32/nsa"
_REPLAYED = "toy-config-run"  # the incident that takes least


def product(step: Step) -> Evidence:
    """Try the gates of the benches, this suite's own through a pipe, unknown baselines, and the scripts of CI.

    On the CPU whatever the device, so that nothing is forced there: a gate has no architecture.
    """
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        forced.leave()
        wrong = _blind("benchmarks run", lambda broken: _bench(broken, Path(folder)), step)
        wrong += _zero_for_unknown(*run_file.read_all(Path(folder))[0])
        wrong += _blind("benchmarks compare", lambda broken: _compare(broken, Path(folder)), step)
        named = f'"red": ["{_REPLAYED}"]'
        wrong += _blind("regression run | tee", lambda broken: _replay(broken, Path(folder)), step, named)
    return Evidence(wrong=(*wrong, *_pipes_without_pipefail()))


def _blind(name: str, gate: Gate, step: Step, named: str = "") -> list[str]:
    """What is wrong with a gate: red as it is, not red on a fault, or red without the words that name the fault."""
    healthy = gate(False)
    step(1)
    broken = gate(True)
    step(2)
    wrong = [f"{name}: exit code {healthy.code} with nothing injected"] if healthy.code else []
    if broken.code != RED:
        wrong.append(f"{name}: exit code {broken.code} on an injected fault")
    elif named not in broken.out:
        wrong.append(f"{name}: red without {named} in its output")
    return wrong


def _bench(broken: bool, folder: Path) -> GateResult:
    """The benches on their smallest case, in this process; the fault is an attention that raises."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(bench_run, "build_page", lambda results: results))  # judges nothing
        stack.enter_context(mock.patch.object(worker, "run", runner.run))  # in this process, where the fault is
        if broken:
            stack.enter_context(mock.patch.object(attention, "nsa_attention", fail))
        return _in_this_process(["run", "--quick", "--gpu", "cpu", "--cases", _CASE, "--out", str(folder)])


def _compare(broken: bool, folder: Path) -> GateResult:
    """Two commits on decode; the fault is a HEAD that takes a tenth longer, in figures that need no clock."""

    def played(_starter: object, keys: Sequence[Key], rules: Rules, *_: object, **__: object) -> list[PairedSamples]:
        head_ms = 1.1 if broken else 1.0
        return [PairedSamples((1.0,) * rules.min_samples, ((head_ms,),) * rules.min_samples) for _ in keys]

    side = Sources(Side("main", None, None, "0" * 64), folder, folder)
    with contextlib.ExitStack() as stack:
        both = contextlib.nullcontext((side, side))
        stack.enter_context(mock.patch.object(checkout, "sources", return_value=both))
        stack.enter_context(mock.patch.object(trial, "run", played))
        return _in_this_process(["compare", "main", "--gpu", "cpu", "--cases", "decode", "--out", str(folder)])


def _in_this_process(arguments: list[str]) -> GateResult:
    """The benches' command line."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return GateResult(bench.main(arguments), out.getvalue())


def _replay(broken: bool, folder: Path) -> GateResult:
    """This suite on one incident, behind a pipe; the fault is the incident's own."""
    inject = ["--inject", _REPLAYED] if broken else []
    command = [sys.executable, "-m", "regression", "run", _REPLAYED, "--device", "cpu", "--out", str(folder), *inject]
    return _piped(command, pipefail=True)


def _piped(command: list[str], *, pipefail: bool) -> GateResult:
    """How `command | tee /dev/null` ends."""
    script = '"$@" | tee /dev/null'
    shell = ["bash", "-c", f"set -o pipefail; {script}" if pipefail else script, "bash"]
    done = subprocess.run([*shell, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return GateResult(done.returncode, done.stdout)


def _zero_for_unknown(healthy: Record, failed: Record) -> list[str]:
    """A figure that was not measured must be None, and compare with nothing."""
    wrong = []
    if failed.latency_ms is not None or speedup.speed_up(healthy, failed) is not None:
        wrong.append(f"a baseline that failed has latency {failed.latency_ms} and is compared with")
    if (
        answer := PairFailure(failed.outcome, healthy.outcome, "no baseline").verdict
    ) is not result.CompareVerdict.UNDECIDED:
        wrong.append(f"compare answers {answer.value} where BASE has no figure")
    with contextlib.suppress(ValueError):
        dataclasses.replace(healthy, latency_ms=0.0)
        wrong.append("a record with a latency of 0.0 is accepted")
    return wrong


def _pipes_without_pipefail() -> list[str]:
    """Scripts and workflows of this repository that would lose an exit code."""
    folders = (ROOT / name for name in (".ci", ".github", "docker"))
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    texts = {path: path.read_text() for path in files}
    return [f"{path.name} pipes into tee without pipefail" for path, text in texts.items() if _loses_exit_code(text)]


def _loses_exit_code(script: str) -> bool:
    return _TEE.search(script) is not None and _PIPEFAIL.search(script) is None


def nothing_is_a_fault(_: Any) -> list[Record]:
    """A list of faults that stays empty."""
    return []


@contextmanager
def inject() -> Iterator[None]:
    with injected(Fault(speedup, "faults", nothing_is_a_fault)):
        yield


def decode_guard(measured_ms: float, baseline_ms: float = 0.0) -> int:
    """Red where decode is 10 % slower than a baseline that was never measured."""
    return int(baseline_ms > 0 and measured_ms > 1.1 * baseline_ms)


def faulty(step: Step) -> Evidence:
    """The guard, and a pipe without pipefail: each must be seen."""
    guard = _blind("decode guard", lambda broken: GateResult(decode_guard(1000.0 if broken else 1.0), ""), step)
    pipe = _blind(
        "tests | tee", lambda broken: _piped([sys.executable, "-c", f"exit({broken:d})"], pipefail=False), step
    )
    seen = guard and pipe and _loses_exit_code("#!/bin/bash\npytest | tee log\n")
    return Evidence(wrong=(*guard, *pipe) if seen else ())

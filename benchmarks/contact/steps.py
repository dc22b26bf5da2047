"""The steps of first contact, in order: laws in small, some incidents, the quick suite, a quick calibration.

What is cheapest and would make the rest worthless comes first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ab import calibration
from benchmarks.cases.key import NSA, PART
from benchmarks.history import conversion
from benchmarks.workloads import suite
from harness.machines import Machine
from nsa.io import atomic_write

JUNIT = "laws.xml"
LAWS = ("tests/laws", "tests/nsa/triton_backend/test_dispatch.py", "tests/nsa/test_decode_gpu.py")
LEAST_LAWS = ("tests/laws/test_empty_rows.py",)
INCIDENTS = (
    "dup-blocks", "nan-empty-row", "dropped-current-block", "inverted-mask", "window-leak", "future-normaliser",
    "prefill-decode-split", "workspace-inplace", "int32-scatter", "tie-break", "unwritten-gradients", "heads-overread",
)  # fmt: skip
"""Of attention, which is what a new machine can get wrong; none trains for long or measures a time."""
LEAST_INCIDENTS = ("tie-break",)


@dataclass(frozen=True)
class ContactStep:
    """One command, `python` and these words."""

    name: str
    words: tuple[str, ...]
    records: str
    """Where it leaves its records, as a pattern in the folder of results."""

    def recorded(self, results: Path) -> bool:
        """Whether they are there."""
        return next(results.glob(self.records), None) is not None


def plan(machine: Machine, results: Path, *, smoke: bool) -> list[ContactStep]:
    """The steps for this machine, whose records go to `results`.

    `smoke`: the least of each, to see that the session works; without the calibration, of which there is no little.
    """
    on_gpu = machine.device == "cuda"
    laws = LEAST_LAWS if smoke else LAWS
    pytest = ("-p", "no:benchmark", "-p", "no:cacheprovider", "--quick", "-q")
    incidents = LEAST_INCIDENTS if smoke else INCIDENTS
    steps = [
        ContactStep(
            "laws",
            ("-m", "pytest", *pytest, *(() if smoke else ("-n", "auto")), *laws, "--junitxml", str(results / JUNIT)),
            "laws/*.json",
        ),
        ContactStep(
            "incidents",
            ("-m", "regression", "run", *incidents, "--device", machine.device, "--out", str(results)),
            f"regression/{machine.id}/*.jsonl",
        ),
        ContactStep(
            "bench",
            ("-m", "benchmarks", "run", "--quick", "--gpu", machine.id, "--anchors", "none", "--out", str(results))
            + (("--cases", _shortest(machine, on_gpu=on_gpu)) if smoke else ()),
            f"runs/{machine.id}/*.jsonl",
        ),
    ]
    if not smoke:
        words = ("-m", "benchmarks", "calibrate", "--quick", "--gpu", machine.id, "--out", str(results))
        steps.append(ContactStep("calibrate", words, f"calibration/{calibration.path(results, machine.id).name}"))
    return steps


def _shortest(machine: Machine, *, on_gpu: bool) -> str:
    """The name of NSA's case with the fewest tokens of the quick suite."""
    keys = suite.planned(suite.table(machine.suite), quick=True, backend="auto", on_gpu=on_gpu)
    of_nsa = [key for key in keys if key.implementation == NSA and key.mode.startswith(PART)]
    return min(of_nsa, key=lambda key: (key.batch * key.num_keys, key.name)).name


def keep_laws(results: Path, name: str) -> Path | None:
    """Replace pytest's report by its summary, laws/NAME.json; None where the step has left no report.

    ValueError where the report is no JUnit XML.
    """
    report = results / JUNIT
    if not report.exists():
        return None
    target = results / "laws" / f"{name}.json"
    atomic_write(target, json.dumps(conversion.summarize_junit(report), indent=1) + "\n")
    report.unlink()
    return target

"""The whole chain on one machine, as CI runs it: image, preflight, tests, regress, bench, compare, report, comment.

    python -m containers pipeline --base main      the full suites, then: is the working tree slower than main?
    python -m containers pipeline --quick          minutes in place of hours

Each step is a nox session. The first red one ends the chain, but pages and summary are made of what there is.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from containers import engine
from harness import repository, stream
from harness.interrupt import INTERRUPTED

SUMMARY = "summary.md"
COMPARISON = "comparison.md"
"""What `compare` answered, as Markdown; the summary holds it."""
LAST_MEASURED = "last-measured"
"""As a base: the newest commit before this one that the machine has measured."""
QUICK_TESTS = (
    "tests/containers/test_entry.py",
    "tests/benchmarks/history/test_merge.py",
    "tests/nsa/test_compile.py::test_reduce_overhead_replays_one_graph_with_the_numbers_of_an_eager_call",
    "tests/nsa/train/test_distributed.py",
    "tests/nsa/train/test_run.py",
    "tests/nsa/warm/test_precompile.py",
    "tests/nsa/warm/test_warm.py::test_a_later_process_compiles_nothing",
)
"""Those that depend on where they run (git, compilers, processes, network, disk): they show that the image works.
Outside it all tests run."""
QUICK_INCIDENTS = ("loader-stall", "grad-none-ddp", "resume-drift", "toy-config-run", "nan-empty-row", "tie-break")
"""Those that depend on the machine, and two of attention. The rest run outside the image."""
QUICK_COMPARE = ("--quick", "--cases", "part-window", "--pairs", "12")
ALWAYS = ("report", "comment")
"""Steps that run after a red one too: what they make is what a person reads."""


@dataclass(frozen=True)
class PipelineStep:
    """One nox session of the chain."""

    name: str
    session: str
    words: tuple[str, ...]
    skipped: str | None = None
    """Why it does not run; None where it does."""


@dataclass(frozen=True)
class PipelineStepResult:
    """How a step ended."""

    step: PipelineStep
    code: int | None
    """Exit code; None where it did not run."""
    seconds: float
    told: dict[str, Any]
    """The JSON that the suite's last line is; empty without one."""


def plan(
    chosen: engine.Choice,
    family: str | None,
    base: str | None,
    *,
    quick: bool,
    logs: Path,
    registry: str | None = None,
    budget: str | None = None,
    cases: str | None = None,
) -> list[PipelineStep]:
    """The chain for this machine. Pure but for the clock, and for asking git whether nsa/ differs from the base."""
    which = (
        "--engine",
        chosen.engine.name if chosen.engine else engine.NONE,
        *(("--family", family) if family else ()),
    )
    bare = None if chosen.engine else "no container engine: the suites run in the host's environment"
    unchanged = _why_no_compare(base)
    limited = (*(("--budget", budget) if budget else ()), *(("--cases", cases) if cases else ()))
    begin = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    comment = ("--since", begin, "--file", str(logs / COMPARISON))
    return [
        PipelineStep("image", "image", (*which, *(("--registry", registry) if registry else ())), bare),
        PipelineStep("preflight", "preflight-machine", which, bare),
        PipelineStep("tests", "tests", (*which, *(QUICK_TESTS if quick else ()))),
        PipelineStep(
            "regress", "regress", (*which, *(QUICK_INCIDENTS if quick else ()), "--junitxml", str(logs / "regress.xml"))
        ),
        PipelineStep(
            "bench", f"bench-{family}" if family else "bench", (*which, *(("--quick",) if quick else ()), *limited)
        ),
        PipelineStep(
            "compare", "compare", (*which, base or "", *(QUICK_COMPARE if quick else ()), *limited), unchanged
        ),
        PipelineStep("report", "report", which),
        PipelineStep("comment", "comment", (*which, *comment), unchanged),
    ]


def last_measured(machine: str, results: Path) -> str:
    """The newest commit before HEAD that these results have a run of on this machine, else HEAD^1.

    What came after it was measured by no run, since a runner was down or a step was red before the bench.
    """
    measured = {path.stem.split("-")[1] for path in (results / "runs" / machine).glob("*Z-*.jsonl")}
    commits = (repository.git("rev-list", "--first-parent", "--skip=1", "HEAD") or "").split()
    return next((commit for commit in commits if commit[:10] in measured), "HEAD^1")


def _why_no_compare(base: str | None) -> str | None:
    if base is None:
        return "no --base was given"
    git = ["git", "-C", str(repository.ROOT)]
    known = subprocess.run(
        [*git, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}"], capture_output=True, text=True
    )
    if known.returncode:
        raise ValueError(f"--base must name a commit of {repository.ROOT}; git says: {known.stderr.strip()}")
    same = subprocess.run([*git, "diff", "--quiet", known.stdout.strip(), "--", "nsa"])
    return f"nsa/ is what it is in {base}" if same.returncode == 0 else None


def run(steps: Sequence[PipelineStep], logs: Path) -> list[PipelineStepResult]:
    """Every step to the first red one, then `ALWAYS`; what each printed is kept in logs/<step>.log."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / COMPARISON).unlink(missing_ok=True)  # of an earlier chain
    done: list[PipelineStepResult] = []
    for step in steps:
        red = next((before for before in done if before.code), None)
        if step.skipped is not None or (red is not None and step.name not in ALWAYS):
            done.append(PipelineStepResult(step, None, 0.0, {}))
            continue
        print(f"\n== {step.name}", flush=True)
        begin = time.perf_counter()
        code, last = _stream(step, logs / f"{step.name}.log")
        done.append(PipelineStepResult(step, code, time.perf_counter() - begin, stream.as_json(last)))
        if code == INTERRUPTED:
            return done
    return done


def _stream(step: PipelineStep, log: Path) -> tuple[int, str]:
    """Run a session, show and keep what it prints; its exit code, and the last line that is JSON."""
    return stream.run([sys.executable, "-m", "nox", "--session", step.session, "--", *step.words], log)


def summary(done: Sequence[PipelineStepResult], comparison: str = "") -> str:
    """Markdown, what a reviewer must know first: verdicts, `comparison` (Markdown too), then steps."""
    red = [one.step.name for one in done if one.code]
    head = f"## RED: {', '.join(red)}" if red else "## GREEN"
    rows = ["| step | result | time |", "|---|---|---|", *map(_row, done)]
    return "\n\n".join([head, *_verdicts(done), *filter(None, [comparison.strip()]), "\n".join(rows)]) + "\n"


def _row(one: PipelineStepResult) -> str:
    if one.code is None:
        return f"| {one.step.name} | not run: {one.step.skipped or 'a step before it is red'} | |"
    return f"| {one.step.name} | {'green' if one.code == 0 else f'RED, exit code {one.code}'} | {one.seconds:.0f} s |"


def _verdicts(done: Sequence[PipelineStepResult]) -> Iterator[str]:
    """What each suite's own summary says, the comparison first."""
    wanted = (
        ("compare", ("bad", "undecided", "verdicts")),
        ("regress", ("red",)),
        ("bench", ("faults", "red_baselines", "not_trustworthy", "outcomes", "unmeasured")),
    )
    told = {one.step.name: one.told for one in done}
    for name, keys in wanted:
        for key in keys:
            if value := told.get(name, {}).get(key):
                yield f"**{name}, {key}**: {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    if isinstance(value, list):
        return ", ".join(f"`{item}`" for item in value)
    return str(value)

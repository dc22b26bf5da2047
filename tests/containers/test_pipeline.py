"""The chain: in order, to the first red step, with a summary that a reviewer can trust."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks.ab.result import Rules
from containers import pipeline
from containers.engine import Choice, Engine
from containers.pipeline import PipelineStep, PipelineStepResult
from harness import repository

DOCKER = Choice(Engine("docker", "26.1"), "engine: docker 26.1")
BARE = Choice(None, "engine: none")


def test_the_chain_of_an_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_why_no_compare", lambda _: None)
    steps = pipeline.plan(DOCKER, "a100", "main", quick=False, logs=Path("logs"))
    assert [step.session for step in steps] == [
        "image", "preflight-machine", "tests", "regress", "bench-a100", "compare", "report",
    ]  # fmt: skip
    assert all(step.skipped is None for step in steps)
    assert steps[5].words[-1] == "main"
    assert all(step.words[:4] == ("--engine", "docker", "--family", "a100") for step in steps)


def test_the_quick_comparison_is_one_that_compare_takes() -> None:
    arguments = bench.parser().parse_args(["compare", "HEAD", *pipeline.QUICK_COMPARE])
    assert Rules().up_to(arguments.pairs)  # raises ValueError for too few
    assert (arguments.cases, arguments.quick) == (["part-window"], True)


def test_without_an_engine_no_image_is_built() -> None:
    steps = pipeline.plan(BARE, None, None, quick=True, logs=Path("logs"))
    assert [step.name for step in steps if step.skipped] == ["image", "preflight", "compare"]
    assert all("none" in step.words for step in steps)


def test_a_base_with_the_same_nsa_is_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "nsa").mkdir()
    (tmp_path / "nsa" / "a.py").write_text("x = 1\n")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "one")):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    assert pipeline._why_no_compare("HEAD") == "nsa/ is what it is in HEAD"
    (tmp_path / "nsa" / "a.py").write_text("x = 2\n")
    assert pipeline._why_no_compare("HEAD") is None
    for base in ("no-such-commit", "--output=stolen"):
        with pytest.raises(ValueError, match=r"--base must name a commit .*git says: fatal:"):
            pipeline._why_no_compare(base)


def chain(monkeypatch: pytest.MonkeyPatch, logs: Path, codes: dict[str, int]) -> list[PipelineStepResult]:
    told = '{"bad": ["prefill/x"], "undecided": [], "verdicts": {"SLOWER": 1, "SAME": 4}}\n'
    monkeypatch.setattr(
        pipeline, "_stream", lambda step, log: (codes.get(step.name, 0), told if step.name == "compare" else "{torn")
    )
    steps = [PipelineStep(name, name, ()) for name in ("tests", "bench", "compare")]
    return pipeline.run([*steps, PipelineStep("report", "report", ())], logs)


def test_the_first_red_step_ends_it_but_the_report_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = chain(monkeypatch, tmp_path, {"bench": 2})
    assert [one.code for one in done] == [0, 2, None, 0]
    text = pipeline.summary(done)
    assert text.startswith("## RED: bench\n")
    assert "| compare | not run: a step before it is red | |" in text


def test_the_summary_begins_with_the_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = pipeline.summary(chain(monkeypatch, tmp_path, {"compare": 1}))
    assert text.startswith(
        "## RED: compare\n\n**compare, bad**: `prefill/x`\n\n**compare, verdicts**: 1 SLOWER, 4 SAME"
    )
    assert pipeline.summary(chain(monkeypatch, tmp_path, {})).startswith("## GREEN\n")


def test_an_interrupt_ends_the_session_first(tmp_path: Path) -> None:
    """The session's own ending is read to its last line, and the chain stops there."""
    session = tmp_path / "nox.sh"
    session.write_text(
        "#!/bin/bash\ntrap 'sleep 0.3; echo ended; exit 1' INT\necho began\nfor _ in {1..200}; do sleep 0.05; done\n"
    )
    session.chmod(0o755)
    program = (
        "import sys, pathlib; from containers import pipeline;"
        "pipeline.sys = type('S', (), {'executable': sys.argv[1]});"
        "steps = [pipeline.PipelineStep(name, name, ()) for name in ('tests', 'bench')];"
        "print([one.code for one in pipeline.run(steps, pathlib.Path(sys.argv[2]))])"
    )
    command = [sys.executable, "-c", program, str(session), str(tmp_path / "logs")]
    process = subprocess.Popen(command, cwd=repository.ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)][-1] == "began\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == "ended\n[130]\n"


def test_the_logs_hold_what_a_session_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pipeline.sys, "executable", "/bin/echo")
    (done,) = pipeline.run([PipelineStep("tests", "tests", ("-k", "x"))], tmp_path)
    assert done.code == 0
    assert (tmp_path / "tests.log").read_text() == "-m nox --session tests -- -k x\n"

"""The chain: in order, to the first red step, with a summary that a reviewer can trust."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import datetime, timezone
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
        "image", "preflight-machine", "tests", "regress", "bench-a100", "compare", "report", "comment",
    ]  # fmt: skip
    assert all(step.skipped is None for step in steps)
    assert steps[5].words[-1] == "main"
    assert all(step.words[:4] == ("--engine", "docker", "--family", "a100") for step in steps)


def test_packages_are_pulled_once_for_the_whole_chain() -> None:
    """Later steps find the image by its name, which does not depend on where its packages came from."""
    image, *later = pipeline.plan(DOCKER, "a100", None, quick=False, logs=Path("logs"), registry="ghcr.io/a/b")
    assert image.words[-2:] == ("--registry", "ghcr.io/a/b")
    assert not [step for step in later if "--registry" in step.words]


def test_the_comment_is_of_this_chains_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_why_no_compare", lambda _: None)
    words = pipeline.plan(DOCKER, "a100", "main", quick=False, logs=Path("logs"))[-1].words
    arguments = bench.parser().parse_args(["comment", *words[4:]])
    assert arguments.file == Path("logs") / pipeline.COMPARISON
    assert "2026" < arguments.since < datetime.now(timezone.utc).isoformat()


def test_the_quick_comparison_is_one_that_compare_takes() -> None:
    arguments = bench.parser().parse_args(["compare", "HEAD", *pipeline.QUICK_COMPARE])
    assert Rules().up_to(arguments.pairs)  # raises ValueError for too few
    assert (arguments.cases, arguments.quick) == (["part-window"], True)


def test_a_budget_is_that_of_bench_and_of_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_why_no_compare", lambda _: None)
    steps = pipeline.plan(DOCKER, "a100", "main", quick=False, logs=Path("logs"), budget="20m")
    limited = {step.name: step.words[-2:] for step in steps if "--budget" in step.words}
    assert limited == {"bench": ("--budget", "20m"), "compare": ("--budget", "20m")}


def test_cases_are_those_of_bench_and_of_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_why_no_compare", lambda _: None)
    steps = pipeline.plan(DOCKER, None, "main", quick=True, logs=Path("logs"), cases="decode,part-window")
    named = {step.name: step.words[2:] for step in steps if "decode,part-window" in step.words}
    assert list(named) == ["bench", "compare"]
    for command, words in named.items():
        arguments = bench.parser().parse_args(["run" if command == "bench" else command, *words])
        assert arguments.cases == ["decode", "part-window"], "also where the quick comparison has its own"


def test_without_an_engine_no_image_is_built() -> None:
    steps = pipeline.plan(BARE, None, None, quick=True, logs=Path("logs"))
    assert [step.name for step in steps if step.skipped] == ["image", "preflight", "compare", "comment"]
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


def test_the_last_measured_commit_is_the_newest_before_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of four commits the first two and the last were measured, the last one by this run itself."""
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "--quiet"], check=True)
    commits = []
    for _ in range(4):
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "one"], check=True)
        asked = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        commits.append(asked.stdout.strip())
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    assert pipeline.last_measured("a100", tmp_path / "results") == "HEAD^1"  # before any run
    runs = tmp_path / "results" / "runs" / "a100"
    runs.mkdir(parents=True)
    names = [f"{commits[0][:10]}", f"{commits[1][:10]}-2", f"{commits[3][:10]}", "nocommit"]
    for day, name in enumerate(names, 1):
        (runs / f"2026010{day}T000000Z-{name}.jsonl").touch()
    assert pipeline.last_measured("a100", tmp_path / "results") == commits[1]
    assert pipeline.last_measured("h100", tmp_path / "results") == "HEAD^1"


def chain(monkeypatch: pytest.MonkeyPatch, logs: Path, codes: dict[str, int]) -> list[PipelineStepResult]:
    told = '{"bad": ["prefill/x"], "undecided": [], "verdicts": {"SLOWER": 1, "SAME": 4}}\n'
    monkeypatch.setattr(
        pipeline, "_stream", lambda step, log: (codes.get(step.name, 0), told if step.name == "compare" else "{torn")
    )
    steps = [PipelineStep(name, name, ()) for name in ("tests", "bench", "compare")]
    return pipeline.run([*steps, *(PipelineStep(name, name, ()) for name in pipeline.ALWAYS)], logs)


def test_the_first_red_step_ends_it_but_the_report_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = chain(monkeypatch, tmp_path, {"bench": 2})
    assert [one.code for one in done] == [0, 2, None, 0, 0]
    text = pipeline.summary(done)
    assert text.startswith("## RED: bench\n")
    assert "| compare | not run: a step before it is red | |" in text


def test_the_summary_begins_with_the_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = pipeline.summary(chain(monkeypatch, tmp_path, {"compare": 1}))
    assert text.startswith(
        "## RED: compare\n\n**compare, bad**: `prefill/x`\n\n**compare, verdicts**: 1 SLOWER, 4 SAME"
    )
    assert pipeline.summary(chain(monkeypatch, tmp_path, {})).startswith("## GREEN\n")


def test_the_summary_holds_the_comparison_of_this_chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / pipeline.COMPARISON).write_text("### of an earlier chain\n")
    done = chain(monkeypatch, tmp_path, {"compare": 1})
    assert not (tmp_path / pipeline.COMPARISON).exists()
    assert "1 SLOWER, 4 SAME\n\n### a100: 1 SLOWER\n\n| step |" in pipeline.summary(done, "### a100: 1 SLOWER\n")


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

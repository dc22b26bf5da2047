"""Every way in which a mutant can end has its outcome; the exit code, the records and a rerun follow from them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.history import mutants
from benchmarks.history.mutants import MutantOutcome, MutantResult
from harness.interrupt import INTERRUPTED
from harness.repository import ROOT
from tests.harness.processes import alive, until
from tests.mutants import standing, suites, tree, trials
from tests.mutants.__main__ import main
from tests.mutants.standing import Mutant, Planned, Suite

PRODUCT = """\
def add(a, b):
    return a + b


def unseen():
    return 1


def more(n):
    while n < 3:
        n += 1
    return n
"""
TESTS = """\
import os
import pathlib
import subprocess
import sys
import product


class TestSums:
    def test_add(self):
        assert product.add(2, 2) == 4


def test_more():
    assert product.more(0) == 3


def test_red():
    assert product.add(1, 1) == 3


def test_leaves_a_process():
    if product.unseen() != 1:
        code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
        while not pathlib.Path("pid").exists() or not pathlib.Path("pid").read_text():
            pass
        assert not os.environ["LEFT"] or pathlib.Path(os.environ["LEFT"]).write_text(pathlib.Path("pid").read_text())
        raise AssertionError
"""
FILE = "tests/test_product.py"
SUMS, RED = Suite((f"{FILE}::TestSums", f"{FILE}::test_more"), ()), Suite((f"{FILE}::test_red",), ())
LEAVES = Suite((f"{FILE}::test_leaves_a_process",), ())


@pytest.fixture(scope="module", autouse=True)
def no_plugins() -> Iterator[None]:
    """These small projects need none of the installed plugins but one; importing Hypothesis takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("PYTEST_PLUGINS", "xdist.plugin")
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / standing.FOLDER).mkdir(parents=True)
    (folder / "product.py").write_text(PRODUCT)
    (folder / FILE).write_text(TESTS)
    return folder


def planned(name: str, old: str, new: str, suite: Suite = SUMS, equivalent: str | None = None) -> Planned:
    return Planned(Mutant(name, "product.py", old, new, "w", equivalent=equivalent), "sums", suite, False)


@pytest.fixture(scope="module")
def found(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, MutantResult]]:
    """One run over mutants that end in every way."""
    left = tmp_path_factory.mktemp("left") / "pid"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "LEAST_LIMIT_S", 5.0)  # only one hangs; the others end within it on a busy machine too
        patch.setattr(trials, "SLOWER", 3)
        patch.setattr(trials, "PLAINLY_SLOWER", 1e-3)  # how long the healthy tests take is no matter here
        patch.setenv("LEFT", str(left))
        every_end = [
            planned("killed", "a + b", "a - b"),
            planned("survives", "return 1", "return 2"),
            planned("does-not-apply", "return 9", "return 2"),
            planned("hangs", "n += 1", "n += 0"),
            planned("cannot-be-imported", "def add", "import no_such_module\n\n\ndef add"),
            planned("tests-are-red-without-it", "return 1", "return 2", RED),
            planned("is-equivalent", "return 1", "return 3", equivalent="nobody calls it"),
            planned("leaves-a-process", "return 1", "return 2", LEAVES),
        ]
        lines = {line.id: line for line in trials.run(project, tree.sources(project), every_end, jobs=2)}
    yield lines
    until(lambda: not alive([int(left.read_text())]))


@pytest.mark.parametrize(
    ("name", "outcome", "said"),
    [
        ("killed", MutantOutcome.KILLED, f"{FILE}::TestSums::test_add"),
        ("survives", MutantOutcome.SURVIVED, "None"),
        ("does-not-apply", MutantOutcome.ERROR, "it stands there 0 times"),
        ("hangs", MutantOutcome.TIMEOUT, "; without it "),
        ("cannot-be-imported", MutantOutcome.KILLED, "collection of tests.test_product"),
        ("tests-are-red-without-it", MutantOutcome.ERROR, f"without the mutant: {FILE}::test_red"),
        ("is-equivalent", MutantOutcome.EQUIVALENT, "nobody calls it"),
        ("leaves-a-process", MutantOutcome.KILLED, f"{FILE}::test_leaves_a_process"),
    ],
)
def test_every_end_has_its_outcome(
    found: dict[str, MutantResult], name: str, outcome: MutantOutcome, said: str
) -> None:
    assert found[name].outcome is outcome
    assert said in str(found[name].killed_by)


def test_a_timeout_on_a_slow_machine_is_no_kill(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it the tests do not end soon without the mutant either."""
    monkeypatch.setattr(trials, "LEAST_LIMIT_S", 0.0)
    monkeypatch.setattr(trials, "SLOWER", 1.5)
    monkeypatch.setattr(trials, "PLAINLY_SLOWER", 1e9)
    (line,) = trials.run(project, tree.sources(project), [planned("hangs", "n += 1", "n += 0")], jobs=1)
    assert line.outcome is MutantOutcome.ERROR
    assert "but then without it: no end" in str(line.killed_by)


def test_an_equivalent_that_is_seen_is_an_error(project: Path) -> None:
    (line,) = trials.run(project, tree.sources(project), [planned("x", "a + b", "a - b", equivalent="so said")], jobs=1)
    assert line.outcome is MutantOutcome.ERROR
    assert "called equivalent, and was seen" in str(line.killed_by)


def test_the_working_tree_is_left_alone(project: Path, found: dict[str, MutantResult]) -> None:
    assert found
    assert (project / "product.py").read_text() == PRODUCT
    assert tree.sources(project) == ["product.py", FILE]


def area(*mutants: Planned) -> str:
    return f'tests = ["{FILE}::TestSums"]\n' + "".join(
        f'\n[[mutant]]\nid = "{one.mutant.id}"\nfile = "product.py"\nold = "{one.mutant.old}"\n'
        f'new = "{one.mutant.new}"\nwhy = "w"\n'
        for one in mutants
    )


KILLED = planned("killed", "a + b", "a - b")
SURVIVES = planned("survives", "return 1", "return 2")


def run(project: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    code = main(["--root", str(project), "run", "--jobs", "1", *arguments])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


def test_exit_code_and_records_and_a_rerun(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is seen: red. A rerun over the same files tries what is left, and none of it twice."""
    file = project / standing.FOLDER / "sums.toml"
    file.write_text(area(KILLED, SURVIVES))
    try:
        code, summary, _ = run(project, capsys, "--only", "killed", "--out", str(tmp_path))
        assert (code, summary["seen"], summary["red"]) == (0, {"sums": 1.0}, [])
        code, again, out = run(project, capsys, "--resume", "--out", str(tmp_path))
        assert (code, again["seen"], again["red"]) == (1, {"sums": 0.5}, ["sums"])
        assert "1 mutants of 1 areas, 1 done before" in out
        assert "SURVIVED: sums: survives: every test passed" in out
        assert again["records"] == summary["records"]
        assert main(["judge", "--out", str(tmp_path)]) == 1
        code, part, _ = run(project, capsys, "--resume", "--out", str(tmp_path), "--shard", "2/2")
        assert (code, part["seen"], part["red"]) == (0, {"sums": 0.0}, []), "a part of an area is not judged"
        records = Path(str(again["records"]))
        mutants.append(records, MutantResult("killed", "sums", MutantOutcome.ERROR, 1.0, "its tests failed without it"))
        assert main(["judge", "--out", str(tmp_path)]) == 1
        _, _, out = run(project, capsys, "--resume", "--out", str(tmp_path))
        assert "1 mutants of 1 areas, 1 done before" in out, "what ended in ERROR is tried again"
        begin, lines = mutants.read(records)
        assert begin.planned == {"sums": 2}
        assert {line.id: line.outcome for line in lines} == {
            "killed": MutantOutcome.KILLED,
            "survives": MutantOutcome.SURVIVED,
        }
        monkeypatch.setattr(trials, "run", lambda *_: iter(()))
        (project / "product.py").write_text(PRODUCT + "\n")
        _, changed, _ = run(project, capsys, "--resume", "--out", str(tmp_path))
        assert changed["records"] != again["records"], "of other files"
    finally:
        file.unlink()
        (project / "product.py").write_text(PRODUCT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--area", "nothing"], "no area is called 'nothing'"),
        (["--only", "nothing"], "no mutant is called 'nothing'"),
        (["--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_wrong_arguments(project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["--root", str(project), "run", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_damaged_set_is_not_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project / standing.FOLDER / "sums.toml"
    file.write_text(area(planned("gone", "return 9", "return 2")))
    try:
        assert main(["--root", str(project), "run"]) == 2
    finally:
        file.unlink()
    assert "gone: its old text must stand exactly once" in capsys.readouterr().err


def test_an_interrupt_keeps_what_is_finished(project: Path, tmp_path: Path) -> None:
    """Also in the background of a shell that ignores SIGINT there; the mutant that runs would go on for ten minutes."""
    folder = tmp_path / "project"
    for name in ("product.py", FILE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((project / name).read_text())
    (folder / standing.FOLDER).mkdir()
    hangs = planned("z-hangs", "return a + b", "import time; time.sleep(600)")
    (folder / standing.FOLDER / "sums.toml").write_text(area(KILLED, hangs))
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    command = [*shell, sys.executable, "-m", "tests.mutants", "--root", str(folder), "run", "--jobs", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "KILLED" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == INTERRUPTED
    assert "--resume" in said
    (path,) = (folder / "results" / mutants.FOLDER).glob("*.jsonl")
    assert [line.id for line in mutants.read(path)[1]] == ["killed"]


def test_a_test_is_named_by_its_own_file(tmp_path: Path) -> None:
    """JUnit names the file in which a function is defined, which for an inherited test is a library's."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_machine.py").touch()
    copy = SimpleNamespace(tree=tmp_path)
    names = ["tests", "test_machine", "TestMachine"]
    assert suites._split(copy, names) == ("tests/test_machine.py", "TestMachine")  # type: ignore[arg-type]
    assert suites._split(copy, [""]) == ("",)  # type: ignore[arg-type]

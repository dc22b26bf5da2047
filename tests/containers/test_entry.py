"""What an image runs first: nothing on another GPU than its name says, and nothing without one."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from harness import environment, machines
from harness.machines import Gpu
from harness.repository import ROOT
from nsa.train import profile

ENTRY = ROOT / "docker" / "entry.py"
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0))


@pytest.mark.parametrize(
    ("expected", "found", "why"),
    [
        ("a100", A100, None),
        ("gpu", Gpu("Tesla V100", (7, 0)), None),
        ("h100", A100, "needs an NVIDIA H100; found: NVIDIA A100-SXM4-80GB"),
        ("a100", None, "needs an NVIDIA A100; PyTorch"),
        ("gpu", None, "needs a GPU; PyTorch"),
    ],
)
def test_refusal(monkeypatch: pytest.MonkeyPatch, expected: str, found: Gpu | None, why: str | None) -> None:
    monkeypatch.setattr(machines, "visible_gpu", lambda: found)
    refused: str | None = runpy.run_path(str(ENTRY))["refusal"](expected)
    if why is None:
        assert refused is None
    else:
        assert refused is not None
        assert why in refused


def started(family: str, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ENTRY), *words]
    own = {"NSA_FAMILY": family, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(command, env=own, cwd=cwd, capture_output=True, text=True)


def test_without_the_gpu_the_command_does_not_run(tmp_path: Path) -> None:
    done = started("a100", "touch", "ran", cwd=tmp_path)
    assert done.returncode == 2
    assert "sees no GPU in the container" in done.stderr
    assert "--gpus all" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_command_takes_over_with_its_exit_code(tmp_path: Path) -> None:
    assert started("cpu", "sh", "-c", "exit 7", cwd=tmp_path).returncode == 7
    assert started("cpu", "no-such-program", cwd=tmp_path).returncode == 127


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"NSA_EXPECT": "cpu"}, 7),
        ({"NSA_EXPECT": ""}, 2),  # as NSA_FAMILY says: without the GPU
        ({"NSA_EXPECT": "h100"}, 2),
        ({"NSA_EXPECT": "cpu", "NSA_EXPECTS": "cpu"}, 2),
    ],
)
def test_what_is_expected_of_an_image_for_an_a100(variables: dict[str, str], code: int, tmp_path: Path) -> None:
    done = started("a100", "sh", "-c", "exit 7", cwd=tmp_path, **variables)
    assert done.returncode == code
    assert ("did you mean NSA_EXPECT?" in done.stderr) == ("NSA_EXPECTS" in variables)


def test_every_variable_that_a_container_or_a_workflow_has_is_known() -> None:
    """The suites and training refuse unknown ones by name."""
    places = [ROOT / "docker" / "Dockerfile", ROOT / ".ci" / "containers", *(ROOT / ".github").rglob("*.yml")]
    places += [ENTRY, *sorted((ROOT / "containers").glob("*.py"))]
    named = {name for path in places for name in re.findall(r"\bNSA_[A-Z_]+\b", path.read_text())}
    assert {"NSA_DIRTY", "NSA_RESULTS", "NSA_ENGINE"} <= named
    variables = dict.fromkeys(named - {"NSA_GPUS", "NSA_NIGHTLY_BUDGET"}, "1")  # GitHub's own
    environment.check(variables)
    profile.read_environment(variables)


def test_kernels_compiled_with_the_image_go_where_they_are_wanting(tmp_path: Path) -> None:
    compiled, cache = tmp_path / "compiled", tmp_path / "cache"
    for key in ("A", "B"):
        (compiled / key).mkdir(parents=True)
        (compiled / key / "_topk.cubin").write_text(f"of the image, {key}")
    (cache / "A").mkdir(parents=True)
    (cache / "A" / "_topk.cubin").write_text("older")
    share = runpy.run_path(str(ENTRY))["share_kernels"]
    assert share(compiled, cache) == 1
    assert (cache / "A" / "_topk.cubin").read_text() == "older"
    assert (cache / "B" / "_topk.cubin").read_text() == "of the image, B"
    assert sorted(path.name for path in cache.iterdir()) == ["A", "B"]  # nothing half done is left
    assert share(compiled, cache) == share(tmp_path / "none", cache) == 0


def test_a_kernel_that_another_container_was_faster_with_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, cache = tmp_path / "compiled", tmp_path / "cache"
    (compiled / "A").mkdir(parents=True)
    (compiled / "A" / "_topk.cubin").write_text("of the image")
    entry = runpy.run_path(str(ENTRY))
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "_topk.cubin").write_text("of the other")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    entry["share_kernels"](compiled, cache)
    assert (cache / "A" / "_topk.cubin").read_text() == "of the other"


def test_a_cache_that_cannot_be_written_stops_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compiled" / "A").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.delenv("NSA_FAMILY", raising=False)
    started: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda program, _: started.append(program))
    entry = runpy.run_path(str(ENTRY))
    entry["main"].__globals__["COMPILED"] = tmp_path / "compiled"
    entry["main"](["true"])
    assert started == ["true"]
    assert "kernels will be compiled anew" in capsys.readouterr().err

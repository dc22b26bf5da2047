"""What a container is given, what it gives back, and that it ends when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from containers.__main__ import main
from harness import repository
from harness.repository import ROOT
from tests.containers import fake_host

COMMAND = ("--", "python", "-m", "benchmarks", "run")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("NSA_ENGINE", "NSA_BASE_IMAGE", "NSA_WHEELS", "NSA_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    return fake_host.program(monkeypatch, tmp_path / "bin", "docker", fake_host.ENGINE)


def ran(asked: Path) -> str:
    (line,) = [line for line in asked.read_text().splitlines() if line.startswith("run ")]
    return line


def test_results_belong_to_the_caller_and_nothing_else_can_be_reached(asked: Path, tmp_path: Path) -> None:
    assert main(["run", "--family", "cpu", "--results", str(tmp_path / "results"), *COMMAND]) == 0
    line = ran(asked)
    results = tmp_path / "results"
    for words in (
        f"--user {os.getuid()}:{os.getgid()}",
        f"--volume {results}:{results}:rw --env NSA_RESULTS={results}",
        "--label nsa.suite",
        "--network none",
        "--hostname localhost",
        "--env NSA_EXPECT=cpu",
        "--env NSA_IMAGE=sha256:0123",
        "--rm --init",
    ):
        assert words in line
    assert results.is_dir(), "the engine would make it, owned by root"
    assert "--gpus" not in line
    assert line.endswith(" python -m benchmarks run")


def test_a_gpu_is_given_and_expected(monkeypatch: pytest.MonkeyPatch, asked: Path, tmp_path: Path) -> None:
    fake_host.nvidia_smi(monkeypatch, tmp_path / "bin", fake_host.A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert main(["run", "--results", str(tmp_path / "results"), *COMMAND]) == 0
    assert "--env CUDA_VISIBLE_DEVICES " in ran(asked)
    assert " --gpus all nsa:a100-" in ran(asked)
    assert "--env NSA_EXPECT=a100" in ran(asked)


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ([], "needs an NVIDIA A100; this host has no GPU"),
        ([fake_host.RTX_3090], "needs an NVIDIA A100; found: NVIDIA GeForce RTX 3090"),
    ],
)
def test_another_machine_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: Path,
    tmp_path: Path,
    gpus: list[fake_host.HostGpu],
    why: str,
) -> None:
    fake_host.nvidia_smi(monkeypatch, tmp_path / "bin", *gpus)
    assert main(["run", "--family", "a100", *COMMAND]) == 2
    assert why in capsys.readouterr().err
    assert "build " not in asked.read_text()


def test_an_old_driver_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: Path, tmp_path: Path
) -> None:
    fake_host.nvidia_smi(monkeypatch, tmp_path / "bin", fake_host.A6000)
    assert main(["run", *COMMAND]) == 2
    assert "driver 570.10.01" in capsys.readouterr().err
    assert "build " not in asked.read_text()


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch, asked: Path, tmp_path: Path, code: int) -> None:
    monkeypatch.setenv("ENGINE_RUN_CODE", str(code))
    assert main(["run", "--family", "cpu", "--results", str(tmp_path / "results"), *COMMAND]) == code


def test_an_engine_that_cannot_give_a_gpu_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: Path, tmp_path: Path
) -> None:
    fake_host.nvidia_smi(monkeypatch, tmp_path / "bin", fake_host.A100)
    monkeypatch.setenv("ENGINE_RUN_CODE", "125")
    assert main(["run", "--results", str(tmp_path / "results"), *COMMAND]) == 125
    assert "Install the NVIDIA Container Toolkit" in capsys.readouterr().err


def test_what_a_command_writes_is_the_hosts(monkeypatch: pytest.MonkeyPatch, asked: Path, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*COMMAND, "--out", "here", "--junitxml=there/j.xml"]
    assert main(["run", "--family", "cpu", "--results", "results", *words]) == 0
    line = ran(asked)
    assert f"--out {tmp_path / 'here'} --junitxml={tmp_path / 'there' / 'j.xml'}" in line
    assert f"--volume {tmp_path / 'here'}:{tmp_path / 'here'}:rw" in line
    assert f"--volume {tmp_path / 'there'}:{tmp_path / 'there'}:rw" in line


@pytest.mark.parametrize(("out", "why"), [("/opt", "must lie in a folder of its own"), ("a:b", "must not have ':'")])
def test_a_folder_that_no_volume_can_have_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: Path, tmp_path: Path, out: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--family", "cpu", "--results", "results", *COMMAND, "--out", out]) == 2
    assert why in capsys.readouterr().err


def test_the_working_tree_is_given_read_only(asked: Path, tmp_path: Path) -> None:
    assert main(["run", "--family", "cpu", "--repository", "--results", str(tmp_path / "r"), *COMMAND]) == 0
    assert f"--volume {ROOT}:{ROOT}:ro " in ran(asked)
    assert f" --workdir {ROOT} " in ran(asked)


def test_the_caller_is_named_as_on_the_host(monkeypatch: pytest.MonkeyPatch, asked: Path, tmp_path: Path) -> None:
    """`accept` writes the name down, and no configuration of the host's user is in the container."""
    (tmp_path / "gitconfig").write_text("[user]\nname = A Name\nemail = configured@host\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.delenv("GIT_AUTHOR_NAME", raising=False)
    monkeypatch.setenv("GIT_AUTHOR_EMAIL", "set@host")
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    monkeypatch.setattr("containers.__main__._image", lambda *_: "nsa:cpu")
    assert main(["run", "--family", "cpu", "--repository", "--results", str(tmp_path / "r"), *COMMAND]) == 0
    assert " --env GIT_AUTHOR_NAME=A Name --env GIT_AUTHOR_EMAIL=set@host " in ran(asked)


def test_the_history_of_a_worktree_is_given_too(monkeypatch: pytest.MonkeyPatch, asked: Path, tmp_path: Path) -> None:
    """Git keeps it in another folder, which `compare` asks for older commits."""
    whole, worktree = tmp_path / "whole", tmp_path / "worktree"
    git = ("git", "-C", str(whole), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "init", "--quiet", str(whole)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "one"], check=True)
    subprocess.run([*git, "worktree", "add", "--quiet", str(worktree)], check=True)
    monkeypatch.setattr(repository, "ROOT", worktree)
    monkeypatch.setattr("containers.__main__._image", lambda *_: "nsa:cpu")
    assert main(["run", "--family", "cpu", "--repository", "--results", str(tmp_path / "r"), *COMMAND]) == 0
    assert f"--volume {worktree}:{worktree}:ro " in ran(asked)
    assert f"--volume {whole / '.git'}:{whole / '.git'}:ro " in ran(asked)


def test_an_image_that_is_asked_for_must_be_there(
    capsys: pytest.CaptureFixture[str], asked: Path, tmp_path: Path
) -> None:
    assert main(["run", "--family", "cpu", "--image", "nsa:none", *COMMAND]) == 2
    assert "docker has no image nsa:none" in capsys.readouterr().err


@pytest.mark.parametrize("shell", [[], ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]], ids=["", "in-the-background"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_container_and_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, asked: Path, tmp_path: Path, sent: signal.Signals, shell: list[str]
) -> None:
    """The suite inside gets one interrupt, ends its work, and its exit code comes out.

    Also where a shell has SIGINT ignored, as it does for what runs in its background.
    """
    script = fake_host.ENGINE.replace(
        '"run "*)',
        '"run "*) trap \'echo interrupted >> "$0.stopped"; sleep 0.3; exit 130\' INT; touch "$0.started";'
        ' for _ in {1..400}; do sleep 0.05; done; exit 9;; "x"*)',
    )
    fake_host.program(monkeypatch, tmp_path / "bin", "docker", script)
    words = ["run", "--family", "cpu", "--results", str(tmp_path / "r"), *COMMAND]
    command = [*shell, sys.executable, "-m", "containers", *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    started = tmp_path / "bin" / "docker.started"
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(sent)
    assert process.wait() == 130  # 9 after 20 s without an interrupt
    assert (tmp_path / "bin" / "docker.stopped").read_text().count("interrupted") == 1

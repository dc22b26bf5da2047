"""`pytest --force-arch`: the tests run by another architecture's tables, and their report says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.repository import ROOT

PROBE = """
from nsa.triton_backend import architecture, tuning
import torch

def test_probe():
    assert architecture.FORCED == 80
    assert tuning.table(architecture.of(torch.device("cpu"))).how == tuning.table(80).how
"""


def run(folder: Path, *options: str, gpu: bool = True) -> subprocess.CompletedProcess[str]:
    """A test of these options' process, on a machine whose PyTorch says that it has a GPU or none."""
    (folder / "test_probe.py").write_text(PROBE)
    (folder / "machine.py").write_text(f"import torch\ntorch.cuda.is_available = lambda: {gpu}\n")
    plugins = [f"-p{name}" for name in ("machine", "tests.conftest", "no:benchmark", "no:cacheprovider")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *plugins,
        "-c",
        os.devnull,
        "-q",
        *options,
        str(folder / "test_probe.py"),
    ]
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "NSA_FORCE_ARCH": "", "NSA_MEMORY_GB": "", "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_option_reaches_the_kernels(tmp_path: Path) -> None:
    done = run(tmp_path, "--force-arch", "sm80", "--junitxml", str(tmp_path / "laws-forced-sm80.xml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "laws-forced-sm80.xml").exists()


def test_a_report_of_another_name_ends_the_run_before_a_test(tmp_path: Path) -> None:
    done = run(tmp_path, "--force-arch", "sm80", "--junitxml", "laws.xml")
    assert done.returncode == 4
    assert "must end in -forced-sm80; got laws.xml" in done.stderr
    assert not list(tmp_path.glob("*.xml"))


def test_without_a_gpu_nothing_runs_and_no_report_is_filed(tmp_path: Path) -> None:
    words = ("--force-arch", "sm80", "--junitxml", str(tmp_path / "laws-forced-sm80.xml"))
    done = run(tmp_path, *words, gpu=False)
    assert done.returncode == 4
    assert "--force-arch sm80 needs an NVIDIA GPU; leave it out on a CPU" in done.stderr
    assert not list(tmp_path.glob("*.xml"))

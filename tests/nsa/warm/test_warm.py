"""`python -m nsa.warm`: a later process finds every kernel that it needs, in whatever order it asks for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SMALL = ("--heads", "4,2,16,16", "--prefill", "1x64", "--architecture", "9.0")


def run(module: str, *arguments: str, cache: Path, gpus: str = "") -> subprocess.CompletedProcess[str]:
    """A process of its own, without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": gpus}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def later(cache: Path, *arguments: str) -> dict[str, list[str]]:
    """What a later process with these arguments compiles, and what it finds."""
    done = run("tests.nsa.warm.later_process", *arguments, cache=cache)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache with the kernels of SMALL, and what was said as they were compiled."""
    cache = tmp_path_factory.mktemp("cache")
    done = run("nsa.warm", *SMALL, "--jobs", "2", cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return cache, done.stdout


def test_a_later_process_compiles_nothing(warmed: tuple[Path, str]) -> None:
    found = later(warmed[0], *SMALL)
    assert found["compiled"] == []
    assert len(found["found"]) >= 6


def test_what_is_compiled_is_said(warmed: tuple[Path, str]) -> None:
    lines = warmed[1].splitlines()
    kernels = [line for line in lines if line.startswith("[")]
    assert lines[1] == "  prefill 1 x 64, 4/2 heads of 16, bfloat16"
    assert {line.partition("] ")[2].partition(":")[0] for line in kernels} >= {"topk._topk", "selected._forward"}
    assert all(": compiled in " in line for line in kernels)
    assert f"{len(kernels)} kernels compiled, 0 were in the cache" in lines[-1]


def test_a_kernel_that_is_left_out_is_compiled_by_the_later_process(warmed: tuple[Path, str], tmp_path: Path) -> None:
    cache = shutil.copytree(warmed[0], tmp_path / "cache")
    left_out = next(folder for folder in cache.iterdir() if (folder / "_topk.json").exists())
    shutil.rmtree(left_out)
    for group in cache.glob("*/__grp__*"):  # Triton writes absolute paths into them
        group.write_text(group.read_text().replace(str(warmed[0]), str(cache)))
    assert later(cache, *SMALL)["compiled"] == ["nsa.triton_backend.topk._topk"]
    assert later(cache, *SMALL)["compiled"] == []


@pytest.mark.gpu
def test_the_first_call_on_a_gpu_builds_nothing(tmp_path: Path) -> None:
    """Neither kernels nor, up to Triton 3.6, the C that launches them: `nsa.warm` left both in the cache."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    done = run("nsa.warm", "--heads", "12,2,64,64", "--train", "1x2048", cache=tmp_path, gpus=gpus)
    assert done.returncode == 0, done.stdout + done.stderr
    before = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    called = run("tests.nsa.warm.first_call", "12", "2", "64", "64", "2048", cache=tmp_path, gpus=gpus)
    assert called.returncode == 0, called.stderr
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == before


def test_kernels_of_another_architecture_are_others(warmed: tuple[Path, str], tmp_path: Path) -> None:
    """So that it is the keys that are compared, and not that anything is there."""
    cache = shutil.copytree(warmed[0], tmp_path / "cache")
    assert later(cache, *SMALL[:-1], "8.0")["found"] == []


def test_the_cache_key_does_not_depend_on_what_was_launched_first() -> None:
    done = run("tests.nsa.warm.order_of_keys", cache=Path("/nonexistent"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    alone, after, other_constant = found["settled"]
    assert alone == after != other_constant
    alone, after, _ = found["plain"]
    assert alone != after  # Triton's own keys do: with a version where they do not, `with_settled_key` may go


def test_a_model_under_autocast_asks_for_no_other_kernels(tmp_path: Path) -> None:
    done = run("tests.nsa.warm.signatures_of_a_model", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert [answer[word]["missing"] for word in ("rows", "packed")] == [[], []]
    assert answer["rows"]["asked"] >= 15
    assert answer["decode"].count("cache_write._write") == 2  # side by side, and in pages
    assert "compressed_window._backward_q" in answer["prompt"]["missing"]  # it sees what is left out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--architecture", "9.0"), "nothing is named"),
        (
            ("--architecture", "7.5", *SMALL[:4]),
            "must be a compute capability of at least 8.0; got '7.5'",
        ),
        (("--train", "1x64", "--architecture", "9.0"), "--train needs --heads"),
        (("--heads", "4,2,16,16", "--architecture", "9.0"), "--heads needs --train, --prefill or --decode"),
        (("--heads", "4,2,16", "--train", "1x64", "--architecture", "9.0"), "--heads must be 4 numbers with ','"),
        (("--heads", "4,3,16,16", "--train", "1x64", "--architecture", "90"), "num_kv_heads must divide num_heads"),
        (("--heads", "4,2,16,16", "--train", "64", "--architecture", "90"), "--train must be 2 numbers with 'x'"),
        (("--profile", "train_showcas", "--architecture", "90"), "no profile is called 'train_showcas'"),
        ((*SMALL, "--jobs", "0"), "jobs must be at least 1; got 0"),
        (SMALL[:4], "there is no GPU here: give --architecture"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from nsa.triton_backend import dispatch
    from nsa.warm import __main__ as command

    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    monkeypatch.setattr(command, "launches", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_the_interpreter_compiles_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa.triton_backend import dispatch
    from nsa.warm import __main__ as command

    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    assert command.main(SMALL) == 2
    assert "TRITON_INTERPRET must not be 1" in capsys.readouterr().err


def test_a_profile_is_trained_packed_as_it_says() -> None:
    from nsa.warm.workloads import of_profile

    workload = of_profile("h200_125m")
    assert str(workload) == "train 8 x 8192, 12/2 heads of 64, bfloat16, packed"

"""The incidents as pytest tests: `python -m pytest regression -k step5`.

pytest collects, filters, distributes (`-n`) and reports (`--junitxml`) them as usual; each half of an incident runs in
the guarded child of `python -m regression run` and is judged as there. What that command writes to the ledger, these
tests do not.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from regression import listing, runner
from regression.__main__ import default_jobs
from regression.runner import Finding, Repro

Run = Callable[[Repro], Finding]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("NSA incidents").addoption(
        "--device", choices=("cpu", "cuda", "auto"), default="auto", help="(default: a GPU if there is one)"
    )


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: as many children at a time as the command line runs."""
    return default_jobs(_device(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "repro" in metafunc.fixturenames:
        repros = runner.plan(listing.load(listing.IDS), _device(metafunc.config))
        metafunc.parametrize("repro", repros, ids=[f"{repro.incident.id}-{repro.part}" for repro in repros])


def _device(config: pytest.Config) -> str:
    device: str = config.getoption("device")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: PyTorch finds no GPU")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs one repro in its child; what measures time has the machine to itself, whatever the number of workers."""
    lock = tmp_path_factory.getbasetemp().parent / "nsa-incidents.lock"  # the same for all workers of a run

    def in_child(repro: Repro) -> Finding:
        with _shared_or_alone(lock, repro.incident.alone):
            [finding] = runner.run([repro], gpus=torch.cuda.device_count(), jobs=1)
        return finding

    return in_child


@contextmanager
def _shared_or_alone(lock: Path, alone: bool) -> Iterator[None]:
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield

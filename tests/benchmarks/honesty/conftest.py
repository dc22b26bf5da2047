"""`run` with records in place of measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import worker
from benchmarks.__main__ import main
from benchmarks.commands import run as bench_run
from benchmarks.history.records import Record
from benchmarks.runner import Measurement
from benchmarks.timing import peak

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run` with these records in place of measurements: its exit code and its last line."""

    def of(found: list[Record], *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(worker, "run", lambda *_, **__: map(Measurement, found))
        monkeypatch.setattr(peak, "measure", lambda _: None)
        monkeypatch.setattr(bench_run, "build_page", lambda results: results)
        code = main(["run", "--gpu", "cpu", "--out", str(tmp_path), *arguments])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return of

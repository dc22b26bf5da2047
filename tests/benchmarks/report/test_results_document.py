"""docs/results.md holds what the records say, a row of one run, and says where a record is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.commands.results import DOCUMENT
from benchmarks.history import run_file
from benchmarks.report import results_document
from harness.repository import ROOT
from tests.benchmarks.synthetic import FINGERPRINT, key, passed

TEXT = "before\n<!-- prefill h200 64x4x128 -->\nold\n<!-- end -->\nafter\n"
SIZES = {"heads": 64, "num_kv_heads": 4, "head_dim_k": 128, "head_dim_v": 128, "dtype": "bfloat16", "cache": "cold"}


def records(
    results: Path, utc: str, latency_ms: dict[str, float], inputs: str = "random", length: int = 8192,
    follow: str | None = None,
) -> None:  # fmt: skip
    """A run forward."""
    fingerprint = dataclasses.replace(FINGERPRINT, machine="h200", utc=utc, commit=f"{utc[8:10]}abcdef0123")
    path = run_file.create(results, fingerprint, "python -m benchmarks run")
    for implementation, figure in latency_ms.items():
        one = key("prefill-forward", implementation, length, inputs=inputs, **SIZES)
        run_file.append(path, dataclasses.replace(passed(one, figure), fingerprint=fingerprint, inputs_follow=follow))


def test_a_row_is_the_run_with_the_most_baselines_and_its_ratios_are_its_own(tmp_path: Path) -> None:
    records(tmp_path, "2026-11-01T00:00:00.000Z", {"nsa": 2.0, "sdpa-cudnn": 3.0, "sdpa-flash": 5.0})
    records(tmp_path, "2026-11-02T00:00:00.000Z", {"nsa": 1.0, "sdpa-cudnn": 4.0})
    records(tmp_path, "2026-11-03T00:00:00.000Z", {"sdpa-cudnn": 9.0, "sdpa-flash": 9.0, "flash-attn-4": 9.0})
    text, picture = results_document.content(tmp_path, TEXT)
    assert (
        "| 8k | forward | random | 2 | 3 (1.5×) | 5 (2.5×) | – | `01abcdef01` |\n| 8k | forward | random | 1 |" in text
    )
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert picture.lstrip().startswith("<?xml")


def test_rows_of_recorded_inputs_stand_below_the_random_ones(tmp_path: Path) -> None:
    records(tmp_path, "2026-11-01T00:00:00.000Z", {"nsa": 2.0, "sdpa-cudnn": 3.0})
    records(tmp_path, "2026-11-02T00:00:00.000Z", {"nsa": 1.0, "sdpa-cudnn": 3.0}, "recorded")
    records(tmp_path, "2026-11-03T00:00:00.000Z", {"nsa": 9.0, "sdpa-cudnn": 9.0}, "local")
    text, picture = results_document.content(tmp_path, TEXT)
    shown = [line for line in text.splitlines() if line.startswith("| 8k")]
    assert shown == [
        "| 8k | forward | random | 2 | 3 (1.5×) | – | – | `01abcdef01` |",
        "| 8k | forward | recorded | 1 | 3 (3×) | – | – | `02abcdef01` |",
    ]
    assert "cuDNN, forward, recorded inputs" in picture


def test_a_row_on_recorded_inputs_names_their_table_and_a_line_keeps_to_one(tmp_path: Path) -> None:
    study, atlas = (
        "trained; study of commit abc0123 on a GPU",
        "median; atlas of h200, 2026-11-24, commit def4567; law 0",
    )
    figures = {"nsa": 1.0, "sdpa-cudnn": 3.0}
    records(tmp_path, "2026-11-02T00:00:00.000Z", figures, "recorded", follow=study)
    records(tmp_path, "2026-11-03T00:00:00.000Z", figures, "recorded", 16384, follow=atlas)
    text, picture = results_document.content(tmp_path, TEXT)
    assert "| 8k | forward | recorded (study abc0123) | 1 |" in text
    assert "| 16k | forward | recorded (atlas def4567) | 1 |" in text
    for named in ("study abc0123", "atlas def4567"):
        assert f"cuDNN, forward, recorded ({named}) inputs" in picture


def test_a_table_without_a_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "results.md"
    document.write_text(TEXT)
    assert main(["results", "--out", str(tmp_path), "--document", str(document)]) == 2
    assert "prefill h200 64x4x128" in capsys.readouterr().err
    assert document.read_text() == TEXT


def test_the_document_is_what_the_records_say() -> None:
    results = ROOT / "results"
    if not any((results / "runs" / "h200").glob("*.jsonl")):
        pytest.skip("the records of the H200 are not in this tree")
    found = results_document.content(results, DOCUMENT.read_text(encoding="utf-8"))
    assert found[0] == DOCUMENT.read_text(encoding="utf-8"), "python -m benchmarks results"

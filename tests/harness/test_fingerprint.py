"""The fingerprint names what a figure depends on; two are comparable, or the reasons why not are listed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import fingerprint, repository, schema
from harness.fingerprint import Fingerprint, differences
from harness.nvml import ClockLimits
from harness.peak import MeasuredPeak
from tests.benchmarks.synthetic import FINGERPRINT

ONLY_TOLD = {"image", "utc", "load", "commit", "dirty", "nsa_sha256", "measured_peak", "gpu_settings"}
"""When, how busy, what is compared, what was measured itself, and settings, whose effect on the clocks is measured."""
OTHER = {"threads": 1, "gpu_clocks": ClockLimits(1980, 3201, 700.0), "measured_peak": MeasuredPeak(1.0, 1.0, 1.0, None)}


def changed(**changes: Any) -> Fingerprint:
    return dataclasses.replace(FINGERPRINT, **changes)


def test_a_fingerprint_is_comparable_with_itself_at_another_time_and_commit() -> None:
    later = changed(utc="2027-01-02T03:04:05Z", load=3.0, commit="fedcba", dirty=True, nsa_sha256="2" * 16)
    assert differences(FINGERPRINT, later) == []


def test_each_difference_is_a_reason() -> None:
    old, new = changed(driver="555", triton=None), changed(driver="560", triton="3.7.1", image="nsa:h100")
    assert differences(old, new) == ["driver 555 -> 560", "triton unknown -> 3.7.1"]
    full, lowered = (changed(gpu_clocks=ClockLimits(1980, 3201, watts)) for watts in (700.0, 500.0))
    assert differences(full, lowered) == [
        "gpu_clocks SM 1980 MHz, memory 3201 MHz, 700.0 W -> SM 1980 MHz, memory 3201 MHz, 500.0 W"
    ]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Fingerprint)])
def test_every_field_is_a_condition_or_only_told(name: str) -> None:
    """A new field must be put on one side."""
    assert (name in fingerprint.CONDITIONS) != (name in ONLY_TOLD)
    other = changed(**{name: OTHER.get(name, "2027-01-02T03:04:05Z" if name == "utc" else "other")})
    assert bool(differences(FINGERPRINT, other)) == (name not in ONLY_TOLD)


def test_takes_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_IMAGE", "nsa:cpu")
    peak = MeasuredPeak(2.0, 1.0, 0.02, 32.0)
    taken = fingerprint.take("cpu", "cpu", peak)
    assert (taken.machine, taken.image, taken.measured_peak, taken.gpu_clocks) == ("cpu", "nsa:cpu", peak, None)
    assert schema.build(Fingerprint, json.loads(json.dumps(dataclasses.asdict(taken))), "fingerprint") == taken


def test_the_hash_holds_names_and_contents(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "page/c.py", "page/tables/sm90.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    before, part = fingerprint.sources_sha256(tmp_path), fingerprint.sources_sha256(tmp_path, ("a.py", "page"))
    (tmp_path / "b.py").write_text("x = 2")
    assert fingerprint.sources_sha256(tmp_path) != before
    assert fingerprint.sources_sha256(tmp_path, ("a.py", "page")) == part
    (tmp_path / "page/tables/sm90.json").write_text("{}")  # how kernels are launched
    assert fingerprint.sources_sha256(tmp_path, ("a.py", "page")) != part
    part = fingerprint.sources_sha256(tmp_path, ("a.py", "page"))
    (tmp_path / "page/c.py").rename(tmp_path / "page/d.py")
    assert fingerprint.sources_sha256(tmp_path, ("a.py", "page")) != part


NOT_MEASURING = {
    "benchmarks/atlas/record.py",
    "benchmarks/cases/key.py", "benchmarks/cases/outcome.py", "benchmarks/history/records.py",
    "benchmarks/history/samples.py", "benchmarks/peak_memory.py", "benchmarks/timing/peak.py", "harness/environment.py",
    "harness/fingerprint.py", "harness/forced.py", "harness/guard.py", "harness/isolate.py", "harness/machines.py",
    "harness/package_folder.py", "harness/peak.py", "harness/repository.py", "harness/schema.py",
}  # fmt: skip
"""What the runner imports to say and keep figures, or to end what hangs, not to come by them."""


def test_whatever_the_runner_imports_is_in_the_hash_or_known_not_to_matter() -> None:
    """Else a change of how something is measured would leave figures comparable."""
    ours = "('benchmarks.', 'harness.')"
    script = f"import sys, benchmarks.runner; print(*(m for m in sys.modules if m.startswith({ours})))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=repository.ROOT, timeout=120
    )
    imported = {name.replace(".", "/") + ".py" for name in done.stdout.split()}
    modules = {name for name in imported if (repository.ROOT / name).is_file()}  # a package's own file is a docstring
    unhashed = {name for name in modules if not any(Path(name).is_relative_to(part) for part in fingerprint.MEASURING)}
    assert unhashed | (modules & set(fingerprint.NOT_MEASURING)) == NOT_MEASURING
    assert all((repository.ROOT / part).exists() for part in (*fingerprint.MEASURING, *fingerprint.NOT_MEASURING))


def test_the_hash_leaves_out_what_lies_beside_and_does_not_measure(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part/a.py").write_text("a")
    alone = fingerprint.sources_sha256(tmp_path, ("part",))
    (tmp_path / "part/other.py").write_text("b")
    assert fingerprint.sources_sha256(tmp_path, ("part",), ("part/other.py",)) == alone
    assert fingerprint.sources_sha256(tmp_path, ("part",)) != alone


@pytest.mark.parametrize(("number", "version"), [(91900, "9.19.0"), (90701, "9.7.1"), (None, None)])
def test_cudnn_is_named_as_its_makers_do(number: int | None, version: str | None) -> None:
    assert fingerprint._cudnn(number) == version

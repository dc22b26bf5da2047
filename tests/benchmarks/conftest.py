"""What the tests of the benches share: a run measures this machine's peak for seconds, here once in a process."""

from __future__ import annotations

import functools

import pytest

from benchmarks.timing import peak

_measured_once = functools.cache(peak.measure)


@pytest.fixture(autouse=True)
def peak_measured_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`peak.measure` says the same of the same machine all along; its own tests call it as it is."""
    if request.path.name != "test_peak.py":
        monkeypatch.setattr(peak, "measure", _measured_once)

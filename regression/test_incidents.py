"""Each half of each incident: the fault must be caught by its detector, the product must be free of it."""

from __future__ import annotations

import pytest

from regression import session
from regression.conftest import Run
from regression.runner import Repro


def test_incident(repro: Repro, run: Run) -> None:
    finding = run(repro)
    print(session.progress(finding, 1, 1, finding.pace.seconds))  # pytest shows it with -rA, and of what fails
    if finding.allowed_skip:
        pytest.skip(finding.reason or "")
    if not finding.ok:
        pytest.fail(f"{repro.incident.id}: {finding.reason}\n{finding.evidence.stacks or ''}".rstrip(), pytrace=False)

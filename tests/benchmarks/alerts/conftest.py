"""The project of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.alerts.project import Project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty one."""
    return Project(tmp_path, monkeypatch)

"""The folder of a first contact, and the bundle of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.contact import bundle
from tests.benchmarks.contact.bundles import LAW, LAW_NAME, WHERE, write_incident
from tests.benchmarks.full_results import write_calibration
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import key, passed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a first contact leaves."""
    contact = tmp_path / "contact"
    write(contact, dataclasses.replace(passed(key()), fingerprint=WHERE))
    write_calibration(contact)
    (contact / "laws").mkdir()
    (contact / LAW_NAME).write_text(json.dumps(LAW))
    write_incident(contact)
    (contact / "logs").mkdir()
    (contact / "logs" / "laws.log").write_text("8 passed\n")
    (contact / "report").mkdir()
    (contact / "report" / "index.html").write_text("left behind")
    return contact


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "one.tar.gz"
    bundle.write(folder, WHERE, target, complete=True)
    return target

"""A bundle's folder in small, and bundles that somebody has changed."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.full_results import run_of

WHERE = dataclasses.replace(run_of(3, "cpu", "A CPU"), measured_peak=None)
LAW = {"utc": "2026-01-04T00:00:00", "passed": 8, "failed": 0}
LAW_NAME = "laws/cpu-20260104-0123456789-first-contact-000000.json"


def write_incident(folder: Path) -> None:
    """A green one."""
    judged = {"incident": "tie-break", "part": "product", "expects": "PASSED", "verdict": "PASSED", "ok": True}
    path = folder / "regression" / WHERE.machine / "1.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"fingerprint": dataclasses.asdict(WHERE), **judged, "schema_version": 1}) + "\n")


def contents(packed: Path) -> dict[str, bytes]:
    with tarfile.open(packed) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def repack(target: Path, content: Mapping[str, bytes], *more: tarfile.TarInfo) -> Path:
    with gzip.open(target, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for member in more:
            tar.addfile(member, io.BytesIO(b"\0" * member.size))
    return target


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.size, found.linkname = kind, size, link
    return found

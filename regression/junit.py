"""The findings as JUnit XML, which every CI shows."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from regression.runner import Finding, Repro

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 cannot hold the rest


def must_be_writable(path: Path) -> None:
    """Raises OSError where `write` would fail, before hours of work depend on it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; JUnit XML needs the path of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write(path: Path, findings: Sequence[Finding], missing: Sequence[Repro] = ()) -> None:
    """Write one test case per repro, an error for each not run; a file that was there is replaced as a whole."""
    suite = ElementTree.Element(
        "testsuite",
        name="regression",
        tests=str(len(findings) + len(missing)),
        failures=str(sum(not finding.ok for finding in findings)),
        errors=str(len(missing)),
        skipped=str(sum(finding.lawful_skip for finding in findings)),
        time=f"{sum(finding.pace.seconds for finding in findings):.3f}",
    )
    for finding in findings:
        suite.append(_case(finding))
    for repro in missing:
        case = ElementTree.SubElement(suite, "testcase", classname=f"regression.{repro.incident.id}", name=repro.part)
        ElementTree.SubElement(case, "error", message="not run: the suite was interrupted before its end")
    _replace(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _case(finding: Finding) -> ElementTree.Element:
    repro, evidence = finding.repro, finding.evidence
    case = ElementTree.Element(
        "testcase",
        classname=f"regression.{repro.incident.id}",
        name=repro.part,
        time=f"{finding.pace.seconds:.3f}",
    )
    if finding.lawful_skip:
        ElementTree.SubElement(case, "skipped", message=_clean(finding.reason or ""))
    elif not finding.ok:
        failure = ElementTree.SubElement(
            case, "failure", type=finding.verdict.value, message=_clean(f"{repro.incident.id}: {finding.reason}")
        )
        failure.text = _clean(evidence.stacks or evidence.exception or "")
    out = ElementTree.SubElement(case, "system-out")
    judged = {aspect.name: [aspect.verdict.value, aspect.why] for aspect in finding.aspects}
    out.text = _clean(json.dumps({"expects": repro.expects, "aspects": judged, "notes": evidence.notes}))
    return case


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(file, "wb") as new:
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink()
        raise

"""Files, headings, sessions, modules and functions that the documents name are there."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from containers import container, image
from harness.repository import ROOT

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TOPS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"results", "build", "dist"}  # made by runs
PACKAGES = ("nsa", "harness", "benchmarks", "regression", "containers", "distribution", "tests")


def texts(document: Path) -> list[str]:
    """What stands between backticks, each without the command around it."""
    return [word for text in re.findall(r"`([^`\n]+)`", document.read_text()) for word in text.split()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()) if "://" not in target]
    assert [target for target in targets if not (document.parent / target.replace("\\", "")).exists()] == []


@cache
def anchors(document: Path) -> set[str]:
    """What its headings are reached by, as GitHub makes it."""
    without_code = re.sub(r"(?ms)^```.*?^```", "", document.read_text())
    headings = re.findall(r"(?m)^#+ (.+)$", without_code)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_headings(document: Path) -> None:
    wanted = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", document.read_text())
    found = [(path, name, document if not path else document.parent / path) for path, name in wanted]
    assert [(path, name) for path, name, where in found if where.suffix == ".md" and name not in anchors(where)] == []


@cache
def sessions() -> set[str]:
    command = [sys.executable, "-m", "nox", "--list", "--noxfile", str(ROOT / "noxfile.py")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?m)^- ([\w-]+)", listed))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_sessions_are_there(document: Path) -> None:
    """`…`, an abbreviation, stands for some name."""
    pytest.importorskip("nox")
    named = re.findall(r"\bnox -s ([\w-]+)(?!…)\b", document.read_text())
    assert set(named) - sessions() == set()


def test_the_six_steps_of_a_new_machine_fit_on_one_page() -> None:
    """Each has its command or its click, what it prints when it worked, and what to do when it did not."""
    page, rest = (ROOT / "docs" / "new-machine.md").read_text().split("\n## The names of machines\n")
    steps = re.split(r"(?m)^## (?=\d)", page)[1:]
    assert [step.split(".")[0] for step in steps] == list("123456")
    for step in steps:
        assert re.search(r"(?m)^```bash$", step)
        assert re.search(r"(?m)^- Worked: .+\n- Else: .+", step)
    assert len(re.findall(r"\w+\S*", page)) <= 650
    assert "## What first contact does" in rest


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_are_there(document: Path) -> None:
    """A `*` stands for some name, `<...>` and `{...}` for any."""
    gone = []
    for text in texts(document):
        name = re.sub(r"<[^>]*>|\{[^}]*\}", "*", text.partition("::")[0]).rstrip("/,.;:")
        if "/" in name and name.split("/")[0] in TOPS and not any(ROOT.glob(name)):
            gone.append(text)
    assert gone == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_names_are_there(document: Path) -> None:
    """Modules and what they hold, by their whole name; labels of images look like them."""
    labels = {container.LABEL, *re.findall(r"\bnsa\.\w+(?==)", image.DOCKERFILE.read_text())}
    named = [text for text in texts(document) if re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+", text)]
    gone = []
    for name in set(named) - labels:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            gone.append(name)
    assert gone == []

"""Files, modules and functions that the documents name are there."""

from __future__ import annotations

import pkgutil
import re
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

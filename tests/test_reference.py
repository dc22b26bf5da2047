"""The pages of the API reference: all that is public stands there with an example, and every example runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from harness.repository import ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
PUBLIC = ["nsa", "nsa.generate", "nsa.integrations.torchtitan", "nsa.loss", "nsa.model", "nsa.parallel", "nsa.sampling"]
"""The modules whose `__all__` is the public face."""
if importlib.util.find_spec("transformers"):
    PUBLIC.append("nsa.integrations.transformers")
NEEDS = {"nsa.integrations.torchtitan.with_nsa": "torchtitan"}
"""Examples that need a package which the suites' environment does not have; `nox -s torchtitan` runs them."""
_NAME = re.compile(r"(?m)^::: (\S+)$")
_BLOCK = re.compile(r"(?ms)^```pycon\n(.*?)^```$")


def sections(text: str) -> dict[str, str]:
    """The examples below each name of a page, in order; those before the first are of ""."""
    parts = ["", *_NAME.split(text)[1:]] if text.startswith(":::") else ["", *_NAME.split(text)]
    found = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        assert name not in found, f"{name} stands there twice"
        found[name] = "\n".join(_BLOCK.findall(body))
    return found


def public() -> list[str]:
    """The dotted names of every function, class and module that is exported; an exception is a class."""
    names = []
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isroutine(found) or inspect.isclass(found) or inspect.ismodule(found):
                names.append(f"{module.__name__}.{name}")
    return names


def without_example(pages: list[str]) -> list[str]:
    """The public names that no page shows with an example."""
    shown = {name: body for text in pages for name, body in sections(text).items()}
    parser = doctest.DocTestParser()
    return [name for name in public() if not parser.get_examples(shown.get(name, ""))]


def failures(text: str, path: str) -> list[str]:
    """What the examples of a page said that is not what stands there; the names they make last to its end."""
    told: list[str] = []
    names: dict[str, object] = {}
    for name, body in sections(text).items():
        if (package := NEEDS.get(name)) and importlib.util.find_spec(package) is None:
            continue
        test = doctest.DocTestParser().get_doctest(body, names, f"{path}, {name or 'its beginning'}", path, 0)
        doctest.DocTestRunner(verbose=False).run(test, out=told.append, clear_globs=False)
        names = test.globs
    return told


def test_everything_public_has_an_example() -> None:
    assert without_example([path.read_text() for path in PAGES]) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # of torchtitan, where it is there
def test_examples_run(path: Path) -> None:
    if path.stem == "transformers":
        pytest.importorskip("transformers")
    assert "".join(failures(path.read_text(), path.name)) == ""


def test_a_function_without_an_example_is_seen() -> None:
    pages = [path.read_text() for path in PAGES]
    whole = next(text for text in pages if "::: nsa.compress\n" in text)
    first, last = whole.index("::: nsa.compress\n"), whole.index("::: nsa.compressed_attention\n")
    assert without_example([*pages, ""]) == []
    others = [text for text in pages if text is not whole]
    assert without_example([*others, whole[:first] + whole[last:]]) == ["nsa.compress"]
    assert without_example([*others, f"{whole[:first]}::: nsa.compress\n\n{whole[last:]}"]) == ["nsa.compress"]


def test_an_example_that_says_something_else_is_seen() -> None:
    page = "```pycon\n>>> a = 2\n\n```\n\n::: nsa.compress\n\n```pycon\n>>> a + 1\n4\n\n```\n"
    assert "Expected:\n    4\nGot:\n    3" in "".join(failures(page, "page"))
    assert failures(page.replace("4", "3"), "page") == []

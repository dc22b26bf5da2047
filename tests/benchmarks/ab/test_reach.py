"""Which cases a difference reaches: on this repository's sources, and held to what really runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.ab import reach
from benchmarks.ab.checkout import Sources
from benchmarks.ab.result import Side
from benchmarks.cases.key import Key
from benchmarks.workloads import suite
from benchmarks.workloads.prepare import prepare
from harness import repository
from tests.benchmarks.synthetic import key

KEYS = [key(), key(mode="decode"), key(mode="part-window"), key(mode="train-step")]
ALL = ["prefill-forward", "decode", "part-window", "train-step"]


def side(folder: Path) -> Sources:
    return Sources(Side("x", None, None, "0"), folder, folder)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, str | None], list[str]]:
    """The modes of the cases that are reached where one file of today's nsa/ has this text (None: is gone)."""
    base, head = tmp_path / "base", tmp_path / "head"
    for folder in (base, head):
        shutil.copytree(repository.ROOT / "nsa", folder / "nsa", ignore=shutil.ignore_patterns("__pycache__"))

    def modes(name: str, text: str | None) -> list[str]:
        path = head / name
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        assert reach.changed_files(side(base), side(head)) == [name]
        return [one.mode for one in reach.reached(KEYS, side(base), side(head))]

    return modes


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("nsa/attention.py", ALL),
        ("nsa/triton_backend/selected.py", ALL),
        ("nsa/triton_backend/tables/sm90.json", ALL),
        ("nsa/compression.py", ALL),
        ("nsa/__init__.py", ALL),
        ("nsa/model.py", ["train-step"]),
        ("nsa/loss.py", ["train-step"]),
        ("nsa/train/trainer.py", ["train-step"]),
        ("nsa/train/__init__.py", ["train-step"]),
        ("nsa/train/needle.py", []),
        ("nsa/paged/cache.py", ["train-step"]),  # the model can generate with one
        ("nsa/generate.py", []),
    ],
)
def test_a_change_reaches_the_cases_that_run_it(
    name: str, modes: list[str], changed: Callable[[str, str | None], list[str]]
) -> None:
    assert changed(name, (repository.ROOT / name).read_text() + "\n") == modes


def test_a_module_that_only_one_side_has_reaches_what_imports_it(tmp_path: Path) -> None:
    base, head = side(tmp_path / "base"), side(tmp_path / "head")
    for one, attention in ((base, ""), (head, "def f():\n    from nsa.new import g\n")):
        (one.folder / "nsa").mkdir(parents=True)
        (one.folder / "nsa" / "__init__.py").write_text("")
        (one.folder / "nsa" / "attention.py").write_text(attention)
    (head.folder / "nsa" / "new.py").write_text("def g(:")
    assert reach.changed_files(base, head) == ["nsa/attention.py", "nsa/new.py"]
    (base.folder / "nsa" / "attention.py").write_text((head.folder / "nsa" / "attention.py").read_text())
    assert reach.changed_files(base, head) == ["nsa/new.py"]
    assert [one.mode for one in reach.reached(KEYS, base, head)] == ALL, "imported in a function, and broken"
    assert reach.reached(KEYS, base, base) == []


@pytest.mark.parametrize("mode", ALL)
def test_what_a_case_runs_is_what_reach_says(mode: str) -> None:
    """Every file of nsa/ in which a function runs while the case is prepared and called."""
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(repository.ROOT / "nsa")):
            ran.add(frame.f_code.co_filename)

    one = a_case(mode)
    sys.setprofile(note)
    try:
        prepare(one, "cpu").call()
    finally:
        sys.setprofile(None)
    here = side(repository.ROOT)
    modules = reach._modules(here)
    allowed = {str(modules[name]) for name in reach._run(here, reach._entries(one)) if name in modules}
    assert ran
    assert ran <= allowed, sorted(ran - allowed)


def a_case(mode: str) -> Key:
    """The shortest of the CPU's suite."""
    planned = suite.planned(suite.table("cpu"), quick=True, backend="torch", on_gpu=False)
    found = [one for one in planned if one.mode == mode and one.implementation == "nsa"]
    return min(found, key=lambda one: one.batch * one.num_keys)

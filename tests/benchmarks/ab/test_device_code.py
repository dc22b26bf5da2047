"""Two versions run the same on a GPU, or they do not: said without one, by what is compiled and how it is launched."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from benchmarks.ab import device_code
from benchmarks.ab.checkout import Sources
from benchmarks.ab.result import Side
from benchmarks.cases.key import Key
from harness import repository
from nsa import NSAConfig

pytest.importorskip("triton", reason="compiles Triton kernels")

ARCHITECTURE = 80
KEY = Key("part-gated-sum", "nsa", "auto", "bfloat16", 1, 64, 64, 2, 1, 32, 32, dataclasses.asdict(NSAConfig()))
FILE = "nsa/triton_backend/gated_sum.py"


def sources(folder: Path, old: str = "", new: str = "") -> Sources:
    """This working tree's nsa/, with one text replaced in the kernel's file."""
    shutil.copytree(repository.ROOT / "nsa", folder / "nsa", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return Sources(Side("x", None, None, ""), folder, repository.ROOT)


CHANGES = {
    "a comment": ("import triton\n", "# moved\n\nimport triton\n", True),
    "an instruction": ("total = _gate(GATES, row, 0, real) *", "total = 2 * _gate(GATES, row, 0, real) *", False),
    "the grid": ("_forward[cdiv(num_rows, ROWS),]", "_forward[cdiv(num_rows, ROWS) + 1,]", False),
    "an operator of PyTorch": ("out = torch.empty_like(o_cmp)", "out = torch.zeros_like(o_cmp)", False),
}
"""What is changed in the file -> (old, new, whether the device runs the same)."""


def test_what_the_device_runs_decides_and_what_the_source_says_does_not(tmp_path: Path) -> None:
    as_it_is = device_code.of(sources(tmp_path / "as it is"), KEY, ARCHITECTURE)
    assert as_it_is.why is None
    for what, (old, new, same) in CHANGES.items():
        changed = device_code.of(sources(tmp_path / what, old, new), KEY, ARCHITECTURE)
        assert changed.why is None, what
        assert changed.same(as_it_is) == same, what


def test_what_cannot_be_compiled_is_not_known_and_says_why(tmp_path: Path) -> None:
    broken = device_code.of(sources(tmp_path, "import triton\n", "import triton_of_old\n"), KEY, ARCHITECTURE)
    assert (broken.sha256, broken.why) == (None, "ModuleNotFoundError: No module named 'triton_of_old'")
    assert not broken.same(broken)
    step = dataclasses.replace(KEY, mode="train-step")
    assert device_code.of(sources(tmp_path / "step"), step, ARCHITECTURE).why == (
        "train-step is not decided by its kernels alone"
    )


def test_lines_that_name_the_source_are_left_out_of_ptx() -> None:
    from benchmarks.ab import device_code_worker

    ptx = (
        '.target sm_80, debug\n\t.file 1 "a.py"\n\t.loc 1 20 3\n\tadd.s32 %r1; // a\n\t.section\t.debug_info\n{ .b8 1 }'
    )
    assert device_code_worker.without_source(ptx) == "\tadd.s32 %r1; // a"

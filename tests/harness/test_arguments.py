"""An option is taken by its whole name alone; the error names the nearest one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import benchmarks.__main__
import containers.__main__
import nsa.train.__main__
import nsa.train.needle
import regression.__main__
from harness.arguments import unrecognised
from tests.mutants import __main__ as mutants

WRONG: list[tuple[Callable[[list[str]], object], str, str]] = [
    (benchmarks.__main__.main, "run --case decode", "--cases"),
    (benchmarks.__main__.main, "run --quik", "--quick"),
    (benchmarks.__main__.main, "report --ou=here", "--out"),
    (regression.__main__.main, "run step5-stall --devic cpu", "--device"),
    (containers.__main__.main, "pipeline --famly a100", "--family"),
    (mutants.main, "run --are train", "--area"),
    (nsa.train.__main__.main, "run --profile train_showcase --step 3", "--steps"),
    (nsa.train.__main__.main, "status --out here", ""),
    (nsa.train.needle.main, "--step 3", ""),
]


@pytest.mark.parametrize(("command", "words", "near"), WRONG, ids=[words for _, words, _ in WRONG])
def test_an_option_is_not_abbreviated(
    command: Callable[[list[str]], object], words: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(words.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    if near:
        assert said.endswith(f"(did you mean {near}?)")


def test_what_resembles_no_option_gets_no_hint() -> None:
    assert unrecognised(["--xyz", "1"], ["--cases"]) == "unrecognized arguments: --xyz 1"
    assert unrecognised(["--case=x"], ["--cases"]) == "unrecognized arguments: --case=x (did you mean --cases?)"

"""An option is taken by its whole name alone; the error names the nearest one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import benchmarks.__main__
import containers.__main__
import nsa.train.__main__
import nsa.train.needle
import regression.__main__
from harness.arguments import check, declared, file_of, unrecognised
from harness.repository import ROOT
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


@pytest.mark.parametrize("command", sorted(benchmarks.__main__.COMMANDS))
def test_noxfile_knows_every_option_of_the_benches(command: str) -> None:
    (commands,) = (action for action in benchmarks.__main__.parser()._actions if isinstance(action.choices, dict))
    assert set(commands.choices[command]._option_string_actions) <= declared(file_of("benchmarks", command))


def test_noxfile_knows_every_option_of_the_other_commands() -> None:
    parsers = {
        "regression": regression.__main__.parser(),
        "tests/mutants": mutants.parser(),
        "nsa/train": nsa.train.__main__._parser(),
    }
    for folder, parser in parsers.items():
        (commands,) = (action for action in parser._actions if isinstance(action.choices, dict))
        for sub in commands.choices.values():
            assert set(sub._option_string_actions) <= declared(ROOT / folder / "__main__.py")


def test_words_of_other_programs_and_values_are_not_looked_at() -> None:
    check(["pytest", "--whatever"])
    check(["benchmarks", "run", "--cases", "a-case", "-x", "--"])
    with pytest.raises(ValueError, match=r"unrecognized arguments: --casez=a \(did you mean --cases\?\)"):
        check(["benchmarks", "run", "--casez=a"])


def test_what_resembles_no_option_gets_no_hint() -> None:
    assert unrecognised(["--xyz", "1"], ["--cases"]) == "unrecognized arguments: --xyz 1"
    assert unrecognised(["--case=x"], ["--cases"]) == "unrecognized arguments: --case=x (did you mean --cases?)"

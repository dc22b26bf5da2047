"""The list is whole, and every file says what its row says."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from harness.repository import ROOT
from regression import __main__ as cli
from regression import listing
from regression.contract import Needs


def test_every_incident_is_there_and_can_be_run() -> None:
    for incident in listing.load(listing.IDS):
        module = sys.modules[listing.module_of(incident.id)]
        for function in ("faulty", "product", "inject"):
            assert callable(getattr(module, function)), f"{incident.id} has no {function}"
        assert (module.__doc__ or "").startswith(f"{incident.id}"), f"{incident.id}: its docstring begins with its id"


@pytest.mark.parametrize("file", ["README.md", "CHANGELOG.md"])
def test_the_number_that_is_told_is_theirs(file: str) -> None:
    assert re.findall(r"\b(\d+) (?:incidents|bugs reported)", (ROOT / file).read_text()) == [str(len(listing.IDS))]


def test_what_measures_throughput_runs_alone() -> None:
    for incident in listing.load(listing.IDS):
        measures = hasattr(sys.modules[listing.module_of(incident.id)], "clock_s")
        assert incident.alone == measures, incident.id


def test_what_only_two_gpus_show_is_no_pass_on_fewer() -> None:
    ddp, nccl = listing.load(["grad-none-ddp", "grad-none-nccl"])
    assert (ddp.needs, nccl.needs) == (Needs.CPU, Needs.TWO_GPUS)


def test_table_has_a_row_for_each() -> None:
    lines = listing.table(listing.load(["step5-stall", "loader-stall"]), 200).splitlines()
    assert lines[0].split() == ["id", "symptom", "cause", "detector", "expects", "since"]
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == ["step5-stall", "loader-stall"]
    assert "2026-11" in lines[1]


@pytest.mark.parametrize("width", [40, 80, 111, 112, 120, 174, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = listing.table(listing.load(listing.IDS), width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in listing.IDS] == [*listing.IDS]


def test_a_narrow_terminal_loses_nothing() -> None:
    incidents = listing.load(listing.IDS)
    text = "".join(listing.table(incidents, 60).split())
    for one in incidents:
        assert all("".join(cell.split()) in text for cell in (one.id, one.symptom, one.cause, one.detector))


def test_a_pipe_gets_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(listing.IDS)
    assert [line.split("\t")[0] for line in lines] == ["id", *listing.IDS]


def test_a_wrong_id_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="no incident is called 'dup-block'; did you mean 'dup-blocks'"):
        listing.load(["dup-block"])


def test_a_part_of_an_id_chooses_all_that_contain_it() -> None:
    assert listing.containing("step5") == ["step5-stall"]
    assert listing.containing("step5 or loader") == ["step5-stall", "loader-stall"]
    assert listing.containing("stall") == [incident_id for incident_id in listing.IDS if "stall" in incident_id]
    for text in ("step9", "", " or "):
        with pytest.raises(ValueError, match="-k: no incident's id contains"):
            listing.containing(text)


def test_a_file_that_describes_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(INCIDENT=SimpleNamespace(id="other"))
    monkeypatch.setitem(sys.modules, "regression.incidents.tie_break", other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must describe 'tie-break'; it says 'other'"):
        listing.load(["tie-break"])


def test_a_file_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "regression.incidents.tie_break", None)
    with pytest.raises(ValueError, match="tie-break cannot be read"):
        listing.load(["tie-break"])

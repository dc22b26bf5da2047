"""An injected fault that the run never enters is an error, whatever the run says of itself."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from regression import __main__ as cli
from regression import child, listing
from regression.contract import ReproVerdict
from regression.injection import Fault, NeverEnteredError, injected
from regression.runner import Finding, Repro
from tests.regression import repros
from tests.regression.test_ledger import PACE


class Product:
    """Two functions and a property that a fault can take the place of."""

    @staticmethod
    def called() -> str:
        return "sound"

    @property
    def read(self) -> str:
        return "sound"


FAULTS = (Fault(Product, "called", lambda: "faulty"), Fault(Product, "read", property(lambda self: "faulty")))


def test_what_is_entered_stands_until_the_end() -> None:
    with injected(*FAULTS):
        assert Product.called() == "faulty"
    assert Product.called() == "sound"
    with injected(*FAULTS):
        assert Product().read == "faulty"


def test_what_is_never_entered_is_an_error() -> None:
    with pytest.raises(NeverEnteredError, match=r"Product\.called, Product\.read"), injected(*FAULTS):
        pass
    with pytest.raises(NeverEnteredError, match="nothing"), injected():
        pass
    with pytest.raises(KeyError), injected(*FAULTS):  # which says more
        raise KeyError


def test_what_a_forked_process_enters_counts() -> None:
    with injected(*FAULTS):
        child = os.fork()
        if child == 0:
            Product.called()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_a_run_that_never_enters_its_fault_is_no_red_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red would be taken for a detector that fired, and green for a sound product: the exit code is another one."""
    monkeypatch.setattr(listing, "IDS", ("a-repro",))
    monkeypatch.setattr(listing, "module_of", lambda _id: repros.__name__)
    code = cli.main(["run", "--device", "cpu", "--inject", "a-repro", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    summary = json.loads(said.splitlines()[-1])
    assert code == 2
    assert (summary["red"], summary["never_entered"]) == (["a-repro"], ["a-repro"])
    assert "never entered the fault in tests.regression.repros.segfaults" in said


def test_a_faulty_variant_that_never_enters_its_fault_is_not_caught() -> None:
    evidence = child.of_exception(NeverEnteredError("the run never entered the fault in x.y"))
    incident = replace(repros.INCIDENT, expects=ReproVerdict.CRASHED, says="never entered")
    finding = Finding(Repro(incident, "faulty", "cpu"), evidence, PACE)
    assert not finding.ok
    assert finding.never_entered


def test_every_incident_puts_its_fault_in_by_this_door() -> None:
    """So that the rule holds for each of them: nothing is run here, so nothing is entered."""
    for incident_id in listing.IDS:
        module = importlib.import_module(listing.module_of(incident_id))
        with pytest.raises(NeverEnteredError), module.inject():
            pass

"""What `export` writes, `import` brings back without loss, also once another tool has rewritten it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nsa
from benchmarks.__main__ import main
from benchmarks.cases import inputs, replayed
from benchmarks.cases.key import NSA
from benchmarks.cases.outcome import CaseOutcome, Correctness, OracleCheck
from benchmarks.history import run_file
from benchmarks.history.records import Anchor, Record
from benchmarks.history.samples import SampleSummary
from benchmarks.timing.clocks import ClockSummary
from benchmarks.traces import dataset, definition, trace
from benchmarks.traces.dataset import Dataset
from tests.benchmarks.history.test_run_file import EVERYTHING
from tests.benchmarks.synthetic import CONFIG, FINGERPRINT, failed, key, passed

positive = st.floats(1e-6, 1e12).map(lambda x: float(f"{x:.7g}"))
"""As a run's file keeps it."""
errors = st.none() | st.floats(0, 1).map(lambda x: float(f"{x:.3g}"))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Any record that has a Trace."""
    mode = draw(st.sampled_from(sorted(definition.KINDS)))
    is_nsa, length = draw(st.booleans()), draw(st.integers(8, 10**6))
    config = {**dataclasses.asdict(CONFIG), "w": draw(st.integers(1, 512))}
    the_key = key(
        mode,
        NSA if is_nsa else draw(st.sampled_from(["sdpa-flash", "fla-nsa", "../$x", "naïve"])),
        length=length,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        inputs=draw(st.sampled_from(inputs.KINDS)),
        cache=draw(st.sampled_from(["warm", "cold"])),
        launch=draw(st.sampled_from(["eager", "graph"])),
        config=config if is_nsa or draw(st.booleans()) else None,
    )
    fingerprint = dataclasses.replace(FINGERPRINT, utc=f"2026-01-02T03:04:{draw(st.integers(10, 59))}Z")
    command, outcome = draw(texts), draw(st.sampled_from(list(trace.STATUS)))
    checks = tuple(OracleCheck(name, draw(errors), 0.5) for name in draw(st.sets(st.sampled_from("oqkv"), min_size=1)))
    if outcome is not CaseOutcome.PASSED:
        reason = draw(texts.filter(bool))
        found = Correctness(8, checks, draw(texts)) if draw(st.booleans()) else None
        return Record(the_key, outcome, reason, fingerprint, command, found)
    green = Correctness(8, tuple(OracleCheck(one.name, 0.25, 0.5) for one in checks), draw(texts), 3, draw(st.none()))
    latency_ms = draw(positive)
    return Record(
        the_key, outcome, None, fingerprint, command, green,
        latency_ms=latency_ms,
        interval_ms=draw(st.sampled_from([None, (latency_ms, latency_ms)])),
        samples=draw(st.sampled_from([None, SampleSummary.of((latency_ms,) * 6)])),
        clocks=draw(st.sampled_from([None, ClockSummary(1200, 1500.0, 402.5, 61, {"power_cap": 2})])),
        tokens_per_s=draw(st.none() | positive),
        compile_s=draw(st.none() | positive),
        unmet=draw(st.none() | texts),
        anchor=draw(st.sampled_from([None, Anchor("0" * 16, "2" * 16)])),
    )  # fmt: skip


def full(found: Sequence[Record]) -> Counter[str]:
    return Counter(map(run_file.full_line, found))


@given(st.lists(records(), min_size=1, max_size=5))
def test_nothing_is_lost(tmp_path_factory: pytest.TempPathFactory, found: list[Record]) -> None:
    folder, exported = tmp_path_factory.mktemp("exported") / "set", Dataset()
    for record in found:
        exported.add_record(record)
    exported.write(folder)
    assert not exported.left_out
    back, refused = dataset.read(folder)
    assert refused == []
    assert full(back) == full(found)


@given(records())
def test_a_trace_with_every_default_written_out_is_the_same(found: Record) -> None:
    rewritten = trace.encode(found)
    rewritten["evaluation"] = {"correctness": None, **rewritten["evaluation"]}
    if performance := rewritten["evaluation"].get("performance"):
        rewritten["evaluation"]["performance"] = {**performance, "reference_latency_ms": 0.0, "speedup_factor": 0.0}
    assert full([trace.decode(json.loads(json.dumps(rewritten)))]) == full([found])


@given(records(), st.data())
def test_a_value_that_was_changed_is_named(found: Record, data: st.DataObject) -> None:
    """Every value that the format has of a record; the log then says something else."""
    made = trace.encode(found)
    leaves = [path for path in _leaves(made) if path != ("evaluation", "log")]
    path = data.draw(st.sampled_from(leaves))
    node: Any = made
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = "changed"
    with pytest.raises(ValueError, match=r"^trace\.") as raised:
        trace.decode(made)
    assert str(raised.value).startswith(f"trace.{'.'.join(path)} is not what the record in evaluation.log says")


def _leaves(node: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(node, dict):
        return [above]
    return [leaf for name, below in node.items() for leaf in _leaves(below, (*above, name))]


def test_a_figure_stands_only_where_there_is_one() -> None:
    """No error of 0 that was not computed, no time of the reference that was not measured."""
    green, red = (
        trace.encode(one)["evaluation"] for one in (passed(key(), 2.5), failed(key(), CaseOutcome.CRASHED, "x"))
    )
    assert green["performance"] == {"latency_ms": 2.5}
    assert green["correctness"]["max_absolute_error"] == green["correctness"]["max_relative_error"] == "NaN"
    assert green["correctness"]["extra"] == {"relative_errors": {"o": {"error": 1e-7, "budget": 2e-7}}}
    assert "performance" not in red
    assert "correctness" not in red
    assert trace.encode(EVERYTHING.__class__(**{**vars(EVERYTHING), "key": key()}))["solution"] == "nsa-torch"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (passed(key("part-scores")), "mode part-scores"),
        (passed(key("train-step", model="showcase")), "mode train-step"),
        (failed(key(), CaseOutcome.UNSUPPORTED, "no"), "outcome UNSUPPORTED"),
        (failed(key(), CaseOutcome.THROTTLED, "hot"), "outcome THROTTLED"),
        (passed(key(config={"l": 32, "x": 1})), "settings that are none of NSA's"),
    ],
)
def test_what_has_no_place_there_is_counted(record: Record, why: str) -> None:
    found = Dataset()
    found.add_record(record)
    assert found.left_out == {why: 1}
    assert found.traces == {}


def test_every_kind_of_inputs_is_described() -> None:
    assert {*inputs.KINDS, replayed.KIND} <= set(definition._INPUTS)


def test_the_command_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases of every suite, with the records that there are; a second import adds nothing."""
    results, folder, back = tmp_path / "results", tmp_path / "set", tmp_path / "back"
    path = run_file.create(results, FINGERPRINT)
    kept = [passed(key()), failed(key("decode", "sdpa-flash"), CaseOutcome.INCORRECT, "o: error 1 > 0")]
    for record in [*kept, passed(key("part-scores"))]:
        run_file.append(path, record)
    assert main(["export", str(folder), "--results", str(results)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["traces"], told["left_out"]) == (2, {"mode part-scores": 1})
    assert told["definitions"] == len(list((folder / "definitions").rglob("*.json")))
    assert told["workloads"] == sum(len(p.read_text().splitlines()) for p in (folder / "workloads").rglob("*.jsonl"))
    for new, known in ((2, 0), (0, 2)):
        assert main(["import", str(folder), "--out", str(back)]) == 0
        assert json.loads(capsys.readouterr().out) == {"new_records": new, "known_records": known, "refused": 0}
    found, damaged = run_file.read_all(back)
    assert full(found) == full(kept)
    assert damaged == []


def test_a_bad_trace_is_named_and_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Dataset()
    made.add_record(passed(key()))
    made.write(tmp_path / "set")
    (path,) = (tmp_path / "set" / "traces").rglob("*.jsonl")
    foreign = {**trace.encode(passed(key())), "evaluation": {"status": "PASSED", "log": "warm-up done"}}
    with path.open("a") as file:
        file.write('{"torn\n[]\n' + json.dumps(foreign) + "\n")
    (path.parent / "link.jsonl").symlink_to(path)
    assert main(["import", str(tmp_path / "set"), "--out", str(tmp_path / "back")]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == {"new_records": 1, "known_records": 0, "refused": 4}
    for number, why in ((2, "Unterminated string"), (3, "is no trace"), (4, "only what `export` wrote")):
        assert f"{path.name}:{number}: " in said.err
        assert why in said.err
    assert "link.jsonl: is no plain file" in said.err


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["export", str(tmp_path), "--results", str(tmp_path / "none")]) == 2
    assert "FOLDER must be new or an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert main(["import", str(tmp_path)]) == 2
    assert "FOLDER must hold a folder `traces`" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dataset.os, "fsync", full_disk)
    assert main(["export", str(tmp_path / "set"), "--results", str(tmp_path / "none")]) == 2
    assert "FOLDER" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", definition.KINDS)
@pytest.mark.parametrize("is_nsa", [True, False], ids=["nsa", "dense"])
def test_the_reference_computes_the_case(mode: str, is_nsa: bool) -> None:
    """With the inputs of the Definition in its order; outputs in its order, of its shapes."""
    the_key = key(mode, NSA if is_nsa else "sdpa-math")
    made, work = definition.definition(the_key), definition.workload(the_key)
    problem = inputs.draw(the_key, "cpu")
    if is_nsa and mode == "decode":
        problem = inputs.with_compressed(problem, CONFIG)
    sizes = {**work["axes"], **{name: axis["value"] for name, axis in made["axes"].items() if "value" in axis}}
    d_o = torch.randn(*(sizes[axis] for axis in made["outputs"]["o"]["shape"]))
    given = [{**problem.tensors, "d_o": d_o}[name] for name in made["inputs"]]
    for name, x in zip(made["inputs"], given, strict=True):
        assert list(x.shape) == [sizes[axis] for axis in made["inputs"][name]["shape"]], name
    module: dict[str, Any] = {}
    exec(made["reference"], module)
    found = module["run"](*given)
    outputs: dict[str, Tensor] = dict(
        zip(made["outputs"], found if isinstance(found, tuple) else (found,), strict=True)
    )
    for name, x in outputs.items():
        assert list(x.shape) == [sizes[axis] for axis in made["outputs"][name]["shape"]], name
    p = problem
    wide = nsa.NSAConfig(w=64)
    truth = (
        nsa.nsa_attention(p.q, p.k, p.v, p.gates, CONFIG, backend="reference")
        if is_nsa
        else nsa.window_attention(p.q, p.k, p.v, wide, backend="reference")[0]
    )
    torch.testing.assert_close(outputs["o"], truth)


def test_every_case_has_its_own_workload() -> None:
    """Cold and warm, graph and eager are other cases of one Definition; other inputs are another Definition."""
    keys = [key("decode", cache=cache, launch=launch) for cache in ("cold", "warm") for launch in ("eager", "graph")]
    assert len({definition.workload(one)["uuid"] for one in keys}) == 4
    assert len({definition.name(one) for one in keys}) == 1
    for kind in (*inputs.KINDS[1:], "local"):
        assert definition.name(key(inputs=kind)) == f"{definition.name(key())}_{kind}"
        assert definition.definition(key(inputs=kind))["tags"][1] == f"inputs:{kind}"


def test_two_definitions_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "name", lambda _: "same")
    made = Dataset()
    made.add_case(key())
    with pytest.raises(ValueError, match="two cases with other definitions have the name same"):
        made.add_case(key(heads=8))

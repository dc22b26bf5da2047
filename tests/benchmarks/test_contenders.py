"""A contender gets a verdict, and a broken one is named and costs no figure but its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import contenders, worker
from benchmarks.__main__ import main
from benchmarks.baselines import BASELINES, UnsupportedError, contender, lucidrains
from benchmarks.baselines.contender import ContenderError
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.contenders import Contender, Verdict
from benchmarks.correctness import laws
from benchmarks.correctness.verify import IncorrectError, NonFiniteError
from benchmarks.history import run_file
from benchmarks.history.records import Record
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import attention
from benchmarks.workloads.prepare import prepare
from harness import watch
from tests.benchmarks.contender_packages import install, offer, reach, sound
from tests.benchmarks.synthetic import CONFIG, FINGERPRINT, failed, key, passed

PLAN = SamplingPlan(min_samples=3, min_time_s=0.0, wall_limit_s=5.0, warmup_calls=1)
SPARSE = ", config=CONFIG, block_indices=blocks"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


def of(name: str, mode: str = "prefill-forward", **changes: object) -> Key:
    return key(mode, name, **changes)  # type: ignore[arg-type]


def measured(*keys: Key, deadline_s: float | None = None) -> list[Record]:
    found = worker.run(keys, "cpu", PLAN, FINGERPRINT, lambda one: one.name, deadline_s=deadline_s, seed=5)
    return [one.record for one in found]


def test_sound_contenders_are_measured_beside_nsa(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, monkeypatch, my_dense=sound("my-dense"), my_nsa=sound("my-nsa", "sparse", SPARSE))
    config = dataclasses.asdict(CONFIG)
    records = measured(
        of("my-dense", "prefill-forward-backward"),
        of("my-nsa", config=config),
        key(),
        of("my-nsa", "decode", config=config),
    )
    assert [record.outcome for record in records] == [CaseOutcome.PASSED] * 4, [record.reason for record in records]
    checks = [[check.name for check in record.correctness.checks] for record in records if record.correctness]
    assert checks[0][:5] == ["law causality", "law batch", "law decode", "o", "dq"]
    assert checks[1][:6] == ["law causality", "law batch", "law decode", "law gates", "block_indices", "o"]
    assert not any("law" in name for name in checks[2])


FORMS = {
    "shape": "lambda p: dense(p)[..., :-1]",
    "dtype": "lambda p: dense(p).double()",
    "tuple": "lambda p: (dense(p), None)",
}
WRONG: dict[str, tuple[str, str, type[Exception], str]] = {
    "form-shape": (FORMS["shape"], "", IncorrectError, r"the shape of the output must be \[2, 64, 4, 16\]"),
    "form-dtype": (FORMS["dtype"], "", IncorrectError, "the dtype of the output must be torch.float32"),
    "form-type": (FORMS["tuple"], "", IncorrectError, r"a tensor \[2, 64, 4, 16\] was to be returned; got tuple"),
    "nan": ("lambda p: dense(p) * float('nan')", "", NonFiniteError, "o holds 8192 values that are not finite"),
    "future": ("lambda p: dense(p) + p.v.mean()", "", IncorrectError, "law causality: .* come after them"),
    "batch": ("lambda p: dense(p) + p.v[:1, :1, :1]", "", IncorrectError, "law batch: .* beside another"),
    "decode": (
        "lambda p: dense(p) if p.q.shape[1] > 1 else p.v[:, -1:].repeat_interleave(2, 2)",
        "", IncorrectError, "law decode: .* as the last row of a prefill",
    ),
    "gates": ("lambda p: sparse(type(p)(p.q, p.k, p.v, p.gates.softmax(-1)))", SPARSE, IncorrectError, "law gates: "),
    "oracle": ("lambda p: dense(p) * 1.001", "", IncorrectError, "^o: error 1.00e-03 > budget"),
    "blocks": (
        "sparse", SPARSE.replace("blocks", "lambda p: blocks(p).flip(-1)"), IncorrectError,
        "block_indices: error not finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_contender_is_refused_with_what_is_wrong(
    fault: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, more, error, message = WRONG[fault]
    name = f"wrong-{fault}"
    install(site, monkeypatch, **{name.replace("-", "_"): sound(name, call, more)})
    the_key = of(name, config=dataclasses.asdict(CONFIG) if more else None)
    with pytest.raises(error, match=message):
        attention.prepare(the_key, "cpu").check(0)


def test_a_broken_contender_costs_no_other_figure(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises, ends its process, or changes what its process computes with."""
    raises = sound("raises", "lambda p: 1 / 0")
    dies = sound("dies", "lambda p: __import__('os')._exit(3)")
    meddles = sound("meddles").replace("CONTENDER", "torch.set_default_dtype(torch.float64)\nCONTENDER")
    install(site, monkeypatch, raises=raises, dies=dies, meddles=meddles)
    records = measured(of("raises"), key(), of("dies"), key(), of("meddles"), key())
    assert [record.outcome.value for record in records[1::2]] == ["PASSED"] * 3
    assert records[0].outcome is CaseOutcome.CRASHED
    assert records[0].reason == "ZeroDivisionError: division by zero"
    assert records[2].outcome is CaseOutcome.CRASHED
    assert records[2].reason == "the process that measured it ended with code 3"


def test_one_that_hangs_is_not_asked_again(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that measures, only the one that hangs has a deadline here: the others take what they take."""
    install(site, monkeypatch, hangs=sound("hangs", "lambda p: __import__('time').sleep(1e6)"))
    ask = worker._Worker.measure

    def measure(self: worker._Worker, the_key: Key, command: str, deadline_s: float) -> worker.Measurement:
        return ask(self, the_key, command, 1.0 if the_key.implementation == "hangs" else 600.0)

    monkeypatch.setattr(worker._Worker, "measure", measure)
    records = measured(of("hangs"), key(), of("hangs", "decode"))
    assert [record.outcome.value for record in records] == ["STALLED", "PASSED", "STALLED"]
    assert records[0].reason is not None
    assert records[0].reason.startswith("no answer within 1 s; it stood in ")
    assert records[2].reason == f"not tried: it gave no answer on {records[0].key.case}"


def test_what_it_refuses_is_not_served(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason of its author's, or UnsupportedError; any other error of it is a fault, unlike one of a package of
    which we wrote the call."""
    reason = 'lambda key: f"no {key.mode}" if key.mode == "decode" else None'
    refuse = (
        "from benchmarks.baselines import UnsupportedError\ndef refuse(p):\n    raise UnsupportedError('even heads')\n"
    )
    by_error = sound("by-error", "refuse").replace("CONTENDER", f"{refuse}CONTENDER")
    install(site, monkeypatch, by_reason=sound("by-reason", more=f", not_served={reason}"), by_error=by_error)
    with pytest.raises(UnsupportedError, match=r"^by-reason: no decode$"):
        prepare(of("by-reason", "decode"), "cpu")
    assert [check.name for check in prepare(of("by-reason"), "cpu").check(0).checks] == [
        "law causality", "law batch", "o",
    ]  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"^even heads$"):
        prepare(of("by-error"), "cpu").call()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import not_there_at_all", "cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("CONTENDER = 7", "must be a benchmarks.baselines.Baseline; got int"),
        (sound("other"), "calls itself 'other'; give both one name"),
        (sound("it", "sparse", ", config=CONFIG"), "config and block_indices must both be given"),
    ],
)
def test_what_is_no_contender_is_named(source: str, message: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, monkeypatch, it=source)
    monkeypatch.delitem(__import__("sys").modules, "it", raising=False)
    with pytest.raises(ContenderError, match=message) as raised:
        contender.load("it")
    assert str(raised.value).startswith("contender it: ")


def test_two_with_one_name_are_both_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(site, "first", {"same": "first:CONTENDER"})
    offer(site, "second", {"same": "second:CONTENDER", "sdpa-flash": "second:FLASH", "Loud": "second:LOUD"})
    reach(site, monkeypatch)
    found, refused = contenders.asked(["same", "Loud", "sdpa-flash"])
    assert found == []
    assert refused[0] == (
        "contender same: first:CONTENDER of first and second:CONTENDER of second have this name; uninstall one, or"
        " rename it"
    )
    assert refused[1].startswith("contender Loud: a name must be of a-z")
    assert refused[2] == "contender sdpa-flash: this is a name of the benches' own; rename the entry point"


def test_the_process_that_asks_imports_none(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A child does, whose end is told; a module that hangs is given up."""
    monkeypatch.setattr(watch, "IMPORT_FLOOR_S", 0.0)
    install(
        site, monkeypatch,
        ends="import os, sys; print('bye', file=sys.stderr, flush=True); os._exit(4)",
        my_nsa=sound("my-nsa", "sparse", SPARSE),
    )  # fmt: skip
    found, refused = contenders.asked(["my-nsa", "ends", "fla-nsa"])
    assert [one.name for one in found] == ["my-nsa", "fla-nsa"]
    assert found[0].config == dataclasses.asdict(CONFIG)
    assert refused == ["contender ends: its import ended the process, status 4: bye"]
    assert "my_nsa" not in __import__("sys").modules


def test_an_import_that_hangs_is_given_up(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, monkeypatch, slow="import time; time.sleep(1e6)")
    monkeypatch.setattr(watch, "IMPORT_FLOOR_S", 1.0)
    monkeypatch.setattr(contenders, "_KNOWN_IMPORT_S", 0.0)
    _, (refused,) = contenders.asked(["slow"])
    assert refused.startswith("contender slow: its import gave no answer within ")


def test_names_that_nobody_has_are_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contender, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match=r"--contenders: no installed package has an entry point"):
        contenders.asked(["all"])
    with pytest.raises(ValueError, match=r"'fla-nas' is none of .*; did you mean fla-nsa?"):
        contenders.asked(["fla-nas"])


def test_the_cases_of_a_contender() -> None:
    """One before NSA's own, where an attention is timed; none twice."""
    keys = [key(implementation="flex"), key(), key("decode"), key("part-scores"), key("train-step", model="showcase")]
    found = contenders.with_contenders(keys, [Contender("mine", {"l": 4}), Contender("flex", None)])
    assert [(one.mode, one.implementation) for one in found] == [
        ("prefill-forward", "flex"), ("prefill-forward", "mine"), ("prefill-forward", NSA),
        ("decode", "mine"), ("decode", "flex"), ("decode", NSA), ("part-scores", NSA), ("train-step", NSA),
    ]  # fmt: skip
    assert found[1].config == {"l": 4}
    assert found[1].backend_asked is None


def timed(the_key: Key, low_ms: float, high_ms: float) -> Record:
    return dataclasses.replace(passed(the_key, (low_ms + high_ms) / 2), interval_ms=(low_ms, high_ms), other_load=0.0)


OURS = timed(key(), 10.0, 12.0)
MINE = key(implementation="mine", config=dataclasses.asdict(CONFIG))
OTHER = key(implementation="mine", config={**dataclasses.asdict(CONFIG), "w": 4})


@pytest.mark.parametrize(
    ("record", "found", "why"),
    [
        (timed(MINE, 4.0, 9.9), Verdict.FASTER, "6.95 ms, NSA 11 ms: 1.58 times as fast as NSA"),
        (timed(MINE, 12.1, 14.0), Verdict.SLOWER, "13.05 ms, NSA 11 ms: 0.84 times as fast as NSA"),
        (timed(MINE, 9.0, 10.1), Verdict.UNDECIDED, "1.15 times as fast as NSA; the intervals overlap"),
        (dataclasses.replace(timed(MINE, 4.0, 9.9), other_load=1.5), Verdict.UNDECIDED, "load 1.5 of other processes"),
        (timed(OTHER, 4.0, 9.9), Verdict.OTHER_WORK, "as fast as NSA, with w=4"),
        (failed(MINE, CaseOutcome.INCORRECT, "o: error"), Verdict.WRONG, "o: error"),
        (failed(MINE, CaseOutcome.NONFINITE, "NaN"), Verdict.WRONG, "NaN"),
        (failed(MINE, CaseOutcome.STALLED, "hung"), Verdict.BROKEN, "hung"),
        (failed(MINE, CaseOutcome.CRASHED, "boom"), Verdict.BROKEN, "boom"),
        (failed(MINE, CaseOutcome.UNSUPPORTED, "no decode"), Verdict.NOT_SERVED, "no decode"),
        (failed(MINE, CaseOutcome.NOT_PRESENT, "no GPU"), Verdict.NOT_SERVED, "no GPU"),
        (failed(MINE, CaseOutcome.OUT_OF_MEMORY, "24 GiB"), Verdict.NOT_MEASURED, "24 GiB"),
    ],
)
def test_the_verdict(record: Record, found: Verdict, why: str) -> None:
    name = record.key.implementation
    (told,) = contenders.verdicts([OURS, record], [Contender(name, None)])[name].values()
    assert told[0] is found
    assert why in told[1]


def test_without_a_figure_of_ours_there_is_no_comparison() -> None:
    ours = failed(key(), CaseOutcome.INCORRECT, "o: error")
    assert contenders.verdict(timed(MINE, 4.0, 9.9), ours)[0] is Verdict.NOT_MEASURED
    assert contenders.verdict(timed(MINE, 4.0, 9.9), None)[0] is Verdict.NOT_MEASURED


def test_every_outcome_has_a_verdict() -> None:
    assert {*contenders._WITHOUT_FIGURE, CaseOutcome.PASSED} == set(CaseOutcome)


def test_a_package_with_other_semantics_is_not_served_and_says_why() -> None:
    assert BASELINES[lucidrains.NAME] is lucidrains.BASELINES[0]
    with pytest.raises(UnsupportedError, match=r"^lucidrains-nsa: it takes hidden states.* no first block is forced$"):
        lucidrains.BASELINES[0].require_served(key())
    assert contenders.with_contenders([key()], [Contender(lucidrains.NAME, None)])[0].name.endswith("/lucidrains-nsa")


def test_a_run_prints_a_verdict_and_names_a_contender_that_is_broken(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, monkeypatch, wrong=sound("wrong", "lambda p: 2 * dense(p)"), broken="1 / 0")
    case = "prefill-forward/8x2x64/b1/s512/float32"
    words = ["--quick", "--gpu", "cpu", "--contenders", "all", "--out", str(tmp_path)]
    assert main(["run", *words, "--cases", f"{case}/nsa,{case}/wrong"]) == 0
    said = capsys.readouterr()
    assert "contender broken: broken:CONTENDER cannot be imported: ZeroDivisionError" in said.err
    told = json.loads(said.out.splitlines()[-1])
    assert told["contenders"] == {"wrong": {case: "WRONG"}}
    assert told["red_baselines"] == {f"{case}/wrong": "INCORRECT"}
    assert [reason.split(":")[0] for reason in told["refused_contenders"]] == ["contender broken"]
    assert "wrong, beside NSA in this run:" in said.out
    (ours,) = (record for record in run_file.read_all(tmp_path)[0] if record.key.implementation == NSA)
    assert ours.outcome is CaseOutcome.PASSED
    assert "--contenders wrong " in ours.command


def test_laws_are_tried_where_rounding_decides_no_choice() -> None:
    """Two sequences, at most as long as all selected blocks together, of the case's own heads."""
    short = laws.short(key("decode", length=4096))
    assert (short.mode, short.batch, short.num_queries, short.num_keys) == ("prefill-forward", 2, 32, 32)
    assert laws.short(key(implementation="mine", length=4096)).num_keys == laws.SHORT_TOKENS
    assert (short.heads, short.num_kv_heads, short.head_dim_k) == (4, 2, 16)
    attend: Callable[[object], torch.Tensor] = lambda _: pytest.fail("called")  # noqa: E731
    assert laws.check(attend, key(), "cpu", serves=lambda _: False) == ()

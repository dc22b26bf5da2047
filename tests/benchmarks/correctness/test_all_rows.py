"""No row, tile or head of what was timed goes unseen: each is put in wrong, and the run ends with INCORRECT and 1."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from benchmarks import runner, worker
from benchmarks.__main__ import main
from benchmarks.baselines import BASELINES
from benchmarks.cases import inputs
from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.commands import run as bench_run
from benchmarks.correctness import all_rows, masked_attention
from benchmarks.correctness.verify import Answer
from benchmarks.history import run_file
from benchmarks.history.records import Record
from benchmarks.timing import peak
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import attention
from nsa import nsa_attention
from tests.benchmarks.synthetic import CONFIG, FINGERPRINT, key

PLAN = SamplingPlan(min_samples=2, min_time_s=0.0, wall_limit_s=5.0, warmup_calls=1)
SEES_NO_57 = 5
"""With this seed the rows that meet the oracle are others."""
CASE = "prefill-forward/8x2x64/b1/s512/float32"

Fault = Callable[[Tensor], Tensor]


def doubled(*where: int | slice) -> Fault:
    """The output [B, S, H, D] with these rows and heads twice as large."""

    def fault(o: Tensor) -> Tensor:
        factor = torch.ones_like(o[..., :1])
        factor[(slice(None), *where)] = 2.0
        return o * factor

    return fault


FAULTS = {
    "a row": doubled(100),
    "a tile": doubled(slice(256, 272), 3),
    "a head": doubled(slice(None), 5),
    "a head of a row": doubled(211, 2),
}


def faulty_nsa(fault: Fault) -> Callable[..., Any]:
    def attend(*arguments: Any, **options: Any) -> Any:
        found = nsa_attention(*arguments, **options)
        return (fault(found[0]), found[1]) if isinstance(found, tuple) else fault(found)

    return attend


@pytest.fixture
def short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process, where a fault can be put in, without what has no part in the verdict."""
    monkeypatch.setattr(worker, "run", runner.run)
    monkeypatch.setattr(peak, "measure", lambda _: None)
    monkeypatch.setattr(bench_run, "build_page", lambda results: results)
    monkeypatch.setattr(runner, "QUICK", PLAN)


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_part_of_512_rows_ends_a_run_with_1(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "nsa_attention", faulty_nsa(FAULTS[fault]))
    assert main(["run", "--quick", "--gpu", "cpu", "--cases", f"{CASE}/nsa", "--out", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["faults"] == [f"{CASE}/nsa"]
    ((record,), _) = run_file.read_all(tmp_path)
    assert record.outcome is CaseOutcome.INCORRECT


def test_a_wrong_row_of_a_baseline_is_incorrect(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BASELINES["sdpa-math"]
    wrong = dataclasses.replace(right, attend=lambda p: doubled(41)(right.attend(p)))
    monkeypatch.setitem(BASELINES, "sdpa-math", wrong)
    record = measured(key(implementation="sdpa-math", length=96))  # the oracle sees it first where it draws this row
    assert (record.outcome, (record.reason or "")[:1]) == (CaseOutcome.INCORRECT, "o")


def test_a_wrong_row_of_a_part_is_incorrect(monkeypatch: pytest.MonkeyPatch) -> None:
    right = nsa.window_attention

    def attend(*arguments: Any, **options: Any) -> Any:
        o, lse = right(*arguments, **options)
        return (o if options["backend"] == "reference" else doubled(41)(o)), lse

    monkeypatch.setattr(nsa, "window_attention", attend)
    assert measured(key("part-window", length=96)).outcome is CaseOutcome.INCORRECT


def measured(the_key: Key, **options: Any) -> Record:
    return runner.measure(the_key, "cpu", PLAN, FINGERPRINT, "command", **options).record


class _WrongRow(torch.autograd.Function):
    """The same values; of the gradient one row [row] twice as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: int) -> Tensor:
        ctx.row = row
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return doubled(ctx.row)(gradients[0]), None


@pytest.mark.parametrize("name", ["q", "gates"])
def test_a_wrong_row_of_a_gradient_is_incorrect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen also where the rows that meet the oracle have no gradient there."""

    def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *arguments: Any, **options: Any) -> Any:
        given = {"q": q, "k": k, "v": v, "gates": gates}
        given[name] = _WrongRow.apply(given[name], 57)
        return nsa_attention(*given.values(), *arguments, **options)

    monkeypatch.setattr(attention, "nsa_attention", attend)
    record = measured(key("prefill-forward-backward", length=96, dtype="bfloat16"), seed=SEES_NO_57)
    assert (record.outcome, f"d{name}, all rows: error" in (record.reason or "")) == (CaseOutcome.INCORRECT, True)


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_a_row_that_hardly_moves_the_whole_gradient_is_seen(name: str) -> None:
    """Four rows of 288 a sixth too large: within the budget of the tensor as a whole."""
    p = inputs.draw(key(length=288, dtype="bfloat16"), "cpu").map(Tensor.requires_grad_)
    o, aux = nsa_attention(p.q, p.k, p.v, p.gates, CONFIG, backend="torch", return_aux=True)
    rows = torch.arange(288)
    d_o = all_rows.output_gradient(o, rows, 1)
    found = torch.autograd.grad(o, (p.q, p.k, p.v, p.gates), d_o)
    gradients = dict(zip(("dq", "dk", "dv", "dgates"), found, strict=True))
    answer = Answer(o.detach(), d_o, gradients)
    assert all(check.passed for check in all_rows.compare_nsa(p, CONFIG, answer, aux.block_indices, rows).checks)
    wrong = gradients[name].clone()
    wrong[:, 120:124] *= 7 / 6
    answer = dataclasses.replace(answer, gradients={**gradients, name: wrong})
    assert (wrong - gradients[name]).norm() < 0.03 * gradients[name].norm()
    failed = [
        check.name
        for check in all_rows.compare_nsa(p, CONFIG, answer, aux.block_indices, rows).checks
        if not check.passed
    ]
    assert failed == [f"{name}, all rows"]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("prefill-forward-backward", "float32"),
        ("prefill-forward-backward", "float16"),
        ("part-scores", "bfloat16"),
        ("part-window", "float16"),
        ("memory", "bfloat16"),
    ],
)
def test_what_is_right_passes_and_says_what_was_compared(mode: str, dtype: str) -> None:
    record = measured(key(mode, length=96, batch=2, dtype=dtype), seed=7)
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert record.correctness is not None
    assert (record.correctness.seed, record.correctness.rows_compared) == (7, 192)
    assert "o, all rows, fresh inputs" in [check.name for check in record.correctness.checks]


def test_a_decode_step_is_seen_whole_by_the_oracle() -> None:
    correctness = measured(key("decode", length=96, batch=9)).correctness
    assert correctness is not None
    assert (correctness.rows_compared, correctness.rows_checked) == (9, 18)


def test_the_rows_are_new_in_each_run_and_the_seed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong row in the first check, on the inputs that are timed, where a few rows are drawn: not every seed sees
    it, and the one that did is in the record."""
    found = [measured(key(length=96)).correctness for _ in range(2)]
    assert None not in found
    seeds = {correctness.seed for correctness in found if correctness}
    assert len(seeds) == 2
    assert None not in seeds
    rows = {tuple(oracle_rows(seed)) for seed in range(1, 9)}
    assert len(rows) > 4


def oracle_rows(seed: int) -> list[int]:
    """The query rows that NSA's first check asks the oracle about."""
    asked: list[int] = []

    def notice(problem: Problem, config: object, answer: object, aux: object, picked: list[Any]) -> Correctness:
        asked.extend(row.query for row in picked)
        return Correctness(1, (), "torch")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.verify, "compare_nsa", notice)
        attention.prepare(key(length=96), "cpu").check(seed)
    return asked


@pytest.mark.usefixtures("short_run")
def test_the_command_of_a_record_draws_the_same_rows(tmp_path: Path) -> None:
    assert main(["run", "--quick", "--gpu", "cpu", "--cases", f"{CASE}/sdpa-flash", "--out", str(tmp_path)]) == 0
    ((first,), _) = run_file.read_all(tmp_path)
    words = first.command.split()
    assert words[:3] == ["python", "-m", "benchmarks"]
    assert main([*words[3:], "--out", str(tmp_path)]) == 0
    again = run_file.read_all(tmp_path)[0][1]
    assert first.correctness is not None
    assert first.correctness.seed is not None
    assert again.correctness == first.correctness
    assert again.command == first.command


def test_the_seed_of_the_timed_inputs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--gpu", "cpu", "--seed", "0"]) == 2
    assert "--seed must be above 0" in capsys.readouterr().err


def test_long_texts_are_compared_by_tiles_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows of each tile, a piece at a time, selected keys gathered: the same answer, and a wrong tile is seen."""
    p = inputs.draw(key(length=300), "cpu")
    o, aux = nsa_attention(p.q, p.k, p.v, p.gates, CONFIG, backend="torch", return_aux=True)
    every = all_rows.rows_to_compare(p, CONFIG, 1, backward=False)
    assert every.tolist() == list(range(300))
    whole = all_rows.compare_nsa(p, CONFIG, Answer(o), aux.block_indices, every)
    monkeypatch.setattr(masked_attention, "_GATHER_BEYOND", 10**9)
    masked = all_rows.compare_nsa(p, CONFIG, Answer(o), aux.block_indices, every)
    for one, other in zip(whole.checks, masked.checks, strict=True):
        assert one.passed
        assert one.error == pytest.approx(other.error, rel=0.5)
    monkeypatch.undo()
    monkeypatch.setitem(all_rows._MOST_PAIRS, "cpu", 1e3)
    monkeypatch.setitem(masked_attention._CHUNK_BYTES, "cpu", 8 * 4 * 300 * 3)  # a few rows
    rows = all_rows.rows_to_compare(p, CONFIG, 1, backward=False)
    monkeypatch.setitem(all_rows._MOST_PAIRS, "cpu", 5e3)
    assert torch.equal(all_rows.rows_to_compare(p, CONFIG, 1, backward=False, share=0.2), rows)
    tiles = {int(row) // 64 for row in rows}
    assert (tiles, len(rows)) == ({0, 1, 2, 3, 4}, 5)
    assert all(check.passed for check in all_rows.compare_nsa(p, CONFIG, Answer(o), aux.block_indices, rows).checks)
    for tile in tiles:
        wrong = doubled(slice(64 * tile, 64 * tile + 64), 1)(o)
        found = all_rows.compare_nsa(p, CONFIG, Answer(wrong), aux.block_indices, rows)
        assert [check.name for check in found.checks if not check.passed] == ["o, 5 of 300 rows"]


def other_row(blocks: Tensor, change: list[int]) -> Tensor:
    """Row 90 of the first head's group with these blocks."""
    wrong = blocks.clone()
    wrong[0, 90, 0] = torch.tensor(change, dtype=blocks.dtype)
    return wrong


@pytest.mark.parametrize(
    "change",
    [[0, 1, 10, 11], [0, 1, 2, 3], [0, 10, 10, 11], [11, 10, 10, 0], [0, 10, 11, -1], [0, 10, 11, 12], [-1, 0, 10, 11]],
    ids=["not the best", "forced ones left out", "twice", "descending", "too few", "future", "padding first"],
)
def test_one_row_of_wrong_blocks_is_seen(change: list[int]) -> None:
    p = inputs.draw(key(length=96), "cpu")
    _, aux = nsa_attention(p.q, p.k, p.v, p.gates, CONFIG, backend="torch", return_aux=True)
    blocks = other_row(aux.block_indices, change)
    rows = torch.arange(96)
    (right, *_), (wrong, *_) = (
        all_rows.compare_nsa(p, CONFIG, Answer(p.v.repeat_interleave(2, 2)), x, rows).checks
        for x in (aux.block_indices, blocks)
    )
    assert (right.name, right.passed, wrong.passed) == ("block_indices, all rows", True, False)


def test_a_forced_block_is_not_exchanged_for_a_good_one() -> None:
    """Whichever block stands in for the one before the current, the next best too, the choice is no legal one."""
    p = inputs.draw(key(length=96), "cpu")
    _, aux = nsa_attention(p.q, p.k, p.v, p.gates, CONFIG, backend="torch", return_aux=True)
    first, chosen, local, current = aux.block_indices[0, 90, 0].tolist()
    assert (first, local, current) == (0, 10, 11)
    for other in set(range(1, 10)) - {chosen}:
        blocks = other_row(aux.block_indices, [0, *sorted((chosen, other)), 11])
        check, *_ = all_rows.compare_nsa(
            p, CONFIG, Answer(p.v.repeat_interleave(2, 2)), blocks, torch.arange(96)
        ).checks
        assert not check.passed, other

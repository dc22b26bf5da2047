"""Replayed choices: what is timed was recorded, it meets the oracle, and without a recording there is no case."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nsa
from benchmarks import runner
from benchmarks.atlas import choices, record
from benchmarks.atlas.record import Sample
from benchmarks.cases import inputs, recorded, replayed
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.cases.recorded import DECODE_STEPS
from benchmarks.commands import options
from benchmarks.correctness import all_rows, tolerance
from benchmarks.correctness.oracle import QueryRow
from benchmarks.correctness.verify import Answer, IncorrectError
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import attention, parts, suite
from nsa import NSAConfig
from tests.benchmarks.atlas import model
from tests.benchmarks.atlas.test_choices import indices
from tests.benchmarks.synthetic import CONFIG, FINGERPRINT, key

PLAN = SamplingPlan(min_samples=2, min_time_s=0.0, wall_limit_s=5.0, warmup_calls=1)
TOKENS = 200


def steps(seed: int) -> tuple[tuple[int, ...], ...]:
    """Sixteen decode steps in the last block: two stretches of random legal choices."""
    own, draw = (TOKENS - 1) // CONFIG.l_sel, np.random.default_rng(seed)
    forced = [0, own - 1, own]
    return tuple(tuple(sorted([*forced, int(draw.integers(1, own - 1))])) for _ in range(16))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """results/ with an atlas of three heads, which the table names."""
    samples = tuple(Sample(TOKENS, 0, head, 192, True, steps(head)) for head in range(3))
    path = record.write(tmp_path, model.atlas(samples=samples))
    made = choices.of_heads([indices(TOKENS, 1), indices(TOKENS, 2)], [(0, 0), (1, 0), (1, 1)], CONFIG.l_sel)
    assert made is not None
    choices.write(tmp_path, path, made)
    table = dataclasses.replace(recorded.table(), atlas=path.name)
    monkeypatch.setattr(recorded, "table", lambda: table)
    monkeypatch.setenv("NSA_RESULTS", str(tmp_path))
    return tmp_path


def part(**changes: Any) -> Key:
    return key("part-selected", length=TOKENS, inputs="replayed", **changes)


def step(**changes: Any) -> Key:
    return key("decode", length=TOKENS, inputs="replayed", **changes)


@pytest.mark.usefixtures("stored")
def test_a_part_reads_the_recorded_blocks() -> None:
    wanted = [indices(TOKENS, 1)[:, 0], indices(TOKENS, 2)[:, 0], indices(TOKENS, 2)[:, 1]]
    work = parts.prepare(part(batch=2), "cpu")
    (read,) = (x for x in work.inputs.values() if not x.is_floating_point())  # [B, S, Hkv, n]
    heads = read.transpose(1, 2).flatten(0, 1).numpy()
    begin = next(i for i in range(3) if np.array_equal(heads[0], wanted[i]))
    for number, head in enumerate(heads):
        np.testing.assert_array_equal(head, wanted[(begin + number) % 3])
    assert work.redraw is not None
    before = read.clone()
    assert any(_redrawn(work.redraw, seed, read, before) for seed in range(1, 9)), "no seed changes what stands where"


def _redrawn(redraw: Callable[[int], object], seed: int, read: Tensor, before: Tensor) -> bool:
    redraw(seed)
    return not torch.equal(read, before)


@pytest.mark.usefixtures("stored")
def test_decode_steps_choose_the_recorded_blocks_one_after_the_other() -> None:
    the_key = step(batch=3)
    first = attention.prepare(the_key, "cpu")
    assert first.following is not None
    works = [first, *first.following()]
    assert len(works) == DECODE_STEPS
    wanted = [np.array(steps(head)[begin : begin + DECODE_STEPS]) for begin in (0, 8) for head in range(3)]
    taken = torch.stack([_chosen(work.inputs) for work in works])  # [steps, B, Hkv, n]
    heads = taken.flatten(1, 2).transpose(0, 1).numpy()
    begin = next(i for i in range(6) if np.array_equal(heads[0], wanted[i]))
    for number, head in enumerate(heads):
        np.testing.assert_array_equal(head, wanted[(begin + number) % 6])


def _chosen(given: Any, config: NSAConfig = CONFIG) -> Tensor:
    return nsa.select_blocks(given["q"], given["k_compressed"], config, num_keys=TOKENS)[:, 0]


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("the_key", [part(), step(batch=2), step(dtype="bfloat16")], ids=lambda one: one.case)
def test_it_is_measured_behind_the_oracle_and_says_what_it_replays(the_key: Key) -> None:
    measured = runner.measure(the_key, "cpu", PLAN, FINGERPRINT, "true")
    assert measured.record.outcome is CaseOutcome.PASSED, measured.record.reason
    assert measured.record.inputs_follow == inputs.followed(the_key)
    assert str(measured.record.inputs_follow).endswith(f"of {TOKENS} tokens in h200-2026-11-20-0123456789.json")


@pytest.mark.usefixtures("stored")
def test_a_part_that_reads_other_blocks_is_stopped() -> None:
    work = parts.prepare(part(), "cpu")
    (read,) = (x for x in work.inputs.values() if not x.is_floating_point())
    q, k, v = (x for x in work.inputs.values() if x.is_floating_point())
    assert work.check(3).passed
    assert work.recheck is not None

    def without_one() -> tuple[Tensor, ...]:
        return (nsa.selected_attention(q, k, v, read[..., :-1], CONFIG, backend="torch")[0],)

    with pytest.raises(IncorrectError):
        work.recheck(without_one, 4)


@pytest.mark.usefixtures("stored")
def test_blocks_after_the_query_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replayed.block_indices

    def later(*arguments: Any) -> Tensor:
        blocks = original(*arguments)
        blocks[:, 40, :, -1] += 1
        return blocks

    monkeypatch.setattr(replayed, "block_indices", later)
    measured = runner.measure(part(), "cpu", PLAN, FINGERPRINT, "true", seed=3)
    assert measured.record.outcome is CaseOutcome.INCORRECT
    assert "block_indices" in str(measured.record.reason)


@pytest.mark.parametrize("check", ["some rows", "all rows"])
def test_given_blocks_must_be_a_choice_and_need_not_be_the_best(check: str) -> None:
    problem = inputs.with_compressed(inputs.draw(key(length=TOKENS), "cpu"), CONFIG)
    row = QueryRow(0, 150)

    def passes(blocks: Tensor, given: bool) -> bool:
        if check == "some rows":
            return tolerance.block_sets(problem, problem, blocks, [row], CONFIG, given=given).passed
        o, _ = nsa.selected_attention(problem.q, problem.k, problem.v, blocks, CONFIG, backend="torch")
        rows = torch.tensor([row.query])
        found = all_rows.compare_nsa(problem, CONFIG, Answer(o), blocks, rows, given=given)
        return next(one for one in found.checks if one.name.startswith("block_indices")).passed

    best = nsa.select_blocks(problem.q, problem.k_compressed, CONFIG)
    other = best.clone()
    other[0, 150] = next(x for x in torch.arange(1, 16) if x not in best[0, 150])  # and forced ones
    other[0, 150, :, 0], other[0, 150, :, 2], other[0, 150, :, 3] = 0, 17, 18
    late = other.clone()
    late[0, 150, :, 3] = 19
    assert passes(best, given=False)
    assert passes(other, given=True)
    assert not passes(other, given=False)
    assert not passes(late, given=True)


def test_without_an_atlas_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dataclasses.replace(recorded.table(), atlas=None)
    monkeypatch.setattr(recorded, "table", lambda: table)
    for the_key in (part(), step()):
        assert "there is no atlas yet" in str(replayed.why_not(the_key))


def test_why_a_case_has_nothing_to_replay(stored: Path) -> None:
    assert replayed.why_not(part()) is None
    assert replayed.why_not(step()) is None
    assert "in part-selected and decode alone" in str(replayed.why_not(key(inputs="replayed")))
    assert "at least 16 channels" in str(replayed.why_not(step(head_dim_k=8)))
    assert "no choices at 96 tokens" in str(replayed.why_not(key("part-selected", length=96, inputs="replayed")))
    assert "8 decode steps there" in str(replayed.why_not(key("decode", length=96, inputs="replayed")))
    other = dataclasses.asdict(dataclasses.replace(CONFIG, n_sel=5))
    for the_key in (part(config=other), step(config=other)):
        assert "n = 5" in str(replayed.why_not(the_key))
    (path,) = (stored / choices.FOLDER).iterdir()
    path.write_text("{}")
    replayed._sequences.cache_clear()
    assert "no choices at 200 tokens" in str(replayed.why_not(part()))


SUITE = {
    **suite.table("cpu"),
    "parts": [{"heads": [4, 2], "head_dims": [16, 16], "lengths": [TOKENS], "quick": [TOKENS], "inputs": ["replayed"]}],
    "decode": [],
}


def test_a_suite_offers_what_is_stored(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "NSAConfig", lambda: CONFIG)
    planned = suite.planned(SUITE, quick=True, backend="torch", on_gpu=False)
    replays = [one for one in planned if one.inputs == "replayed"]
    assert [one.name for one in replays] == ["part-selected/4x2x16/b1/s200/float32/replayed/nsa"]
    assert suite.not_offered(SUITE, on_gpu=False) == {}
    monkeypatch.setenv("NSA_RESULTS", str(stored / "elsewhere"))
    again = suite.planned(SUITE, quick=True, backend="torch", on_gpu=False)
    assert not [one for one in again if one.inputs == "replayed"]
    (left_out,) = (not_offered := suite.not_offered(SUITE, on_gpu=False))
    assert "no choices at 200 tokens" in not_offered[left_out]
    with pytest.raises(ValueError, match="is not offered: no choices at 200 tokens"):
        options.chosen(again, ["*/replayed"], again, not_offered)

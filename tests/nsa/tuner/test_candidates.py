"""The tuner's choices, without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from nsa.triton_backend import tuning
from nsa.triton_backend.tuning import LaunchConfig
from nsa.tuner import candidates, trials
from nsa.tuner.candidates import Trial

OWN = LaunchConfig(64, 32, 4, 2)


def measured(latency_ms: float, spread_ms: float = 0.01, tuned: LaunchConfig = OWN) -> Trial:
    return Trial("scores", tuned, "measured", latency_ms, (latency_ms - spread_ms, latency_ms + spread_ms))


@pytest.mark.parametrize("architecture", [80, 86, 89, 90])
def test_a_table_is_written_as_it_is_read(architecture: int) -> None:
    table = tuning.table(architecture)
    assert candidates.text(table) == (tuning.TABLES / f"sm{architecture}.json").read_text(encoding="utf-8")


def test_candidates_begin_with_the_present_launch_and_are_distinct() -> None:
    found = candidates.candidates(replace(OWN, max_registers=168))
    assert found[0] == replace(OWN, max_registers=168)
    assert len(found) == len(set(found))
    assert replace(OWN, keys=64, num_warps=8, num_stages=1) in found


def test_no_candidate_leaves_what_a_tile_may_be() -> None:
    for own in (LaunchConfig(16, 16, 1, 1), LaunchConfig(128, 128, 8, 4)):
        for x in candidates.candidates(own):
            assert 16 <= x.rows <= 128
            assert 16 <= x.keys <= 128
            assert 1 <= x.num_warps <= 8
            assert 1 <= x.num_stages <= 4


def test_the_fastest_that_is_right_is_taken() -> None:
    other, third = replace(OWN, keys=64), replace(OWN, keys=16)
    trials = [measured(1.0), measured(0.8, tuned=other), measured(0.7, tuned=third), Trial("scores", OWN, "wrong")]
    assert candidates.best(trials).tuned == third


@pytest.mark.parametrize("other", [measured(0.99), measured(0.9, 0.2), measured(1.2), Trial("scores", OWN, "failed")])
def test_what_is_not_surely_and_worthily_faster_leaves_the_table_alone(other: Trial) -> None:
    own = measured(1.0)
    assert candidates.best([own, other]) is own


def test_without_a_figure_of_the_present_launch_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match="was not measured: wrong"):
        candidates.best([Trial("scores", OWN, "wrong"), measured(1.0)])


def test_a_choice_changes_its_own_width_alone() -> None:
    table = tuning.table(90)
    found = candidates.changed(table, "wide", {"scores": OWN}, "why")
    assert found.wide["scores"] == OWN
    assert found.narrow == table.narrow
    assert json.loads(candidates.text(found))["how"] == "why"
    with pytest.raises(ValueError, match="width must be"):
        candidates.changed(table, "broad", {}, "why")


@pytest.mark.parametrize("group", [6, 16])
def test_a_candidate_is_launched_also_where_the_group_has_a_launch_of_its_own(group: int) -> None:
    shipped, kernel, others = tuning.table(90), "selected_backward_kv", 22 - group
    table = replace(shipped, slim={**shipped.slim, f"{kernel}/8": LaunchConfig(128, 64, 4, 2)})
    workload = trials.Workload(90, "slim", group, 64, 64, 2, 256)
    with trials.using(kernel, OWN, table, workload):
        used = tuning.table(90)
    assert used.of(kernel, "slim", group) == OWN
    assert used.of(kernel, "slim", others) == table.of(kernel, "slim", others) != OWN

"""What is asked lies beyond the window; a trained model answers, without its selected branch it guesses."""

from __future__ import annotations

import json

import pytest
import torch

from nsa.train import needle
from nsa.train.needle import CHANCE, CONFIG, KEYS, QUESTIONS, TEXT, VALUES
from tests.nsa.train.runs import ROOT


def test_each_answer_stands_once_beyond_the_window() -> None:
    drawn = needle.draw(64, torch.Generator().manual_seed(0))
    assert int(drawn.distances.min()) > CONFIG.w
    for row, answers, distances in zip(drawn.batch.tokens, drawn.answers, drawn.distances, strict=True):
        for i in range(QUESTIONS):
            key = int(row[TEXT + i]) - KEYS * VALUES
            places = [t for t in range(TEXT) if int(row[t]) // VALUES == key]
            assert places == [TEXT + i - int(distances[i])]
            assert int(row[places[0]]) % VALUES == int(answers[i])


def test_an_untrained_model_guesses() -> None:
    drawn = needle.draw(64, torch.Generator().manual_seed(0))
    assert abs(float(needle.correct(needle.trained(1), drawn).float().mean()) - CHANCE) < 0.1


def test_the_committed_figure_says_so() -> None:
    right = json.loads((ROOT / "results" / "train" / "needle.json").read_text())["right_answers"]
    _judge(right)
    assert right["trained without selected"] < 0.7


@pytest.mark.nightly
def test_only_the_selected_branch_finds_it() -> None:
    _judge(needle.accuracy(needle.trained(), needle.draw(256, torch.Generator().manual_seed(1))))


def _judge(right: dict[str, float]) -> None:
    assert right["all branches"] > 0.9
    assert right["without selected"] < 0.5  # means of blocks tell a little more than chance
    assert right["without compressed"] > 0.9  # its output; its scores still choose the blocks
    assert right["without window"] > 0.9

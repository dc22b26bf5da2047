"""The tasks are what they say: every answer can be read from the text, over as many statements, beyond the window."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nsa.config import NSAConfig
from nsa.loss import IGNORED
from nsa.train import tasks
from nsa.train.tasks import CHANCE, NEEDLE, QUESTIONS, TRACKING, VALUES, Plan, Task

CPU = torch.device("cpu")
SMALL = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=8)


def follow(task: Task, statements: dict[int, tuple[int, int]], variable: int) -> tuple[int, list[int]]:
    """(value, places of the statements on the way) of a variable; statements: target -> (place, source)."""
    places = []
    while True:
        place, source = statements[variable]
        places.append(place)
        if source >= task.variables:
            return source - task.variables, places
        variable = source


@pytest.mark.parametrize("task", [NEEDLE, TRACKING, Task("deep", hops=4, chains=3)], ids=lambda task: task.name)
@pytest.mark.parametrize("ends_only", [False, True])
def test_each_answer_follows_from_the_statements(task: Task, ends_only: bool) -> None:
    gap, length = 32, 160
    batch = tasks.draw(task, 8, length, torch.Generator().manual_seed(0), gap=gap, ends_only=ends_only)
    assert batch.tokens.shape == batch.targets.shape == (8, length)
    assert int(batch.tokens.max()) < task.vocab_size
    hops = set()
    for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        text = row[:-QUESTIONS]
        stated = [(place, token) for place, token in enumerate(text) if token < task.first_question]
        statements = {token // task.sources: (place, token % task.sources) for place, token in stated}
        assert len(stated) == len(statements) == task.variables  # each once
        assert all(token >= task.first_filler for token in text if token >= task.first_question)
        told = {place: follow(task, statements, token // task.sources)[0] for place, token in stated}
        assert targets[:-QUESTIONS] == [told.get(place, IGNORED) for place in range(len(text))]
        for question, answer in zip(row[-QUESTIONS:], targets[-QUESTIONS:], strict=True):
            value, places = follow(task, statements, question - task.first_question)
            assert value == answer
            assert places == sorted(places, reverse=True)  # each source is stated before what it is a source of
            assert max(places) < length - QUESTIONS - gap
            hops.add(len(places) - 1)
    assert hops == ({task.hops} if ends_only else set(range(task.hops + 1)))
    assert batch.num_targets == 8 * (QUESTIONS + task.variables)


def test_a_text_that_is_too_short_is_refused() -> None:
    least = TRACKING.least_length(512)
    tasks.draw(TRACKING, 1, least, torch.Generator(), gap=512)
    with pytest.raises(ValueError, match=f"at least {least}"):
        tasks.draw(TRACKING, 1, least - 1, torch.Generator(), gap=512)
    with pytest.raises(ValueError, match="hops"):
        Task("none", hops=-1, chains=1)


def test_the_choice_is_too_small_for_every_statement() -> None:
    """Else a model could read them all, whatever is asked."""
    paper = NSAConfig()
    for task in (NEEDLE, TRACKING):
        assert task.variables > paper.n_sel - paper.init_blocks - paper.local_blocks


def test_lengths_grow_by_doubling_and_the_first_takes_half_of_the_steps() -> None:
    assert Plan((8192, 32768), 100, 1).stages(1024) == [(1024, 50), *((2048 << i, 10) for i in range(5))]
    assert Plan((100, 900), 19, 1).stages(1024) == [(100, 11), (200, 2), (400, 2), (800, 2), (900, 2)]
    assert Plan((8192,), 7, 1).stages(8192) == [(8192, 7)]
    with pytest.raises(ValueError, match="steps must be at least 10"):
        Plan((32768,), 9, 1).stages(1024)


def test_both_models_get_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[torch.Tensor]] = {}
    model = tasks.model(replace(NEEDLE, chains=4), SMALL, dim=16, head_dim=8)
    original = tasks.draw
    for config in (model, model.dense_twin()):
        seen = drawn.setdefault(config.attention, [])

        def draw(*arguments: object, seen: list[torch.Tensor] = seen, **named: object) -> object:
            batch = original(*arguments, **named)  # type: ignore[arg-type]
            seen.append(batch.tokens)
            return batch

        monkeypatch.setattr(tasks, "draw", draw)
        plan = Plan((64, 96), 4, 192, seed=3)
        answers = tasks.train_and_ask(replace(NEEDLE, chains=4), config, plan, CPU, texts=5, say=lambda text: None)
        assert [(one.length, one.steps, one.tokens, one.asked) for one in answers] == [
            (64, 3, 3 * 192, 5),  # two steps of 32 tokens before
            (96, 4, 4 * 192, 5),
        ]
        assert all(math.isfinite(one.loss) for one in answers)
    assert len(drawn["nsa"]) == len(drawn["dense"]) == 6  # four steps, two questions
    assert all(torch.equal(a, b) for a, b in zip(drawn["nsa"], drawn["dense"], strict=True))


def test_right_is_counted_over_the_first_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always says one value is right as often as that value is the answer of the first question."""
    task = replace(NEEDLE, chains=4)
    config = tasks.model(task, SMALL, dim=16, head_dim=8)
    plan = Plan((64,), 1, 64)
    trainer = tasks.trainer_of(task, config, plan, CPU)
    with torch.no_grad():
        trainer.lm.head.weight.zero_()  # every logit is equal: the first value is said
    texts = tasks.draw(task, 40, 64, torch.Generator().manual_seed(7), gap=SMALL.w, ends_only=True)
    monkeypatch.setattr(tasks, "ASKED_TOKENS", 64 * 40)
    right = tasks.correct(trainer, task, 64, 40, seed=7)
    assert right == int((texts.targets[:, -QUESTIONS] == 0).sum())
    assert 0 < right < 40
    assert CHANCE == 1 / VALUES
    assert trainer.lm.training


def test_a_statement_begins_as_its_parts() -> None:
    task = TRACKING
    lm = tasks.trainer_of(task, tasks.model(task, SMALL, dim=16, head_dim=8), Plan((64,), 1, 64), CPU).lm
    weight = lm.embedding.weight.detach()
    pairs = weight[: task.first_question].unflatten(0, (task.variables, task.sources))
    torch.testing.assert_close(pairs[3, 5] - pairs[2, 5], pairs[3, 0] - pairs[2, 0])
    asked = weight[task.first_question : task.first_filler]
    torch.testing.assert_close(asked[3] - asked[2], pairs[3, 0] - pairs[2, 0])


@pytest.mark.nightly
def test_a_small_model_learns_the_needle() -> None:
    task = replace(NEEDLE, chains=8)
    config = tasks.model(task, SMALL, dim=64, head_dim=16)
    plan = Plan((64,), 600, 2048, lr=2e-3)
    (dense,) = tasks.train_and_ask(task, config.dense_twin(), plan, CPU, texts=100, say=lambda text: None)
    (nsa,) = tasks.train_and_ask(task, config, plan, CPU, texts=100, say=lambda text: None)
    assert dense.right > 90
    assert nsa.right > 60

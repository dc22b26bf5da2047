"""transformers' Trainer takes the steps that a loop around `nsa.model` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from nsa.integrations.transformers import NSAForCausalLM
from nsa.model import next_token_loss
from tests.nsa.integrations.models import decoder

STEPS, ROWS, LR = 6, 4, 3e-2


def batches() -> list[Tensor]:
    """The same texts, their rows turned by one from step to step, so that a few steps learn something."""
    torch.manual_seed(1)
    rows = torch.randint(0, 19, (ROWS, 7)).repeat(1, 4)
    return [rows.roll(step, 0) for step in range(STEPS)]


def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    data = batches()
    theirs = decoder(torch.float32)
    ours = NSAForCausalLM.from_decoder(theirs)
    losses: list[float] = []

    class Recorded(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        train_sampling_strategy="sequential",
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in torch.cat(data)]
    Recorded(model=ours, args=arguments, train_dataset=rows).train()

    expected = []
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, weight_decay=0.0)
    for tokens in data:
        loss = next_token_loss(theirs(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda told, name=name: f"{name}: {told}")


def test_the_trainer_evaluates_and_predicts(tmp_path: Path) -> None:
    """The logits that come back are those of the model, in the order of the rows."""
    model = NSAForCausalLM.from_decoder(decoder(torch.float32)).eval()
    tokens = batches()[0]
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(model=model, args=arguments)
    with torch.no_grad():
        wanted = model(tokens, labels=tokens)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(wanted.loss.item(), rel=1e-5)
    predicted = trainer.predict(rows).predictions
    torch.testing.assert_close(torch.from_numpy(predicted), wanted.logits)

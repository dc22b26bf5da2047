"""What a rank trains on and is validated on: no document on both sides, none on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train import data, loader
from nsa.train.data import Batch
from nsa.train.loader import Loader, Shard
from nsa.train.settings import Settings
from tests.nsa.train.runs import needs_datasets, settings

NUMBER_OF_DOCUMENTS = 60


def _on_text(folder: Path, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> Settings:
    """Documents of which each says its own number and nothing else; one in five is held out."""
    needs_datasets()
    monkeypatch.setattr(data, "HELD_OUT", 5)
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"<{i}>"}) + "\n" for i in range(NUMBER_OF_DOCUMENTS)))
    return settings(folder, data__dataset="files", data__path=str(path), **overrides)


def _documents(batches: list[Batch]) -> set[str]:
    """The numbers of the documents that stand whole in one batch."""
    texts = [bytes(batch.tokens.flatten().tolist()).decode() for batch in batches]
    return {part for text in texts for part in text.split("\0") if part.startswith("<") and part.endswith(">")}


def _rows(batches: list[Batch]) -> set[tuple[int, ...]]:
    return {tuple(row) for batch in batches for row in batch.tokens.view(-1, 48).tolist()}


def _trained_on(chosen: Settings, share: Shard, count: int) -> list[Batch]:
    opened = Loader(chosen, share)
    found = [next(opened) for _ in range(count)]
    opened.close()
    return found


def test_no_document_is_trained_on_and_validated_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _on_text(tmp_path, monkeypatch)
    trained = _documents(_trained_on(chosen, Shard(), 12))
    held_out = _documents(loader.held_out_batches(chosen, Shard(), "files"))
    assert len(trained) > NUMBER_OF_DOCUMENTS / 2
    assert len(held_out) > 3
    assert not trained & held_out


def test_no_random_row_is_trained_on_and_validated_on(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    held_out = _rows(loader.held_out_batches(chosen, Shard(), "synthetic"))
    assert len(held_out) == chosen.train.val_batches * chosen.train.batch_size
    assert not _rows(_trained_on(chosen, Shard(), 12)) & held_out


@pytest.mark.parametrize("validating", [False, True])
def test_each_rank_has_documents_of_its_own(validating: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the doors of a run: `Feed`, and the batches of its validations."""
    chosen = _on_text(tmp_path, monkeypatch, train__val_batches=2)
    shares = [Shard(rank, 2) for rank in range(2)]
    first, second = (
        _documents(loader.held_out_batches(chosen, share, "files") if validating else _trained_on(chosen, share, 6))
        for share in shares
    )
    assert first
    assert second
    assert not first & second


def test_each_rank_has_random_rows_of_its_own(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    for batches in (
        [_trained_on(chosen, Shard(rank, 2), 4) for rank in range(2)],
        [loader.held_out_batches(chosen, Shard(rank, 2), "synthetic") for rank in range(2)],
    ):
        first, second = map(_rows, batches)
        assert first
        assert not first & second


def test_no_random_row_comes_twice_or_with_another_seed(tmp_path: Path) -> None:
    first, second = (_rows(_trained_on(settings(tmp_path, train__seed=seed), Shard(), 12)) for seed in (1, 2))
    assert len(first) == len(second) == 24
    assert not first & second


@pytest.mark.parametrize("packed", [True, False])
def test_the_batches_come_in_the_order_of_the_source(packed: bool, tmp_path: Path) -> None:
    """Each batch with the position from which the next one follows, however far the thread is ahead."""
    chosen = settings(tmp_path, data__packing=packed)
    whole = _trained_on(chosen, Shard(), 6)
    opened = Loader(chosen, Shard())
    for _ in range(3):
        next(opened)
    resumed = Loader(chosen, Shard(), position=opened.position)
    for expected in whole[3:]:
        assert torch.equal(next(resumed).tokens, expected.tokens)
    opened.close()
    resumed.close()

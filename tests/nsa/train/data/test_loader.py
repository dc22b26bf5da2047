"""The batches of a rank: no row validated and trained on, none on two ranks, made ahead, the first by a deadline."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train.data import loader, packing
from nsa.train.data.loader import (
    BatchFetcher,
    Loader,
    NoFirstBatchError,
    Prefetch,
    Shard,
    SyntheticBatches,
    first_batch,
)
from nsa.train.data.packing import Batch, Row
from nsa.train.settings import Settings
from tests.nsa.train.runs import settings

NUMBER_OF_DOCUMENTS = 60


def _on_text(folder: Path, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> Settings:
    """Documents of which each says its own number and nothing else; one in five is held out."""
    monkeypatch.setattr(packing, "HELD_OUT", 5)
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
    for ranks in (
        [_trained_on(chosen, Shard(rank, 2), 4) for rank in range(2)],
        [loader.held_out_batches(chosen, Shard(rank, 2), "synthetic") for rank in range(2)],
    ):
        first, second = map(_rows, ranks)
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


SYNTHETIC = BatchFetcher("synthetic", lambda: 0)


@pytest.fixture
def silent() -> BatchFetcher[int]:
    """Waits for something that nobody gives."""
    return BatchFetcher("fineweb", lambda: int(threading.Event().wait(600)))


def broken() -> int:
    raise ConnectionRefusedError("no route")


def test_answers() -> None:
    got = first_batch(BatchFetcher("disk", lambda: 7), 5.0, SYNTHETIC)
    assert (got.batch, got.source) == (7, "disk")
    assert got.waited_s < 5


def test_silence_has_a_deadline_and_a_name(silent: BatchFetcher[int]) -> None:
    begin = time.monotonic()
    with pytest.raises(NoFirstBatchError, match=r"fineweb gave no batch within 0\.2 s"):
        first_batch(silent, 0.2)
    assert time.monotonic() - begin < 5


def test_fallback_is_recorded(silent: BatchFetcher[int]) -> None:
    got = first_batch(silent, 0.2, SYNTHETIC)
    assert (got.batch, got.source) == (0, "synthetic")
    assert got.waited_s >= 0.2


def test_an_error_is_no_silence() -> None:
    """The fallback does not hide it."""
    with pytest.raises(ConnectionRefusedError, match="no route"):
        first_batch(BatchFetcher("fineweb", broken), 5.0, SYNTHETIC)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_deadline_must_be_above_0(deadline_s: float) -> None:
    with pytest.raises(ValueError, match="deadline_s must be above 0; got"):
        first_batch(SYNTHETIC, deadline_s)


def test_synthetic_rows_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    chosen = settings(tmp_path, train__batch_size=4)
    whole, halves = SyntheticBatches(chosen, Shard()), [SyntheticBatches(chosen, Shard(rank, 2)) for rank in range(2)]
    for _ in range(3):
        assert torch.equal(whole.next().tokens, torch.cat([half.next().tokens for half in halves], 1))
    again = SyntheticBatches(chosen, Shard())
    again.restore(whole.next().position)
    assert torch.equal(again.next().tokens, whole.next().tokens)
    assert not torch.equal(SyntheticBatches(chosen, Shard(), held_out=True).next().tokens, whole.next().tokens)


class _Failing:
    name = "failing"

    def __init__(self) -> None:
        self._left = 3

    def next(self) -> packing.Batch:
        self._left -= 1
        if not self._left:
            raise OSError("the disk is gone")
        return packing.pack([Row(torch.zeros(4, dtype=torch.int64), (4,))], packing=False, position={})

    def restore(self, position: dict[str, Any]) -> None: ...


def test_an_error_of_the_source_comes_where_its_batch_is_asked_for() -> None:
    prefetch = Prefetch(_Failing, 4, pin=False)
    prefetch.next()
    prefetch.next()
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            prefetch.next()


def test_batches_are_made_before_they_are_asked_for() -> None:
    made = threading.Semaphore(0)

    class Counted:
        name = "counted"

        def next(self) -> packing.Batch:
            made.release()
            return packing.pack([Row(torch.zeros(4, dtype=torch.int64), (4,))], packing=False, position={})

        def restore(self, position: dict[str, Any]) -> None: ...

    prefetch = Prefetch(Counted, 4, pin=False)
    assert all(made.acquire(timeout=60) for _ in range(5))  # the queue holds 4, the thread one more
    assert not made.acquire(timeout=0.3)
    prefetch.next()
    assert made.acquire(timeout=60)
    prefetch.close()


def test_a_position_of_another_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.dataset must be that of the checkpoint, python; got synthetic"):
        Loader(settings(tmp_path), Shard(), position={"source": "python", "at": {}})


def test_silence_is_an_error_or_the_fallback_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "open_source", lambda *_, **__: time.sleep(5))
    silent = {"data__dataset": "python", "data__loader_timeout_s": 0.2}
    with pytest.raises(NoFirstBatchError, match=r"python gave no batch within 0\.2 s"):
        Loader(settings(tmp_path, **silent), Shard())
    feed = Loader(settings(tmp_path, **silent, data__synthetic_on_fail=True), Shard())
    assert feed.source == "synthetic"
    first = next(feed)
    assert feed.position == {"source": "synthetic", "at": {"batches": 1}}
    resumed = Loader(settings(tmp_path, **silent), Shard(), position=feed.position)
    assert resumed.source == "synthetic"
    assert not torch.equal(next(resumed).tokens, first.tokens)
    feed.close()
    resumed.close()

"""The batches of one rank: read ahead of the GPU, the first within a deadline, from where the last attempt stopped.

A `Source` gives batches of real text or of random tokens; each batch knows where its source goes on after it. A source
that never answers ends in an error that names it, not in silence.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from nsa.train.data import packing
from nsa.train.data.packing import Batch, Documents, Packer, Row, describe, tokenizer
from nsa.train.settings import Settings

SYNTHETIC = "synthetic"

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Which part of the data is this rank's."""

    rank: int = 0
    ranks: int = 1

    def rows(self, batch_size: int) -> range:
        """Rows of the global batch. ValueError if the ranks cannot share them evenly."""
        if batch_size % self.ranks:
            raise ValueError(f"train.batch_size must be a multiple of the {self.ranks} ranks; got {batch_size}")
        own = batch_size // self.ranks
        return range(self.rank * own, (self.rank + 1) * own)


class Source(Protocol):
    """Batches without an end."""

    name: str

    def next(self) -> Batch: ...

    def restore(self, position: dict[str, Any]) -> None:
        """Go on after the batch that had this position; before the first `next`."""


class SyntheticBatches:
    """Uniform random tokens that depend on the seed and the row's number alone, whatever the number of ranks."""

    name = SYNTHETIC

    def __init__(self, settings: Settings, shard: Shard, *, held_out: bool = False) -> None:
        train = settings.train
        self._rows, self._batch_size, self._seq_len = shard.rows(train.batch_size), train.batch_size, train.seq_len
        self._vocab_size, self._packing = settings.model.vocab_size, settings.data.packing
        self._held_out, self._key = held_out, zlib.crc32(str(train.seed).encode())
        self._done = 0

    def next(self) -> Batch:
        rows = [self._row(self._done * self._batch_size + i) for i in self._rows]
        self._done += 1
        return packing.pack(rows, packing=self._packing, position={"batches": self._done})

    def restore(self, position: dict[str, Any]) -> None:
        self._done = position["batches"]

    def _row(self, number: int) -> Row:
        # a CPU's generator takes 32 bits of its seed; within a run each of these occurs once, held out or not
        generator = torch.Generator().manual_seed(self._key ^ (2 * number + self._held_out))
        tokens = torch.randint(self._vocab_size, (self._seq_len,), generator=generator)
        cut = int(torch.randint(1, self._seq_len, (), generator=generator))
        return Row(tokens, (cut, self._seq_len - cut))


class TextBatches:
    """Rows of packed documents."""

    def __init__(
        self,
        settings: Settings,
        shard: Shard,
        *,
        held_out: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._rows, self._seq_len = shard.rows(settings.train.batch_size), settings.train.seq_len
        self._packing = settings.data.packing
        self._tokenizer = tokenizer(settings.data.tokenizer, settings.model.vocab_size)
        self._documents = Documents(settings.data, rank=shard.rank, ranks=shard.ranks, held_out=held_out, report=report)
        self.name = self._documents.name
        self._packer = Packer(self._encoded(), self._seq_len)

    def next(self) -> Batch:
        rows = [self._packer.row() for _ in self._rows]
        position = {"documents": self._documents.position(), "rest": self._packer.rest.clone()}
        return packing.pack(rows, packing=self._packing, position=position)

    def restore(self, position: dict[str, Any]) -> None:
        self._documents.restore(position["documents"])
        self._packer = Packer(self._encoded(), self._seq_len, position["rest"])

    def _encoded(self) -> Iterator[Tensor]:
        for text in self._documents:
            yield self._tokenizer.encode(text)


def open_source(
    settings: Settings, shard: Shard, *, held_out: bool = False, report: Callable[[str], None] | None = None
) -> Source:
    """What `data.dataset` names; opening it may wait for a network."""
    if settings.data.dataset == SYNTHETIC:
        return SyntheticBatches(settings, shard, held_out=held_out)
    return TextBatches(settings, shard, held_out=held_out, report=report)


class Prefetch:
    """Batches made ahead in a thread, pinned for a GPU. An error of the source is raised where its batch is asked for.

    The thread opens the source too, so that the deadline of the first batch holds for the network as well.
    """

    def __init__(self, opening: Callable[[], Source], depth: int, *, pin: bool) -> None:
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(opening, pin), name="prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        """The next batch; waits if it is not ready."""
        if self._failed is None:
            item = self._ready.get()
            if isinstance(item, Batch):
                return item
            self._failed = item
        raise self._failed

    def close(self) -> None:
        """Let the thread end; one that waits for a silent network is a daemon and does not keep the process."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        self._thread.join(timeout=1.0)

    def _work(self, opening: Callable[[], Source], pin: bool) -> None:
        try:
            source = opening()
            while not self._stop.is_set():
                batch = source.next()
                self._put(batch.pinned() if pin else batch)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Batch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


class Loader:
    """Iterate over it; `waited_s` is how long the last batch was waited for, `position` where the next one begins."""

    def __init__(
        self,
        settings: Settings,
        shard: Shard,
        *,
        position: dict[str, Any] | None = None,
        pin: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Waits for the first batch. Raises NoFirstBatchError, or what the loader raised; ValueError for a position
        in another source."""
        name = describe(settings.data)
        fell_back = position is not None and position["source"] == SYNTHETIC != name
        if position is not None and not fell_back and position["source"] != name:
            raise ValueError(f"data.dataset must be that of the checkpoint, {position['source']}; got {name}")

        def prefetch(synthetic: bool) -> Prefetch:
            def opening() -> Source:
                source: Source = (
                    SyntheticBatches(settings, shard) if synthetic else open_source(settings, shard, report=say)
                )
                if position is not None:
                    source.restore(position["at"])
                return source

            return Prefetch(opening, settings.data.prefetch_batches, pin=pin)

        self._prefetch = prefetch(synthetic=fell_back)
        self._fallback: Prefetch | None = None

        def synthetic_batch() -> Batch:
            self._fallback = prefetch(synthetic=True)
            return self._fallback.next()

        first = first_batch(
            BatchFetcher(SYNTHETIC if fell_back else name, self._prefetch.next),
            settings.data.loader_timeout_s,
            BatchFetcher(SYNTHETIC, synthetic_batch) if settings.data.synthetic_on_fail else None,
        )
        if self._fallback is not None:
            self._prefetch.close()
            self._prefetch = self._fallback
        self.source, self.first_wait_s = first.source, first.waited_s
        self.waited_s = first.waited_s
        self.position = {"source": self.source, "at": (position or {}).get("at")}
        self._batches = itertools.chain([first.batch], iter(self._prefetch.next, None))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        batch = next(self._batches)
        assert batch is not None
        self.waited_s = time.perf_counter() - begin
        self.position = {"source": self.source, "at": batch.position}
        return batch

    def close(self) -> None:
        self._prefetch.close()


def held_out_batches(settings: Settings, shard: Shard, source: str) -> list[Batch]:
    """The batches of every validation. Raises NoFirstBatchError, or what the loader raised."""

    def fetch() -> list[Batch]:
        opened: Source = (
            SyntheticBatches(settings, shard, held_out=True)
            if source == SYNTHETIC
            else open_source(settings, shard, held_out=True)
        )
        return [opened.next() for _ in range(settings.train.val_batches)]

    return first_batch(BatchFetcher(f"{source} (validation)", fetch), settings.data.loader_timeout_s).batch


class NoFirstBatchError(TimeoutError):
    """The loader gave nothing before its deadline; the message names it and the seconds."""


@dataclass(frozen=True)
class FirstBatch(Generic[T]):
    """What came, from where, and how long it took: to be recorded with the run."""

    batch: T
    source: str
    """The loader's name, or the fallback's."""
    waited_s: float


@dataclass(frozen=True)
class BatchFetcher(Generic[T]):
    """Where batches come from, by the name under which it is recorded."""

    name: str
    fetch: Callable[[], T]
    """Gives the next batch; may block."""


def first_batch(fetcher: BatchFetcher[T], deadline_s: float, fallback: BatchFetcher[T] | None = None) -> FirstBatch[T]:
    """The first batch within the deadline; with a fallback, which is asked for on purpose, that one's instead.

    An error of the loader is raised as it is: a fallback is for silence alone. The thread that waits for a silent
    loader cannot be ended; it is a daemon and does not keep the process. Raises NoFirstBatchError.
    """
    if not deadline_s > 0:
        raise ValueError(f"deadline_s must be above 0; got {deadline_s}")
    begin = time.monotonic()
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    threading.Thread(target=_fetch, args=(fetcher, answers), name=f"first batch of {fetcher.name}", daemon=True).start()
    try:
        batch, error = answers.get(timeout=deadline_s)
    except queue.Empty:
        if fallback is None:
            raise NoFirstBatchError(f"{fetcher.name} gave no batch within {deadline_s:g} s") from None
        return FirstBatch(fallback.fetch(), fallback.name, time.monotonic() - begin)
    if error is not None:
        raise error
    return FirstBatch(batch, fetcher.name, time.monotonic() - begin)  # type: ignore[arg-type]


def _fetch(fetcher: BatchFetcher[T], answers: queue.SimpleQueue[tuple[T | None, BaseException | None]]) -> None:
    try:
        answers.put((fetcher.fetch(), None))
    except BaseException as error:
        answers.put((None, error))

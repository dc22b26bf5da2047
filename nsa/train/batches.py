"""The batches of one rank: of real text, or of random tokens; each knows where its source goes on after it."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nsa.train import packing
from nsa.train.documents import Documents, describe
from nsa.train.packing import Batch, Packer, Row
from nsa.train.settings import Settings
from nsa.train.tokens import tokenizer

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Share:
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

    def __init__(self, settings: Settings, share: Share, *, held_out: bool = False) -> None:
        train = settings.train
        self._rows, self._batch_size, self._seq_len = share.rows(train.batch_size), train.batch_size, train.seq_len
        self._vocab_size, self._packing = settings.model.vocab_size, settings.data.packing
        self._held_out, self._key = held_out, zlib.crc32(str(train.seed).encode())
        self._done = 0

    def next(self) -> Batch:
        rows = [self._row(self._done * self._batch_size + i) for i in self._rows]
        self._done += 1
        return packing.batch(rows, packing=self._packing, position={"batches": self._done})

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
        share: Share,
        *,
        held_out: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._rows, self._seq_len = share.rows(settings.train.batch_size), settings.train.seq_len
        self._packing = settings.data.packing
        self._tokenizer = tokenizer(settings.data.tokenizer, settings.model.vocab_size)
        self._documents = Documents(settings.data, rank=share.rank, ranks=share.ranks, held_out=held_out, report=report)
        self.name = self._documents.name
        self._packer = Packer(self._encoded(), self._seq_len)

    def next(self) -> Batch:
        rows = [self._packer.row() for _ in self._rows]
        position = {"documents": self._documents.position(), "rest": self._packer.rest.clone()}
        return packing.batch(rows, packing=self._packing, position=position)

    def restore(self, position: dict[str, Any]) -> None:
        self._documents.restore(position["documents"])
        self._packer = Packer(self._encoded(), self._seq_len, position["rest"])

    def _encoded(self) -> Iterator[Tensor]:
        for text in self._documents:
            yield self._tokenizer.encode(text)


def source(
    settings: Settings, share: Share, *, held_out: bool = False, report: Callable[[str], None] | None = None
) -> Source:
    """What `data.dataset` names; opening it may wait for a network."""
    if settings.data.dataset == SYNTHETIC:
        return SyntheticBatches(settings, share, held_out=held_out)
    return TextBatches(settings, share, held_out=held_out, report=report)


def source_name(settings: Settings) -> str:
    """The name of `source`, known before it is opened."""
    return describe(settings.data)


class Prefetch:
    """Batches made ahead in a thread, pinned for a GPU. An error of the source is raised where its batch is asked for.

    The thread opens the source too, so that the deadline of the first batch holds for the network as well.
    """

    def __init__(self, open_source: Callable[[], Source], depth: int, *, pin: bool) -> None:
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(open_source, pin), name="prefetch", daemon=True)
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

    def _work(self, open_source: Callable[[], Source], pin: bool) -> None:
        try:
            opened = open_source()
            while not self._stop.is_set():
                batch = opened.next()
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

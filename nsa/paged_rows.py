"""Sequences of a PagedCache as the batch of a call: what a model, and each of its layers, takes as a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa import backends
from nsa.attention import BRANCHES, Aux
from nsa.cache import refuse_unfit
from nsa.geometry import num_compressed_blocks
from nsa.layer import Branched, NativeSparseAttention
from nsa.page_store import PageStore, Places, places
from nsa.paged_attention import PagedKeys, paged_attention
from nsa.paging import SCRAP

if TYPE_CHECKING:
    from nsa.paged_cache import PagedCache


class PagedRows:
    """Sequences of a PagedCache as the rows of a batch; they may differ in length.

    The first layer's call makes room in all layers, the last one's lets the sequences grow. For a CUDA graph the two
    can be called apart (`nsa.graphed_step`): what a layer does in between is device work on `lengths` and `tables`,
    which stay in place.
    """

    def __init__(self, cache: PagedCache, sequences: Sequence[int], count_reads: bool = False) -> None:
        self.cache, self.sequences, self.count_reads = cache, tuple(sequences), count_reads
        self.layers = [PagedLayer(self, i) for i in range(len(cache.layers))]
        self._bookkeeping = cache.tables
        for sequence in self.sequences:
            self._bookkeeping.length(sequence)  # ValueError if there is no such sequence
        batch, device = len(self.sequences), cache.stores[0].k.device
        with torch.inference_mode(False):
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self.tables = {
                kind.name: torch.full((batch, self._bookkeeping.width(kind)), SCRAP, dtype=torch.int32, device=device)
                for kind in self._bookkeeping.kinds
            }
        self.every_step_alike = False
        """Whether a step that completes no compressed block does the same as one that does, as in a CUDA graph."""
        self._rehearsing = False
        self._uploaded: dict[tuple[str, int], int] = {}
        self._num_tokens = 0
        self._places: Places | None = None

    def __len__(self) -> int:
        """Tokens held by the longest of them."""
        return max((self._bookkeeping.length(sequence) for sequence in self.sequences), default=0)

    def prepare(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens in each; OutOfPagesError or ValueError with nothing changed."""
        self.cache.abandon()
        copies = self._bookkeeping.reserve(self.sequences, num_tokens)
        for store in self.cache.stores:
            store.copy(copies)
        self._upload()
        self.cache.step, self._num_tokens, self._places = self, num_tokens, None

    def prepared(self, num_tokens: int) -> bool:
        """Whether there is room for just the step that comes."""
        return self.cache.step is self and self._num_tokens == num_tokens

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps in here leave the sequences as they were."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False
            self.abandon()

    def commit(self, num_tokens: int) -> None:
        """Let the sequences grow by what was prepared."""
        if self._rehearsing:
            return
        if not self.prepared(num_tokens):
            raise RuntimeError(f"a step of {num_tokens} tokens was not prepared, or another call has ended it")
        self._bookkeeping.commit(self.sequences, num_tokens)
        self.cache.step = None

    def abandon(self) -> None:
        """Leave the sequences as they were before a call that has failed."""
        self.cache.abandon()

    def places(self, num_tokens: int) -> Places:
        """Where the new rows of this step lie, computed once for all layers."""
        if self._places is None:
            config, before = self.cache.config, [self._bookkeeping.length(sequence) for sequence in self.sequences]
            completing = self.every_step_alike or any(
                num_compressed_blocks(length + num_tokens, config) > num_compressed_blocks(length, config)
                for length in before
            )
            self._places = places(
                self.tables, self.lengths, num_tokens, config, self.cache.page_size, completing=completing
            )
        return self._places

    def keys(self, store: PageStore, num_tokens: int) -> PagedKeys:
        """All keys and values of a layer, the new ones included."""
        tables = {branch: self.tables[branch if branch in self.tables else "tokens"] for branch in BRANCHES}
        lengths = tuple(self._bookkeeping.length(sequence) + num_tokens for sequence in self.sequences)
        return PagedKeys(store.k, store.v, tables, self.places(num_tokens).lengths, lengths)

    def _upload(self) -> None:
        """Bring lengths, and the tables that have changed, to the device."""
        lengths = [self._bookkeeping.length(sequence) for sequence in self.sequences]
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
        for name, on_device in self.tables.items():
            for row, sequence in enumerate(self.sequences):
                table = self._bookkeeping.table(sequence, name)
                if self._uploaded.get((name, row)) != table.version and table.pages:
                    on_device[row].copy_(torch.frombuffer(table.pages, dtype=torch.int32), non_blocking=True)
                    self._uploaded[name, row] = table.version


class PagedLayer:
    """One layer's share of `PagedRows`: what the layer takes as its cache."""

    def __init__(self, rows: PagedRows, index: int) -> None:
        self.rows, self.store = rows, rows.cache.stores[index]
        self.is_first, self.is_last = index == 0, index == len(rows.cache.layers) - 1
        self.aux: Aux | None = None
        """What the last call read, where reads are counted."""

    def admit(self, layer: NativeSparseAttention, x: Tensor) -> None:
        """Raise, with nothing written, unless the tokens x [B, S, dim] of this layer can be appended."""
        refuse_unfit(layer, x, own=self.store.layer, held=self.store.k)
        batch, num_tokens = x.shape[:2]
        if batch != len(self.rows.sequences):
            raise ValueError(f"x must have a row for each of the {len(self.rows.sequences)} sequences; got {batch}")
        if self.is_first and not self.rows.prepared(num_tokens):
            self.rows.prepare(num_tokens)
        elif not self.rows.prepared(num_tokens):
            raise ValueError("cache must be called by the layers in their order, each with the same number of tokens")

    def positions(self, num_tokens: int) -> Tensor:
        """int64 [B, S]: where the next tokens stand."""
        return self.rows.places(num_tokens).positions

    def attend(self, q: Tensor, k: Branched, v: Branched, gates: Tensor) -> Tensor:
        """Store the new keys and values; attention of q [B, S, Hq, Dk] over all of them: o [B, S, Hq, Dv]."""
        num_tokens, layer = q.shape[1], self.store.layer
        self.store.append(k, v, self.rows.places(num_tokens))
        keys = self.rows.keys(self.store, num_tokens)
        o, aux = paged_attention(q, keys, gates, layer.config, backend=layer.backend, return_aux=self.rows.count_reads)
        self.aux = aux
        return o

    def why_no_graph(self) -> str | None:
        """Why a step of this layer cannot be replayed for other lengths, or None if it can."""
        backend, _ = backends.choose(self.store.layer.backend, self.store.k, self.store.v)
        return None if backend == "triton" else f"{backend!r} would serve it"

    def commit(self, num_tokens: int) -> None:
        """Behind the last layer, let the sequences grow."""
        if self.is_last:
            self.rows.commit(num_tokens)

"""PagedCache: keys and values of many sequences in pages, for serving; sequences fork, grow, shrink and end.

Which page is whose is kept once for all layers (`tables.py`); each layer has pages of its own (`store.py`). `PagedRows`
are sequences as the batch of a call: what a model, and each of its layers, takes as a cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa import backends
from nsa.attention import Aux
from nsa.cache import refuse_unfit
from nsa.config import BRANCHES, NSAConfig
from nsa.geometry import num_compressed_blocks
from nsa.layer import NativeSparseAttention, PerBranch, a_size
from nsa.paged.allocator import NULL_PAGE, streams
from nsa.paged.attention import PagedKV, paged_attention
from nsa.paged.store import NewTokens, PageStore
from nsa.paged.tables import PageTables

MIN_PAGE_SIZE = 64
"""Rows of a page unless told otherwise, or the next multiple of l'."""
MAX_ROLLBACK = 8
"""Tokens that `truncate` may take back unless told otherwise: a speculative step."""

Layers = NativeSparseAttention | Sequence[NativeSparseAttention]


class PagedCache:
    """`num_pages` pages in each of the layers, all allocated at once; one more that belongs to nobody.

    Args:
        layers: the layer, or the layers of a model in their order, alike in config, heads and sharing of keys.
        num_pages: pages that sequences can hold; `pages` says how many one of a length takes.
        max_tokens: of the longest sequence.
        page_size: rows in a page, a multiple of l'; by default 64, or the next multiple of l'.
        max_rollback: how many tokens behind the longest that a sequence was `truncate` can always go. Of keys that
            only the window or the compression reads, what lies further back than they may look is released.

    For inference only, like `nsa.KVCache`. Raises ValueError or TypeError naming the argument; `nsa.OutOfPagesError`,
    a ValueError, where pages are wanting, with every sequence as it was.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        num_pages: int,
        max_tokens: int,
        page_size: int | None = None,
        max_rollback: int = MAX_ROLLBACK,
    ) -> None:
        self.layers = _alike(layers)
        first = self.layers[0]
        self.config, self.page_size = first.config, _page_size(first.config, page_size)
        if isinstance(max_rollback, bool) or not isinstance(max_rollback, int) or max_rollback < 0:
            raise ValueError(f"max_rollback must be an int of at least 0; got {max_rollback!r}")
        self.tables = PageTables(
            streams(self.config, shared_kv=first.num_kv_sets == 1),
            num_pages=a_size("num_pages", num_pages) + 1,
            page_size=self.page_size,
            max_tokens=a_size("max_tokens", max_tokens),
            max_rollback=max_rollback,
        )
        self.stores = [PageStore(layer, num_pages + 1, self.page_size) for layer in self.layers]
        self.step: PagedRows | None = None
        """The rows of a step that was begun and not ended; pages are reserved for it."""

    @staticmethod
    def bytes(layers: Layers, *, num_pages: int, page_size: int | None = None) -> int:
        """Bytes of device memory that a cache made with these arguments allocates for its pages."""
        layers, pages = _alike(layers), a_size("num_pages", num_pages) + 1
        return sum(PageStore.bytes(layer, pages, _page_size(layer.config, page_size)) for layer in layers)

    @staticmethod
    def pages(
        layer: NativeSparseAttention,
        num_tokens: int,
        *,
        per_call: int | None = None,
        page_size: int | None = None,
        max_rollback: int = MAX_ROLLBACK,
    ) -> int:
        """Pages that a sequence holds at most until it has `num_tokens` tokens, never more than `per_call` at once."""
        (layer,), size = _alike(layer), _page_size(layer.config, page_size)
        tokens = a_size("num_tokens", num_tokens)
        together = tokens if per_call is None else a_size("per_call", per_call)
        kinds = streams(layer.config, shared_kv=layer.num_kv_sets == 1)
        return sum(kind.most_pages(tokens, together, size, max_rollback) for kind in kinds)

    @property
    def num_free_pages(self) -> int:
        return self.tables.allocator.num_free

    @property
    def sequences(self) -> list[int]:
        """The sequences there are."""
        return list(self.tables)

    def new(self) -> int:
        """The number of a new, empty sequence."""
        return self.tables.new()

    def fork(self, sequence: int) -> int:
        """A sequence with the same tokens, whose pages it shares until one of the two writes to them."""
        self.rollback()
        return self.tables.fork(sequence)

    def length(self, sequence: int) -> int:
        """Tokens held."""
        return self.tables.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from position `length` on.

        ValueError if there are not so many, or if it goes back further than what was kept for that.
        """
        self.rollback()
        self.tables.truncate(sequence, length)

    def free(self, sequence: int) -> None:
        """Give its pages back; its number is not valid any more."""
        self.rollback()
        self.tables.free(sequence)

    def rows(self, sequences: Sequence[int], *, count_reads: bool = False) -> PagedRows:
        """These sequences as the batch of a call, in this order: all of it for a model, `.layers[i]` for a layer.

        With `count_reads` each layer's last `aux` says what it read, for three sums on the device per layer and call.
        """
        return PagedRows(self, sequences, count_reads)

    def rollback(self) -> None:
        """Give up a step that was begun and not ended: its call has failed."""
        if self.step is not None:
            self.tables.rollback(self.step.sequences)
            self.step = None

    def abandon(self) -> None:
        """Deprecated name of `rollback`."""
        warnings.warn("PagedCache.abandon is now PagedCache.rollback", DeprecationWarning, stacklevel=2)
        self.rollback()


class PagedRows:
    """Sequences of a PagedCache as the rows of a batch; they may differ in length.

    The first layer's call makes room in all layers, the last one's lets the sequences grow. For a CUDA graph the two
    can be called apart (`nsa.graphed_step`): what a layer does in between is device work on `lengths` and `tables`,
    which stay in place.
    """

    def __init__(self, cache: PagedCache, sequences: Sequence[int], count_reads: bool) -> None:
        self.cache, self.sequences, self.count_reads = cache, tuple(sequences), count_reads
        self.layers = [PagedLayer(self, i) for i in range(len(cache.layers))]
        self._page_tables = cache.tables
        for sequence in self.sequences:
            self._page_tables.length(sequence)  # ValueError if there is no such sequence
        batch, device = len(self.sequences), cache.stores[0].k.device
        with torch.inference_mode(False):
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self.tables = {
                kind.name: torch.full(
                    (batch, self._page_tables.width(kind)), NULL_PAGE, dtype=torch.int32, device=device
                )
                for kind in self._page_tables.kinds
            }
        self.every_step_alike = False
        """Whether a step that completes no compressed block does the same as one that does, as in a CUDA graph."""
        self._dry_run = False
        self._uploaded: dict[tuple[str, int], int] = {}
        self._num_tokens = 0
        self._new: NewTokens | None = None

    def __len__(self) -> int:
        """Tokens held by the longest of them."""
        return max((self._page_tables.length(sequence) for sequence in self.sequences), default=0)

    def prepare(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens in each; OutOfPagesError or ValueError with nothing changed."""
        self.cache.rollback()
        copies = self._page_tables.reserve(self.sequences, num_tokens)
        for store in self.cache.stores:
            store.copy(copies)
        self._upload()
        self.cache.step, self._num_tokens, self._new = self, num_tokens, None

    def prepared(self, num_tokens: int) -> bool:
        """Whether there is room for just the step that comes."""
        return self.cache.step is self and self._num_tokens == num_tokens

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Steps in here leave the sequences as they were."""
        self._dry_run = True
        try:
            yield
        finally:
            self._dry_run = False
            self.rollback()

    def commit(self, num_tokens: int) -> None:
        """Let the sequences grow by what was prepared."""
        if self._dry_run:
            return
        if not self.prepared(num_tokens):
            raise RuntimeError(f"a step of {num_tokens} tokens was not prepared, or another call has ended it")
        self._page_tables.commit(self.sequences, num_tokens)
        self.cache.step = None

    def rollback(self) -> None:
        """Leave the sequences as they were before a call that has failed."""
        self.cache.rollback()

    def new_tokens(self, num_tokens: int) -> NewTokens:
        """The tokens of this step, and where their rows lie: computed once for all layers."""
        if self._new is None:
            config, before = self.cache.config, [self._page_tables.length(sequence) for sequence in self.sequences]
            completing = self.every_step_alike or any(
                num_compressed_blocks(length + num_tokens, config) > num_compressed_blocks(length, config)
                for length in before
            )
            positions = self.lengths[:, None] + torch.arange(num_tokens, device=self.lengths.device)
            counts = self.lengths, self.lengths + num_tokens
            self._new = NewTokens(positions, *counts, self.tables, config, self.cache.page_size, completing)
        return self._new

    def keys(self, store: PageStore, num_tokens: int) -> PagedKV:
        """All keys and values of a layer, the new ones included."""
        tables = {branch: self.tables[branch if branch in self.tables else "tokens"] for branch in BRANCHES}
        lengths = tuple(self._page_tables.length(sequence) + num_tokens for sequence in self.sequences)
        return PagedKV(store.k, store.v, tables, self.new_tokens(num_tokens).lengths, lengths)

    def _upload(self) -> None:
        """Bring lengths, and the tables that have changed, to the device."""
        lengths = [self._page_tables.length(sequence) for sequence in self.sequences]
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
        for name, on_device in self.tables.items():
            for row, sequence in enumerate(self.sequences):
                table = self._page_tables.table(sequence, name)
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
        return self.rows.new_tokens(num_tokens).positions

    def attend(self, q: Tensor, k: PerBranch, v: PerBranch, gates: Tensor) -> Tensor:
        """Store the new keys and values; attention of q [B, S, Hq, Dk] over all of them: o [B, S, Hq, Dv]."""
        num_tokens, layer = q.shape[1], self.store.layer
        self.store.append(k, v, self.rows.new_tokens(num_tokens))
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


def _alike(layers: object) -> list[NativeSparseAttention]:
    """One layer or several, as a list; they must keep the same streams of rows."""
    alike: list[NativeSparseAttention] = []
    for layer in layers if isinstance(layers, Sequence) else [layers]:
        if not isinstance(layer, NativeSparseAttention):
            raise TypeError(f"layers must be NativeSparseAttention; got {type(layer).__name__}")
        alike.append(layer)
        if (layer.config, layer.num_kv_sets) != (alike[0].config, alike[0].num_kv_sets):
            raise ValueError("layers must be alike in config and shared_kv")
    if not alike:
        raise ValueError("layers must hold at least one NativeSparseAttention; got none")
    return alike


def _page_size(config: NSAConfig, page_size: object) -> int:
    """Rows in a page: a multiple of l', so that a selection block lies in one page."""
    if page_size is None:
        return -(-MIN_PAGE_SIZE // config.l_sel) * config.l_sel
    size = a_size("page_size", page_size)
    if size % config.l_sel:
        raise ValueError(f"page_size must be a multiple of l_sel={config.l_sel}; got {size}")
    return size

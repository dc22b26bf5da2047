"""PagedCache: keys and values of many sequences in pages, for serving; sequences fork, grow, shrink and end.

Which page is whose is kept once for all layers (`nsa.page_tables`); each layer has pages of its own (`nsa.page_store`).
"""

from __future__ import annotations

from collections.abc import Sequence

from nsa.config import NSAConfig
from nsa.layer import NativeSparseAttention, a_size
from nsa.page_store import PageStore
from nsa.page_tables import PageTables
from nsa.paged_rows import PagedRows
from nsa.paging import streams

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
        return self.tables.pool.num_free

    @property
    def sequences(self) -> list[int]:
        """The sequences there are."""
        return list(self.tables)

    def new(self) -> int:
        """The number of a new, empty sequence."""
        return self.tables.new()

    def fork(self, sequence: int) -> int:
        """A sequence with the same tokens, whose pages it shares until one of the two writes to them."""
        self.abandon()
        return self.tables.fork(sequence)

    def length(self, sequence: int) -> int:
        """Tokens held."""
        return self.tables.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from position `length` on.

        ValueError if there are not so many, or if it goes back further than what was kept for that.
        """
        self.abandon()
        self.tables.truncate(sequence, length)

    def free(self, sequence: int) -> None:
        """Give its pages back; its number is not valid any more."""
        self.abandon()
        self.tables.free(sequence)

    def rows(self, sequences: Sequence[int], *, count_reads: bool = False) -> PagedRows:
        """These sequences as the batch of a call, in this order: all of it for a model, `.layers[i]` for a layer.

        With `count_reads` each layer's last `aux` says what it read, for three sums on the device per layer and call.
        """
        return PagedRows(self, sequences, count_reads)

    def abandon(self) -> None:
        """Give up a step that was begun and not ended: its call has failed."""
        if self.step is not None:
            self.tables.abandon(self.step.sequences)
            self.step = None


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

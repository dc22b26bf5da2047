"""From text to batches: documents, their tokens, and rows of one length packed into what a forward pass takes.

Documents are files of text and JSONL, Python's own sources (`text_files`) or, through `datasets`, FineWeb-Edu streamed
and Parquet. All are one kind of stream: each rank has its own shard, the position can be saved and found again, and
whether a document is held out for validation is decided by its content, so that a copy of it cannot be on the other
side.

A row is filled without padding: a document that is longer than what is left goes on in the next row, as a document
of its own. A packed batch is one row of all its tokens with `cu_seqlens`, in which no document sees another.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nsa import loss
from nsa.loss import IGNORED
from nsa.train.data.text_files import LINES, TextFiles
from nsa.train.settings import Data

HELD_OUT = 50
"""One document in so many is for validation."""
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".md": "text", ".py": "text"}
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
_NOT_TEXT = {"site-packages", "test", "tests", "idlelib", "__pycache__"}


class NoTextError(ValueError):
    """A source without a single document that could be used; the message names it."""


class Documents:
    """The texts of one rank, epoch after epoch, of training or of validation."""

    def __init__(
        self,
        data: Data,
        *,
        rank: int = 0,
        ranks: int = 1,
        held_out: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self._column, self._held_out = describe(data), data.text_field, held_out
        self._report, self._report_every = report, data.report_docs
        self._dataset: Any = _open(data, rank, ranks)
        self.epoch, self.read = 0, 0
        self._midway = False

    def __iter__(self) -> Iterator[str]:
        """Without an end. Raises NoTextError if a whole epoch has no document."""
        while True:
            used, whole = 0, not self._midway
            self._midway = False
            self._dataset.set_epoch(self.epoch)
            for row in self._dataset:
                text = self._text(row)
                self.read += 1
                if self._report is not None and self._report_every and self.read % self._report_every == 0:
                    self._report(f"{self.name}: {self.read:,} documents read, epoch {self.epoch}")
                if text and (zlib.crc32(text.encode("utf-8", "replace")) % HELD_OUT == 0) == self._held_out:
                    used += 1
                    yield text
            if whole and not used:
                purpose = "validation" if self._held_out else "training"
                raise NoTextError(f"{self.name} has no document for {purpose} in the column {self._column!r}")
            self.epoch += 1

    def position(self) -> dict[str, Any]:
        """Where the stream stands after the last document that it gave."""
        return {"dataset": self._dataset.state_dict(), "epoch": self.epoch, "read": self.read}

    def restore(self, position: dict[str, Any]) -> None:
        """Go on after the document at which `position` was taken; call it before the first one."""
        self._dataset.load_state_dict(position["dataset"])
        self.epoch, self.read = position["epoch"], position["read"]
        self._midway = True

    def _text(self, row: dict[str, Any]) -> str:
        if self._column not in row:
            raise NoTextError(f"{self.name} has no column {self._column!r}; it has {', '.join(row)}")
        return row[self._column] or ""


def describe(data: Data) -> str:
    """The name under which a source is recorded."""
    if data.dataset == "fineweb_edu":
        return f"fineweb_edu/{data.subset}"
    return f"files {data.path}" if data.dataset == "files" else data.dataset


def text_files(data: Data) -> tuple[str, list[str]]:
    """(builder, paths) of local text; ValueError naming data.path where there is none, or more than one format."""
    if data.dataset == "python":
        root = Path(sysconfig.get_path("stdlib"))
        found = [p for p in root.rglob("*.py") if not _NOT_TEXT & set(p.relative_to(root).parts)]
        return "text", sorted(map(str, found))
    root = Path(str(data.path))
    if not root.exists():
        raise ValueError(f"data.path must be a file or folder; there is no {root}")
    found = [p for p in ([root] if root.is_file() else root.rglob("*")) if p.suffix in FORMATS and p.is_file()]
    builders = {FORMATS[p.suffix] for p in found}
    if len(builders) != 1:
        came = "none" if not builders else f"all of {', '.join(sorted(builders))}"
        raise ValueError(f"data.path must hold files of one format ({', '.join(FORMATS)}); {root} has {came}")
    return builders.pop(), sorted(map(str, found))


def _open(data: Data, rank: int, ranks: int) -> Any:
    """A rank's share of the whole, as a stream: of local text by this project, of the rest by `datasets`."""
    if data.dataset == "fineweb_edu":
        return _streamed(data, rank, ranks, FINEWEB_EDU, data.subset)
    builder, paths = text_files(data)
    if builder == "text" or all(path.endswith(LINES) for path in paths):
        return TextFiles(paths, rank=rank, ranks=ranks)
    return _streamed(data, rank, ranks, builder, data_files=paths)


def _streamed(data: Data, rank: int, ranks: int, *what: str, **options: Any) -> Any:
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when the library is imported
    try:
        import datasets
        from datasets.distributed import split_dataset_by_node
    except ImportError as error:
        raise ValueError(
            "data.dataset must be 'python', 'synthetic', or 'files' of text or JSONL without the package datasets"
            f" (pip install -e '.[train]'); got {describe(data)} ({error})"
        ) from error
    whole = datasets.load_dataset(*what, split="train", streaming=True, **options)
    return split_dataset_by_node(whole, rank=rank, world_size=ranks)


END_OF_TEXT = 0
"""The byte that ends a document. UTF-8 text has no other use for it; one that stands in a text becomes a space."""


class Tokenizer(Protocol):
    """What the data asks of a tokenizer."""

    vocab_size: int

    def encode(self, text: str) -> Tensor:
        """int64 [tokens] of one document, its end included where the vocabulary has a token for it."""


class ByteTokenizer:
    """UTF-8 bytes; a document ends with byte 0."""

    vocab_size = 256

    def encode(self, text: str) -> Tensor:
        data = bytearray(text.replace("\0", " ").encode("utf-8", errors="replace"))
        data.append(END_OF_TEXT)
        return torch.frombuffer(data, dtype=torch.uint8).long()


class FileTokenizer:
    """A tokenizer.json; a document ends with its <|endoftext|>, if it has one."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(
                f"data.tokenizer must be 'bytes' without the package tokenizers (pip install -e '.[train]'); "
                f"got {str(path)!r} ({error})"
            ) from error

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self.vocab_size = self._tokenizer.get_vocab_size()
        self._end = self._tokenizer.token_to_id("<|endoftext|>")

    def encode(self, text: str) -> Tensor:
        ids = self._tokenizer.encode(text).ids
        return torch.tensor(ids if self._end is None else [*ids, self._end], dtype=torch.int64)


def tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer of `data.tokenizer`; ValueError if the model's vocabulary does not hold all of its tokens."""
    if name != "bytes" and not Path(name).is_file():
        raise ValueError(f"data.tokenizer must be 'bytes' or the path of a tokenizer.json; got {name!r}")
    found: Tokenizer = ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name))
    if found.vocab_size > vocab_size:
        raise ValueError(f"model.vocab_size must be at least the {found.vocab_size} tokens of {name}; got {vocab_size}")
    return found


BOUNDS = 64
"""`cu_seqlens` has a multiple of so many documents, the last ones empty, so that few shapes reach the compiler."""


@dataclass(frozen=True)
class Row:
    """One sequence."""

    tokens: Tensor
    """int64 [seq_len]."""
    lengths: tuple[int, ...]
    """Of its documents; they add up to seq_len."""


@dataclass(frozen=True)
class Batch:
    """What one forward pass takes."""

    tokens: Tensor
    """int64 [B, S]; packed: [1, B·S]."""
    targets: Tensor
    """int64, as `tokens`: the token that follows in the same document, or IGNORED."""
    num_targets: int
    """Those that are not ignored."""
    cu_seqlens: Tensor | None = None
    """int32 [N+1], the bounds of the packed documents."""
    position: dict[str, Any] = field(default_factory=dict)
    """Where its source goes on after it."""

    def to(self, device: torch.device) -> Batch:
        """On a device; from pinned memory without waiting."""
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """In memory from which a GPU copies by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, move: Callable[[Tensor], Tensor]) -> Batch:
        bounds = None if self.cu_seqlens is None else move(self.cu_seqlens)
        return replace(self, tokens=move(self.tokens), targets=move(self.targets), cu_seqlens=bounds)


class Packer:
    """Cuts a stream of token documents into rows. `rest` is what the next row begins with."""

    def __init__(self, documents: Iterator[Tensor], seq_len: int, rest: Tensor | None = None) -> None:
        self._documents, self._seq_len = documents, seq_len
        self.rest = torch.empty(0, dtype=torch.int64) if rest is None else rest

    def row(self) -> Row:
        parts: list[Tensor] = []
        missing = self._seq_len
        while missing:
            document = self.rest if self.rest.numel() else next(self._documents)
            parts.append(document[:missing])
            self.rest = document[missing:]
            missing -= parts[-1].numel()
        return Row(torch.cat(parts), tuple(part.numel() for part in parts if part.numel()))


def with_empty_documents(cu_seqlens: Tensor, num_documents: int) -> Tensor:
    """The bounds of so many documents: those given, int32 [N+1], and empty ones behind them; no host sync."""
    missing = num_documents + 1 - cu_seqlens.numel()
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])


def pack(rows: Sequence[Row], *, packing: bool, position: dict[str, Any]) -> Batch:
    """Rows as one batch, with the targets that the loss asks for."""
    tokens = torch.stack([row.tokens for row in rows])
    cu_seqlens = None
    if packing:
        tokens = tokens.flatten()[None]
        cu_seqlens = _bounds([length for row in rows for length in row.lengths])
    targets = loss.next_tokens(tokens, cu_seqlens)
    return Batch(tokens, targets, int((targets != IGNORED).sum()), cu_seqlens, position)


def _bounds(lengths: Sequence[int]) -> Tensor:
    """int32 [N+1] of documents of these lengths, and of empty ones behind them up to a multiple of BOUNDS."""
    ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_documents = -(-(len(ends) + 1) // BOUNDS) * BOUNDS
    return with_empty_documents(torch.cat([ends.new_zeros(1), ends]), num_documents)

"""Documents through `datasets`: FineWeb-Edu streamed, files of text, JSONL and Parquet, Python's own sources.

All are one kind of stream: each rank has its own share, the position can be saved and found again, and whether a
document is held out for validation is decided by its content, so that a copy of it cannot be on the other side.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when the library is imported
        try:
            from datasets.distributed import split_dataset_by_node
        except ImportError as error:
            raise ValueError(
                f"data.dataset must be 'synthetic' without the package datasets (pip install -e '.[train]'); "
                f"got {data.dataset!r} ({error})"
            ) from error

        self.name, self._column, self._held_out = describe(data), data.text_field, held_out
        self._report, self._report_every = report, data.report_docs
        self._dataset: Any = split_dataset_by_node(_open(data), rank=rank, world_size=ranks)
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


def files(data: Data) -> tuple[str, list[str]]:
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


def _open(data: Data) -> Any:
    """The whole dataset, as a stream."""
    import datasets

    if data.dataset == "fineweb_edu":
        return datasets.load_dataset(FINEWEB_EDU, data.subset, split="train", streaming=True)
    builder, paths = files(data)
    options = {"sample_by": "document", "encoding_errors": "replace"} if builder == "text" else {}
    return datasets.load_dataset(builder, data_files=paths, split="train", streaming=True, **options)

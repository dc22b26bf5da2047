"""The text of an atlas: the Python sources of this interpreter, its standard library's and its packages', in one file.

Each file is a document of corpus.jsonl, in an order that its content decides, so that training meets no package as a
whole; equal files stand there once. `nsa.train.data.packing` decides by content what is held out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import site
import sysconfig
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nsa.io import atomic_write, open_atomic
from nsa.train.data.packing import HELD_OUT

CORPUS, ABOUT = "corpus.jsonl", "corpus.json"
_READERS = 16
"""Threads: tens of thousands of files that no cache holds yet are waited for one by one otherwise."""
MOST_BYTES = 2**20
"""Of a file: longer ones are mostly tables that a program wrote."""


@dataclass(frozen=True)
class Corpus:
    """One corpus on the disk."""

    path: Path
    files: int
    num_bytes: int
    held_out_bytes: int
    sha256: str
    """Of the texts in their order, 16 digits: which text it was."""

    @property
    def described(self) -> str:
        """For a record."""
        return (
            f"Python sources of the standard library and installed packages: {self.files:,} files,"
            f" {self.num_bytes / 1e6:.1f} MB, sha256 {self.sha256}; 1 file of {HELD_OUT} held out"
        )


def roots() -> list[Path]:
    """The folders of the standard library and of installed packages; none lies in another."""
    names = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = {Path(name).resolve() for name in (*names, *site.getsitepackages())}
    return sorted(root for root in found if not found & set(root.parents))


def prepare(folder: Path, sources: Sequence[Path] | None = None) -> Corpus:
    """The corpus in a folder, made from `sources` (default: `roots`) where it is not there yet.

    Raises ValueError where the sources hold no text, or corpus.json is not what was written; OSError.
    """
    if (folder / ABOUT).exists():
        return _known(folder)
    texts: dict[str, bytes] = {}
    with ThreadPoolExecutor(_READERS) as readers:
        for root in roots() if sources is None else sources:
            for content in readers.map(_text, root.rglob("*.py")):
                if content is not None:
                    texts.setdefault(hashlib.sha256(content).hexdigest(), content)
    if not texts:
        raise ValueError(f"no Python sources below {', '.join(map(str, sources or roots()))}")
    digest, held_out = hashlib.sha256(), 0
    with open_atomic(folder / CORPUS) as file:
        for name in sorted(texts):
            digest.update(texts[name])
            if zlib.crc32(texts[name]) % HELD_OUT == 0:
                held_out += len(texts[name])
            file.write(json.dumps({"text": texts[name].decode()}).encode() + b"\n")
    size = sum(map(len, texts.values()))
    made = Corpus(folder / CORPUS, len(texts), size, held_out, digest.hexdigest()[:16])
    about = {name: value for name, value in dataclasses.asdict(made).items() if name != "path"}
    atomic_write(folder / ABOUT, json.dumps(about) + "\n")
    return made


def _known(folder: Path) -> Corpus:
    try:
        return Corpus(folder / CORPUS, **json.loads((folder / ABOUT).read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / ABOUT} is damaged ({error}); remove it, and the corpus is made again") from None


def _text(path: Path) -> bytes | None:
    """The file, None where it is no text, empty, too long or cannot be read."""
    try:
        if not 0 < path.stat().st_size <= MOST_BYTES:
            return None
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return content

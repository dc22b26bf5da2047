"""From text to token ids: bytes, or a tokenizer.json through `tokenizers`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

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

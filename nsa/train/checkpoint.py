"""Checkpoints that a kill at any moment cannot spoil.

A file is the SHA-256 of what follows, in hex, a line break, and what `torch.save` wrote. It appears under its name
only when all of it is on the disk, and `latest.ckpt`, a link, moves to it only after that.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from nsa.io import open_atomic, sync_folder

LATEST = "latest.ckpt"
_DIGEST_BYTES = 64
_NAME = re.compile(r"step-(\d{8,})\.ckpt")
_UNFINISHED = (".step-*.new", ".link-*", ".partial-*")
"""What a kill leaves: of `open_atomic`, of the link, and of checkpoints before this form."""


class DamagedCheckpointError(ValueError):
    """The file is not what was written; the message has its path."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The newest intact checkpoint."""

    path: Path
    state: dict[str, Any]
    refused: tuple[str, ...]
    """Newer ones that are damaged, by name and reason."""


def save(folder: Path, step: int, state: dict[str, Any], keep: int | None = None) -> Path:
    """Write step-<step>.ckpt and let latest.ckpt point at it; both are on the disk when this returns.

    With `keep` only the newest so many stay, and what a kill left half-written goes: one writer to a folder.
    """
    path = folder / f"step-{step:08d}.ckpt"
    with open_atomic(path) as file:
        _write(file, state)
    link = folder / f".link-{secrets.token_hex(8)}"
    link.symlink_to(path.name)
    os.replace(link, folder / LATEST)
    sync_folder(folder)
    if keep is not None:
        _forget(folder, path, keep)
    return path


def encode(state: dict[str, Any]) -> bytes:
    """The bytes of a checkpoint file: hash and state."""
    buffer = io.BytesIO()
    _write(buffer, state)
    return buffer.getvalue()


def latest(folder: Path) -> Path | None:
    """Where latest.ckpt points; None before the first checkpoint."""
    link = folder / LATEST
    return link.resolve() if link.is_symlink() else None


def load(path: Path) -> dict[str, Any]:
    """The state that was saved, tensors on the CPU. Raises DamagedCheckpointError if a byte of it differs."""
    digest, _, payload = path.read_bytes().partition(b"\n")
    if digest != hashlib.sha256(payload).hexdigest().encode():
        raise DamagedCheckpointError(f"{path} is damaged: its {len(payload)} bytes do not have the hash at its head")
    state: dict[str, Any] = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    return state


def newest_intact(folder: Path) -> LoadedCheckpoint | None:
    """The newest checkpoint that can be read, with the names of newer ones that cannot; None without any.

    Raises DamagedCheckpointError naming them all where every one is damaged: a run must not silently start over.
    """
    refused: list[str] = []
    for path in sorted(_numbered(folder), key=_step_of, reverse=True):
        try:
            return LoadedCheckpoint(path, load(path), tuple(refused))
        except (DamagedCheckpointError, OSError) as error:
            refused.append(str(error))
    if refused:
        raise DamagedCheckpointError("no checkpoint is whole: " + "; ".join(refused))
    return None


class _Hashing(io.RawIOBase):
    """Passes on what is written, and hashes it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def writable(self) -> bool:
        return True


def _write(file: Any, state: dict[str, Any]) -> None:
    """Hash and state, without holding all of it in memory a second time; `file` can seek."""
    file.write(b"0" * _DIGEST_BYTES + b"\n")
    hashing = _Hashing(file)
    torch.save(state, cast(IO[bytes], hashing))
    file.seek(0)
    file.write(hashing.sha256.hexdigest().encode())
    file.seek(0, os.SEEK_END)


def _numbered(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _forget(folder: Path, newest: Path, keep: int) -> None:
    """Remove all but `newest` and the keep - 1 before it, and what was never finished.

    What stands after it is damaged (else the run had gone on from there): it does not count.
    """
    up_to = sorted((path for path in _numbered(folder) if _step_of(path) <= _step_of(newest)), key=_step_of)
    unfinished = (path for pattern in _UNFINISHED for path in folder.glob(pattern))
    for path in (*up_to[:-keep], *unfinished):
        path.unlink(missing_ok=True)

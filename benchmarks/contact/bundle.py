"""The bundle of a first contact: what it measured, checked and printed, in one .tar.gz, each file with its SHA-256.

A bundle holds files of a folder of results (`merge.PATTERNS`), the steps and their logs, and manifest.json, which names
every file with its size and hash. The hash of the manifest is the bundle's own: sender and receiver compare it. What
must not leave a machine (`private`) is taken out before anything is hashed.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contact.private import PrivateWords
from benchmarks.history import merge, plausible, run_file
from benchmarks.history.run_file import DamagedLine, StoredRecord
from harness import schema
from harness.fingerprint import Fingerprint
from nsa.io import open_atomic

SCHEMA_VERSION = 1
MANIFEST, STEPS = "manifest.json", "steps.jsonl"
PARTS = ("runs/*/*.jsonl", "regression/*/*.jsonl", "calibration/*.json", "laws/*.json")
"""Of a folder of results; the rest of `merge.PATTERNS` is decided elsewhere than on a new machine."""
BESIDE = (STEPS, "preflight.json", "logs/*.log")
MOST_FILES = 500
MOST_BYTES = 64 * 2**20
"""Of one file, and of all files together before they are packed."""
MOST_LOG_BYTES = 2**20
"""Of a log, of which the end is kept."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,2}", re.ASCII)


class BundleError(ValueError):
    """A bundle that cannot be made, believed or merged; the message says why and what to do."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a bundle."""

    name: str
    """Its path."""
    sha256: str
    size_bytes: int

    def __post_init__(self) -> None:
        if not allowed(self.name):
            raise ValueError(f"{self.name!r} is no file of a bundle")

    @classmethod
    def of(cls, name: str, content: bytes) -> FileEntry:
        return cls(name, hashlib.sha256(content).hexdigest(), len(content))


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself."""

    schema_version: int
    fingerprint: Fingerprint
    """Of the machine when it was packed."""
    complete: bool
    """Whether every step was green: of a first contact, or with `smoke` the least of it."""
    files: tuple[FileEntry, ...]
    """Every other file."""
    smoke: bool = False
    """Whether each step was cut down to its least, of which no baseline comes."""

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version must be {SCHEMA_VERSION}; got {self.schema_version}: use a newer version")
        for name, value in vars(self.fingerprint).items():
            if isinstance(value, str) and (why := plausible.hidden(value, f"fingerprint.{name}")):
                raise ValueError(why)
        if why := plausible.objection(dataclasses.asdict(self.fingerprint), "fingerprint"):
            raise ValueError(why)

    @property
    def state(self) -> str:
        """What is said of it."""
        if not self.complete:
            return f"{'smoke, ' if self.smoke else ''}NOT complete: a step was red or did not run"
        if self.smoke:
            return "smoke, complete as such: the least of every step is green, and no baseline comes of it"
        return "complete"

    def encoded(self) -> bytes:
        """The bytes of manifest.json, the same for equal manifests."""
        return (json.dumps(dataclasses.asdict(self), allow_nan=False, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """Raises ValueError or TypeError saying what is wrong with it."""
        return schema.build(cls, json.loads(content.decode()), "manifest")


def allowed(name: str) -> bool:
    """Whether a path may stand in a bundle beside the manifest."""
    return bool(_PLAIN.fullmatch(name)) and any(Path(name).match(pattern) for pattern in (*PARTS, *BESIDE))


def write(folder: Path, fingerprint: Fingerprint, target: Path, *, complete: bool, smoke: bool = False) -> str:
    """Pack the folder of a first contact into `target`, in one step; the manifest's SHA-256.

    Lines of records that a crash has damaged are left out, and named on stdout.

    Raises BundleError where something would leave the machine that must not, or where it is too large.
    """
    private = PrivateWords.here(folders=(folder, *folder.absolute().parents[:2]))  # its --out is two above
    content = {name: _cleaned(path, name, private) for name, path in _files(folder).items()}
    if len(content) > MOST_FILES or sum(map(len, content.values())) > MOST_BYTES:
        raise BundleError(
            f"{folder} holds more than {MOST_FILES} files or {MOST_BYTES / 2**20:.0f} MiB; remove old runs"
        )
    files = tuple(FileEntry.of(name, data) for name, data in sorted(content.items()))
    manifest = Manifest(SCHEMA_VERSION, fingerprint, complete, files, smoke)
    encoded = manifest.encoded()
    if left := private.found(encoded.decode()):
        raise BundleError(f"the fingerprint holds {left}; nothing was packed")
    with (
        open_atomic(target) as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, data in ((MANIFEST, encoded), *sorted(content.items())):
            tar.addfile(_member(name, len(data)), io.BytesIO(data))
    return hashlib.sha256(encoded).hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    refused: list[str] = []
    found = {
        path.relative_to(folder).as_posix(): path for path in merge.plain_files(folder, (*PARTS, *BESIDE), refused)
    }
    if refused:
        raise BundleError(f"cannot be packed: {refused[0]}")
    return found


def _cleaned(path: Path, name: str, private: PrivateWords) -> bytes:
    data = path.read_bytes()
    if name.endswith(".log"):
        data = data[-MOST_LOG_BYTES:]
    text = data.decode(errors="replace")
    damaged = _damaged(name, text)
    for number, why in damaged.items():
        print(f"note: {path}:{number} is damaged and was left out: {why}")
    kept = [line for number, line in enumerate(text.split("\n"), start=1) if number not in damaged]
    text = private.removed("\n".join(kept))
    if left := private.found(text):
        raise BundleError(f"{path} still holds {left}; nothing was packed. Remove it there, then run this again")
    return text.encode()


def _damaged(name: str, text: str) -> dict[int, str]:
    """Number, counted from 1, of each line that is no record, and why."""
    lines = [(number, line) for number, line in enumerate(text.encode().split(b"\n"), start=1) if line.strip()]
    if name.startswith("runs/"):
        found = run_file.parsed(lines, Path(name))
        return dict(_no_records(found))
    if name.startswith("regression/"):
        reasons = {number: merge.why_damaged(line, Path(name)) for number, line in lines}
        return {number: why for number, why in reasons.items() if why is not None}
    return {}


def _no_records(found: Iterable[StoredRecord | DamagedLine]) -> Iterator[tuple[int, str]]:
    for one in found:
        if isinstance(one, DamagedLine):
            yield one.line, one.why
        elif why := merge.impossible(one.record()):
            yield one.number, why


def _member(name: str, size: int) -> tarfile.TarInfo:
    """Without owner and time, which are the machine's."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member

"""A bundle from elsewhere: verified before it is believed, and merged completely or not at all.

Nothing in it is run, and nothing is unpacked by `tarfile`: each member is read, held to the limits, and written under a
name that was checked, into a folder of its own. Each record is then read by the reader that it has in every command.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.ab import calibration
from benchmarks.contact.bundle import MANIFEST, MOST_BYTES, MOST_FILES, BundleError, FileEntry, Manifest, allowed
from benchmarks.history import laws, merge, run_file
from benchmarks.history.merge import MergeResult
from nsa.io import read_json_lines

_NO_TAR = (
    *(tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile),
    *(ValueError, OverflowError, IndexError, RecursionError),  # of headers that were made to be misread
)
_EARLIEST = datetime(2020, 1, 1, tzinfo=timezone.utc)
_BLOCK = 512
_HEADERS_BYTES = 4 * _BLOCK
"""Of a member, at most: its own, one of PAX before it, and what fills its last block."""


@dataclass(frozen=True)
class ReceivedBundle:
    """A bundle that was verified."""

    folder: Path
    """Its files, as a folder of results; gone when the context ends."""
    manifest: Manifest
    sha256: str
    """Of the manifest: what the sender's command printed."""
    records: int
    """Lines that a merge into an empty folder takes."""


class _Limited:
    """A stream that ends in BundleError after so many bytes: a small file may unpack to a large one."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise BundleError(f"it unpacks to more than {MOST_BYTES / 2**20:.0f} MiB")
        return data


@contextmanager
def opened(path: Path) -> Iterator[ReceivedBundle]:
    """The verified bundle. Raises BundleError naming the file and what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="nsa-bundle-") as name:
        folder = Path(name)
        try:
            content = _members(path)
            found = _verified(content, folder)
        except BundleError as error:
            raise BundleError(f"{path}: {error}. Ask for it again; nothing of it was taken") from error
        yield found


def _members(path: Path) -> dict[str, bytes]:
    """Each file by its name. Raises BundleError for anything else than plain files of a bundle."""
    found: dict[str, bytes] = {}
    most = MOST_BYTES + MOST_FILES * _HEADERS_BYTES
    try:
        with (
            gzip.open(path, "rb") as packed,
            tarfile.open(fileobj=cast(IO[bytes], _Limited(cast(IO[bytes], packed), most)), mode="r|") as tar,
        ):
            for member in tar:
                if len(found) > MOST_FILES:
                    raise BundleError(f"it holds more than {MOST_FILES} files")
                if not member.isreg() or member.issparse():
                    raise BundleError(f"{member.name!r} is no plain file")
                if member.name != MANIFEST and not allowed(member.name):
                    raise BundleError(f"{member.name!r} is no file of a bundle")
                if member.name in found:
                    raise BundleError(f"{member.name!r} is there twice")
                if member.size > MOST_BYTES:
                    raise BundleError(f"{member.name!r} is larger than {MOST_BYTES / 2**20:.0f} MiB")
                stream = tar.extractfile(member)
                assert stream is not None
                found[member.name] = stream.read()
    except BundleError:
        raise
    except _NO_TAR as error:
        raise BundleError(f"it is no .tar.gz, or is cut off: {error}") from error
    return found


def _verified(content: dict[str, bytes], folder: Path) -> ReceivedBundle:
    """Manifest, hashes, then each record. Raises BundleError."""
    encoded = content.pop(MANIFEST, None)
    if encoded is None:
        raise BundleError(f"it has no {MANIFEST}")
    try:
        manifest = Manifest.decode(encoded)
    except (ValueError, TypeError, RecursionError) as error:
        raise BundleError(f"{MANIFEST}: {error}") from error
    named = {entry.name: entry for entry in manifest.files}
    if wrong := sorted(named.keys() ^ content.keys()):
        raise BundleError(f"{MANIFEST} and the files differ: {', '.join(wrong[:5])}")
    for name, data in content.items():
        if FileEntry.of(name, data) != named[name]:
            raise BundleError(f"{name} differs from its SHA-256 in {MANIFEST}")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    records = _require_readable(folder, manifest)
    _require_complete(manifest)
    return ReceivedBundle(folder, manifest, hashlib.sha256(encoded).hexdigest(), records)


def _require_complete(manifest: Manifest) -> None:
    """Raises BundleError where a first contact says that every step was green, and lacks what these leave."""
    if not manifest.complete or manifest.smoke:
        return
    for step, pattern in (("laws", "laws/*.json"), ("incidents", "regression/*/*.jsonl")):
        if not any(Path(entry.name).match(pattern) for entry in manifest.files):
            raise BundleError(f"{MANIFEST}: complete must be false without {step}, {pattern}; got true")


def _require_readable(folder: Path, manifest: Manifest) -> int:
    """Every record by its own reader, and of the machine that the manifest names; how many lines there are."""
    trial = MergeResult()
    if _holds_records(folder):
        with tempfile.TemporaryDirectory(prefix="nsa-bundle-") as empty:
            merge.merge(folder, Path(empty), trial)
    if trial.refused:
        raise BundleError(trial.refused[0].replace(f"{folder}/", ""))
    _require_recent(MANIFEST, manifest.fingerprint.utc)
    for path, machine in _machines(folder):
        if machine != manifest.fingerprint.machine:
            name = path.relative_to(folder).as_posix()
            raise BundleError(
                f"{name} is of the machine {machine!r}, and {MANIFEST} of {manifest.fingerprint.machine!r}"
            )
    for name, fingerprint in _fingerprints(folder):
        for field in ("machine", "device"):
            found, wanted = fingerprint.get(field), getattr(manifest.fingerprint, field)
            if found != wanted:
                raise BundleError(f"{name} is of the {field} {found!r}, and {MANIFEST} of {wanted!r}")
        _require_recent(name, fingerprint.get("utc"))
    for path in folder.glob("laws/*.json"):
        try:
            summary = laws.decode(path.read_bytes())
        except ValueError as error:
            raise BundleError(f"laws/{path.name} is no summary of tests: {error}") from error
        if summary.utc:
            _require_recent(f"laws/{path.name}", summary.utc)
    return trial.new_lines


def _require_recent(name: str, utc: Any) -> None:
    """Raises BundleError for what was not measured since this project began, or not yet."""
    try:
        moment = datetime.fromisoformat(str(utc).replace("Z", "+00:00"))
    except ValueError:
        raise BundleError(f"{name} is dated {utc!r}, which is no moment") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    if not _EARLIEST <= moment <= datetime.now(timezone.utc) + timedelta(days=1):
        raise BundleError(
            f"{name} is dated {utc}: must be from {_EARLIEST.year} to a day from now. Set that clock right"
        )


def _machines(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """(file, machine) of every file that is kept under a machine's name; None where its name says none."""
    for pattern in ("runs/*/*.jsonl", "regression/*/*.jsonl"):
        for path in folder.glob(pattern):
            yield path, path.parent.name
    for path in folder.glob("calibration/*.json"):
        yield path, path.stem
    for path in folder.glob("laws/*.json"):
        name = laws.NAME.fullmatch(path.stem)
        yield path, name and name["machine"]


def _fingerprints(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(file, machine and device) of every record. Raises BundleError for a calibration that is none."""
    for path in folder.glob("runs/*/*.jsonl"):
        for record in run_file.split(run_file.read(path))[0]:
            yield path.name, vars(record.fingerprint)
    for path in folder.glob("regression/*/*.jsonl"):
        for line in read_json_lines(path):
            yield path.name, _object(line["fingerprint"])
    for path in folder.glob("calibration/*.json"):
        try:
            found = calibration.load(folder, path.stem)
        except ValueError as error:
            raise BundleError(str(error).replace(f"{folder}/", "")) from error
        if found is not None:
            yield path.name, vars(found.fingerprint)


def merge_into(received: ReceivedBundle, results: Path) -> MergeResult:
    """Bring the records of a verified bundle into a folder of results; again adds nothing. Of two calibrations of one
    device that of more pairs is kept. One of another device than ours is left out, and named in `refused`.

    Raises BundleError where a file that is there says something else, before anything is written.
    """
    if conflicts := list(_conflicts(received.folder, results)):
        raise BundleError("; ".join(conflicts) + ". Nothing was merged")
    merged = MergeResult()
    foreign = list(_leave_foreign_out(received.folder, results))
    for path in received.folder.glob("calibration/*.json"):
        if _pairs(results / "calibration" / path.name) > _pairs(path):
            path.unlink()
    if _holds_records(received.folder):
        merge.merge(received.folder, results, merged)
    if merged.refused:
        raise BundleError(f"{merged.refused[0]}; what was merged before it is complete")
    merged.refused += foreign
    return merged


def _leave_foreign_out(folder: Path, results: Path) -> Iterator[str]:
    """Remove calibrations of which `results` has one for another device, from the bundle's folder; what to say."""
    for path in sorted(folder.glob("calibration/*.json")):
        theirs, ours = (
            _object(_object(_json(file)).get("fingerprint")).get("device")
            for file in (path, results / "calibration" / path.name)
        )
        if ours is not None and ours != theirs:
            path.unlink()
            yield (
                f"calibration/{path.name} is there for {ours!r}, and the bundle's is for {theirs!r}: it was left out."
                " Remove ours and merge again if theirs is wanted"
            )


def _conflicts(folder: Path, results: Path) -> Iterator[str]:
    """What stands in the way. A newer calibration of the same device is none: the newest counts; nor is one of
    another device, which is left out."""
    for pattern in merge.REPLACED:
        for path in sorted(folder.glob(pattern)):
            name = path.relative_to(folder).as_posix()
            target = results / name
            if not target.exists() or target.read_bytes() == path.read_bytes():
                continue
            if pattern.startswith("laws/"):
                yield f"{name} is there with another content; remove the one that is not wanted"
                continue
            theirs, ours = (_object(_object(_json(file)).get("fingerprint")) for file in (path, target))
            if theirs.get("device") == ours.get("device") and theirs.get("utc") == ours.get("utc"):
                yield f"{name} is there with another content under the same date; remove the one that is not wanted"


def _pairs(calibrated: Path) -> int:
    """Of processes, that a calibration is of; 0 where there is none."""
    found = _object(_json(calibrated)).get("pairs")
    return found if isinstance(found, int) else 0


def _holds_records(folder: Path) -> bool:
    """A machine that was refused at once sends its preflight alone."""
    return any(next(folder.glob(pattern), None) for pattern in merge.PATTERNS)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _json(path: Path) -> Any:
    """None where the file is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None

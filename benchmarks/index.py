"""The index of the runs: where each record stands in the JSONL files, with the columns that queries ask for.

Only a cache: the files under results/runs are the truth, and whatever is wrong with the index, it is made again.
SQLite because it is in the standard library and lets several processes write one database, which DuckDB refuses.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import inspect
import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path

from benchmarks import ceilings, clocks, fingerprint, records, schema
from benchmarks import key as keys
from benchmarks.fingerprint import Fingerprint
from benchmarks.records import Record

FOLDER = ".index"
BUSY_TIMEOUT_S = 120.0
"""How long a process waits while another one reads new lines: 10,000 of them take about 3 s."""
_UNREAD = (-1, -1)
"""Size and time of a file that could not be read, as no file that can be has them."""
LAYOUT = """
CREATE TABLE IF NOT EXISTS files(
  id INTEGER PRIMARY KEY, path BLOB UNIQUE, size INT, mtime_ns INT, ended_bytes INT, ended_lines INT, digest BLOB);
CREATE TABLE IF NOT EXISTS fingerprints(id INTEGER PRIMARY KEY, json TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS records(
  file INT, line INT, start INT, length INT, fingerprint INT, machine TEXT, utc TEXT, mode TEXT, case_name TEXT,
  implementation TEXT, backend TEXT, path TEXT, identity BLOB, outcome TEXT, latency_ms REAL, low_ms REAL, high_ms REAL,
  tokens_per_s REAL, PRIMARY KEY (file, line));
CREATE TABLE IF NOT EXISTS damaged(file INT, line INT, why TEXT, PRIMARY KEY (file, line));
CREATE INDEX IF NOT EXISTS by_case ON records(machine, case_name, implementation, utc);
"""


@contextmanager
def opened(results: Path) -> Iterator[sqlite3.Connection]:
    """The index of results/runs as the files are now; in memory where results/ cannot hold one.

    Whoever has it open holds a shared lock on results/.index/lock, so that only a process that is alone with a damaged
    index throws it away; another one makes its own in memory.
    """
    folder = results / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # a read-only copy of the results
        with closing(_connect(":memory:", results / "runs")) as connection:
            yield connection
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with closing(_on_disk(folder, lock, results / "runs")) as connection:
            yield connection
    finally:
        os.close(lock)


def _on_disk(folder: Path, lock: int, runs: Path) -> sqlite3.Connection:
    path = folder / f"{_version()}.sqlite"
    if not path.exists():
        _throw_away(folder, lock)  # what other versions of these sources left
    try:
        return _connect(path, runs)
    except sqlite3.DatabaseError:  # damaged, or the disk is full
        if not _throw_away(folder, lock):
            return _connect(":memory:", runs)
    try:
        return _connect(path, runs)
    except sqlite3.DatabaseError:
        return _connect(":memory:", runs)


def _version() -> str:
    """Changes with every source that decides what a valid line is or which columns it gets."""
    digest = hashlib.sha256()
    for module in (ceilings, clocks, fingerprint, keys, records, schema, sys.modules[__name__]):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:16]


def _throw_away(folder: Path, lock: int) -> bool:
    """Remove every index here; False where another process has one open or the folder refuses."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in folder.glob("*.sqlite*"):
            path.unlink()
    except OSError:
        return False
    finally:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return True


def _connect(path: Path | str, runs: Path) -> sqlite3.Connection:
    """A connection to an index that is up to date. Raises sqlite3.DatabaseError where it is damaged."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError(f"{path} is damaged")
        connection.executescript(LAYOUT)
        _refresh(connection, runs)
    except BaseException:
        connection.close()
        raise
    return connection


def _refresh(connection: sqlite3.Connection, runs: Path) -> None:
    """Take in what was appended, in one transaction: a killed process leaves the index as it was."""
    states = {os.fsencode(path.relative_to(runs)): _state(path) for path in runs.glob("*/*.jsonl")}
    if _known(connection) == states:
        return
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        known = _known(connection)  # another process may have done it meanwhile
        for path in known.keys() - states.keys():
            _forget(connection, path)
        for path in sorted(path for path, state in states.items() if known.get(path) != state):
            try:
                content = (runs / os.fsdecode(path)).read_bytes()
            except OSError as error:
                _name_unreadable(connection, path, error)
            else:
                _take_in(connection, path, content, *states[path])


def _state(path: Path) -> tuple[int, int]:
    """(size, time of the last change in ns), by which a file is known to be as it was."""
    try:
        stat = path.stat()
    except OSError:  # a link that leads nowhere
        return _UNREAD
    return stat.st_size, stat.st_mtime_ns


def _name_unreadable(connection: sqlite3.Connection, path: bytes, error: OSError) -> None:
    """A folder, or a file of someone else: damaged as a whole, and tried again next time."""
    _forget(connection, path)
    file = connection.execute(
        "INSERT INTO files(path, size, mtime_ns, ended_bytes, ended_lines, digest) VALUES (?, ?, ?, 0, 0, ?)",
        (path, *_UNREAD, hashlib.sha256().digest()),
    ).lastrowid
    connection.execute("INSERT INTO damaged VALUES (?, 1, ?)", (file, records.unreadable(error)))


def _known(connection: sqlite3.Connection) -> dict[bytes, tuple[int, int]]:
    rows = connection.execute("SELECT path, size, mtime_ns FROM files")
    return {path: (size, mtime_ns) for path, size, mtime_ns in rows}


def _forget(connection: sqlite3.Connection, path: bytes) -> None:
    for (file,) in connection.execute("SELECT id FROM files WHERE path = ?", (path,)).fetchall():
        for table in ("records", "damaged"):
            connection.execute(f"DELETE FROM {table} WHERE file = ?", (file,))
        connection.execute("DELETE FROM files WHERE id = ?", (file,))


def _take_in(connection: sqlite3.Connection, path: bytes, content: bytes, size: int, mtime_ns: int) -> None:
    """Validate the lines after those that are known already; all of them where these are not what they were.

    A last line without its end may still grow: it is read now and again next time.
    """
    ended = content.rfind(b"\n") + 1
    row = connection.execute(
        "SELECT id, ended_bytes, ended_lines, digest FROM files WHERE path = ?", (path,)
    ).fetchone()
    if row is not None and hashlib.sha256(content[: row[1]]).digest() == row[3]:
        file, start, lines, _ = row
        for table in ("records", "damaged"):
            connection.execute(f"DELETE FROM {table} WHERE file = ? AND line > ?", (file, lines))
    else:
        _forget(connection, path)
        file, start, lines = connection.execute("INSERT INTO files(path) VALUES (?)", (path,)).lastrowid, 0, 0
    for line in content[start:].split(b"\n"):
        lines += 1
        if line.strip():
            _add(connection, file, lines, start, line)
        start += len(line) + 1
    connection.execute(
        "UPDATE files SET size = ?, mtime_ns = ?, ended_bytes = ?, ended_lines = ?, digest = ? WHERE id = ?",
        (size, mtime_ns, ended, content.count(b"\n"), hashlib.sha256(content[:ended]).digest(), file),
    )


def _add(connection: sqlite3.Connection, file: int, number: int, start: int, line: bytes) -> None:
    try:
        record = Record.from_json(line.decode())
    except (ValueError, TypeError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
        why = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
        connection.execute("INSERT INTO damaged VALUES (?, ?, ?)", (file, number, why))
        return
    identity = _as_json(record.fingerprint)
    connection.execute("INSERT OR IGNORE INTO fingerprints(json) VALUES (?)", (identity,))
    (place,) = connection.execute("SELECT id FROM fingerprints WHERE json = ?", (identity,)).fetchone()
    row = (file, number, start, len(line), place, *_columns(record))
    connection.execute(f"INSERT INTO records VALUES ({', '.join('?' * len(row))})", row)


@lru_cache  # all records of a run share one, and spelling it out costs as much as checking a record
def _as_json(identity: Fingerprint) -> str:
    return json.dumps(dataclasses.asdict(identity), sort_keys=True)


def _columns(record: Record) -> tuple[str | bytes | float | None, ...]:
    key, (low_ms, high_ms) = record.key, record.interval_ms or (None, None)
    what = (key.mode, key.case, key.implementation, key.backend_asked or "", record.gate.path if record.gate else "")
    identity = hashlib.sha256(record.identity.encode()).digest()
    figures = (record.latency_ms, low_ms, high_ms, record.tokens_per_s)
    return (record.fingerprint.machine, record.fingerprint.utc, *what, identity, record.outcome.value, *figures)

"""loader-stall. Reported: FineWeb-Edu timeouts, "watchdog dumps" before step 1, a silent switch to synthetic data.

Really: a network start-up without a deadline. The server took the connection and never answered; a read without a
timeout waits for it forever.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from nsa.train import first_batch
from nsa.train.first_batch import FirstBatch, Loader, NoFirstBatchError
from regression.evidence import Bound, Evidence
from regression.incident import Incident, Step
from regression.verdict import Verdict

INCIDENT = Incident(
    id="loader-stall",
    symptom="data loader timeouts, watchdog dumps before step 1",
    cause="network start-up without a deadline: a server that never answers is waited for forever",
    detector="no heartbeat; the first batch has a deadline, a named error, and a fallback only if asked for",
    expects=Verdict.STALLED,
    floor_s=3.0,
)

_DEADLINE_S = 0.5
_MARGIN_S = 2.0
"""For a busy machine to wake the thread that waits."""


@contextmanager
def _silent_server() -> Iterator[tuple[str, int]]:
    """Its address: connections are taken by the kernel, and nobody answers them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def _shard(address: tuple[str, int]) -> Loader[bytes]:
    """A loader that asks the server for its first shard."""

    def fetch() -> bytes:
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET /shard-0 HTTP/1.0\r\n\r\n")
            return connection.recv(2**16)

    return Loader("shard-0", fetch)


def _without_deadline(loader: Loader[bytes], deadline_s: float, fallback: object = None) -> FirstBatch[bytes]:
    """The fault: the deadline is nowhere looked at."""
    begin = time.monotonic()
    return FirstBatch(loader.fetch(), loader.name, time.monotonic() - begin)


def faulty(step: Step) -> Evidence:
    """The read without a timeout; the runner must notice."""
    with inject():
        return product(step)


def product(step: Step) -> Evidence:
    """Silence becomes a named error in time; the fallback is taken only if asked for, and is recorded."""
    step(0)
    wrong, begin = list[str](), time.monotonic()
    with _silent_server() as address:
        loader = _shard(address)
        try:
            first_batch.first_batch(loader, _DEADLINE_S)
            wrong.append("a silent loader gave a batch")
        except NoFirstBatchError as error:
            if loader.name not in str(error):
                wrong.append(f"the error does not name the loader: {error}")
        waited_s = time.monotonic() - begin
        step(1)
        synthetic = first_batch.first_batch(loader, _DEADLINE_S, Loader("synthetic", lambda: b"1"))
        if synthetic.source != "synthetic":
            wrong.append(f"a batch of the fallback is recorded as one of {synthetic.source}")
    answered = first_batch.first_batch(Loader("disk", lambda: b"2"), _DEADLINE_S, Loader("synthetic", lambda: b"1"))
    if (answered.source, answered.batch) != ("disk", b"2"):
        wrong.append(f"a loader that answers was replaced by {answered.source}")
    step(2)
    return Evidence(wrong=tuple(wrong), silence_s=Bound(waited_s, _DEADLINE_S + _MARGIN_S, "s until the error"))


@contextmanager
def inject() -> Iterator[None]:
    """Take the deadline out of the product."""
    with mock.patch.object(first_batch, "first_batch", _without_deadline):
        yield

"""loader-stall. Reported: FineWeb-Edu timeouts, "watchdog dumps" before step 1, a silent switch to synthetic data.

Really: a network start-up without a deadline. The server took the connection and never answered; a read without a
timeout waits for it forever.
"""

from __future__ import annotations

import dataclasses
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from nsa.train.data import loader
from nsa.train.data.loader import SYNTHETIC, BatchFetcher, FirstBatch, NoFirstBatchError, Source, SyntheticBatches
from nsa.train.settings import Data, Settings
from regression import training
from regression.contract import Bound, Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="loader-stall",
    symptom="data loader timeouts, watchdog dumps before step 1",
    cause="network start-up without a deadline: a server that never answers is waited for forever",
    detector="no heartbeat; the first batch has a deadline, a named error, and a fallback only if asked for",
    expects=ReproVerdict.STALLED,
    floor_s=10.0,
)

_DEADLINE_S = 0.5
_MARGIN_S = 8.0
"""For a busy machine to wake the thread that waits."""
_SHARDS = Data(dataset="fineweb_edu", loader_timeout_s=_DEADLINE_S)


@contextmanager
def _silent_server() -> Iterator[tuple[str, int]]:
    """Its address: connections are taken by the kernel, and nobody answers them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@contextmanager
def _served_by(open_source: Callable[[Settings], Source]) -> Iterator[None]:
    """The network in the place of `nsa.train.data.loader.open_source`."""
    with mock.patch.object(loader, "open_source", lambda settings, *share, **options: open_source(settings)):
        yield


def _without_deadline(fetcher: BatchFetcher[Any], deadline_s: float, fallback: object = None) -> FirstBatch[Any]:
    """The fault: the deadline is nowhere looked at."""
    begin = time.monotonic()
    return FirstBatch(fetcher.fetch(), fetcher.name, time.monotonic() - begin)


def faulty(step: Step) -> Evidence:
    """The read without a timeout; the runner must notice."""
    with inject():
        return product(step)


def product(step: Step) -> Evidence:
    """Silence becomes a named error in time; the fallback is taken only if asked for, and is recorded."""
    step(0)
    wrong, opened_s = list[str](), list[float]()

    def silent(settings: Settings) -> Source:
        opened_s.append(time.monotonic())
        return _shard(address)

    with _silent_server() as address, _served_by(silent):
        try:
            _run(_SHARDS)
            wrong.append("a silent loader gave a batch")
        except NoFirstBatchError as error:
            if "fineweb_edu" not in str(error):
                wrong.append(f"the error does not name the loader: {error}")
        waited_s = time.monotonic() - opened_s[0]
        step(1)
        sources = _run(dataclasses.replace(_SHARDS, synthetic_on_fail=True))
        if sources != {SYNTHETIC}:
            wrong.append(f"steps on the fallback are recorded as ones on {', '.join(sources)}")
    step(2)
    with _served_by(lambda settings: SyntheticBatches(settings, loader.Shard())):
        patient = dataclasses.replace(_SHARDS, loader_timeout_s=60.0)  # a busy machine is no silent server
        sources = _run(dataclasses.replace(patient, synthetic_on_fail=True))
    if sources != {"fineweb_edu/sample-10BT"}:
        wrong.append(f"a loader that answers was replaced by {', '.join(sources)}")
    step(3)
    return Evidence(wrong=tuple(wrong), silence_s=Bound(waited_s, _DEADLINE_S + _MARGIN_S, "s until the error"))


def _shard(address: tuple[str, int]) -> Source:
    """A source that asks the server for its first shard."""
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /shard-0 HTTP/1.0\r\n\r\n")
        connection.recv(2**16)
    raise ConnectionError("the server has gone")


def _run(data: Data) -> set[str]:
    """A run of one step on these data, on the CPU whatever the device; the sources that its heartbeat names."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = dataclasses.replace(training.settings(Path(folder), "cpu", steps=1), data=data)
        return {record["data_source"] for record in training.run(chosen, lambda record: None).steps}


@contextmanager
def inject() -> Iterator[None]:
    """Take the deadline out of the product."""
    with injected(Fault(loader, "first_batch", _without_deadline)):
        yield

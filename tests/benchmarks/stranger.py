"""A stranger's machine from first contact to merge without its GPU: one measurement of this CPU stands for every case.

What a step of first contact would run in a process of its own is written or replayed here; preflight, the choice of
cases, records, bundle, baseline, comparison and merge are the product's.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import worker
from benchmarks.__main__ import main
from benchmarks.ab import calibration, checkout, paired_run
from benchmarks.ab.checkout import Sources
from benchmarks.ab.result import Side
from benchmarks.ab.sequential import PairTiming
from benchmarks.commands import bundle, run
from benchmarks.commands import merge as merge_command
from benchmarks.contact import preflight, session
from benchmarks.runner import Measurement
from benchmarks.timing import peak
from harness import fingerprint
from nsa.io import atomic_write
from tests.benchmarks.full_results import write_calibration, write_incidents
from tests.fake_nvml import process
from tests.fake_nvml.boards import Board

JUNIT = "<testsuite timestamp='{utc}' time='1'><testcase classname='tests.laws.test_a' name='a'/></testsuite>"
MEMORY_GB = {"40GB": 40, "40gb": 40, "80GB": 80, "3090": 24, "5090": 32}
SLOWER_BY = 0.1


class Stranger:
    """One machine, under a test's patches."""

    def __init__(self, name: str, measured: Measurement, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.name, self.results, self._folder, self._patch = name, folder / "results", folder, patch
        self._measured = measured
        (folder / "template").mkdir()
        write_calibration(folder / "template")
        patch.setattr(worker, "run", self._replayed)
        patch.setattr(session, "_run_step", self._step)
        patch.setattr(peak, "measure", lambda machine: None)
        for module in (run, bundle, merge_command):
            patch.setattr(module, "build_page", lambda results: results / "report")
        patch.setattr(paired_run, "PairStarter", lambda *_: nullcontext())
        patch.setattr(paired_run.trial, "run", lambda _, keys, *__, **___: [_slower() for _ in keys])
        patch.setattr(checkout, "sources", _no_sources)

    def is_now(self, board: Board, other_pid: int | None = None) -> None:
        """What its GPU is and tells from here on."""
        process.install(self._patch, board, other_pid)
        read, total = preflight.read, int(next(gb for mark, gb in MEMORY_GB.items() if mark in board.name) * 1e9)
        self._patch.setattr(torch.cuda, "mem_get_info", lambda: (int(0.97 * total), total))
        self._patch.setattr(fingerprint, "device_name", lambda _: board.name)

        def of_the_gpu(machine: Any, out: Path, *, asked_for_cpu: bool) -> preflight.MachineFacts:
            return read(dataclasses.replace(machine, device="cuda"), out, asked_for_cpu=asked_for_cpu)

        if read.__module__ == preflight.__name__:  # not patched yet
            self._patch.setattr(preflight, "read", of_the_gpu)

    def types(self, *words: str, out: Path | None = None) -> int:
        """A command of the benches."""
        return main([*words, "--out", str(out or self.results)])

    def _replayed(
        self, keys: Sequence[Any], device: str, plan: Any, where: Any, command: Callable[[Any], str], **_: Any
    ) -> Iterator[Measurement]:
        for key in keys:
            record = dataclasses.replace(self._measured.record, key=key, fingerprint=where, command=command(key))
            yield Measurement(record)

    def _step(self, words: Sequence[str], log: Path) -> int:
        """What a step of first contact leaves behind."""
        log.write_text("")
        identity = fingerprint.take(self.name, "cuda")
        contact = log.parents[1]
        if words[1] == "pytest":
            atomic_write(contact / "laws.xml", JUNIT.format(utc=identity.utc[:19]))
        elif words[1] == "regression":
            write_incidents(contact, 0, where=identity)
        elif words[2] == "calibrate":
            found = calibration.load(self._folder / "template", "cpu")
            assert found is not None
            calibration.save(contact, dataclasses.replace(found, fingerprint=identity))
        else:
            return main(list(words[2:]))
        return 0


def last_line(printed: str) -> dict[str, Any]:
    """What a command tells other programs."""
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _slower() -> Any:
    pair = PairTiming(10.0, 10.0 * (1 + SLOWER_BY), math.log(1 + SLOWER_BY))
    return SimpleNamespace(timed=lambda: pair)


@contextmanager
def _no_sources(refs: Sequence[str]) -> Iterator[list[Sources]]:
    yield [Sources(Side(ref, f"{i:040x}", False, f"{i:016x}"), Path(), Path()) for i, ref in enumerate(refs)]

"""Kernels compiled ahead into Triton's cache, several processes at a time.

Triton finds a compiled kernel by a hash of its sources, signature, constants, options, target and its own version.
What is compiled here was recorded from a real call (`ahead_of_time`), so a later process asks for the same hash.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from triton.runtime import driver

from nsa.io import cannot_write
from nsa.triton_backend.ahead_of_time import Launch
from nsa.triton_backend.compile_log import Compilation, listening

MOST_JOBS = 16
"""Each holds PyTorch and a compiler, half a GiB."""


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel."""

    name: str
    """File and function: "compressed_window._forward"."""
    seconds: float
    was_there: bool
    """Whether the cache held it."""
    error: str | None = None
    """Why it could not be compiled or kept; None where it was."""


@dataclass(frozen=True)
class _Task:
    """A launch that another process can be handed: its function by name, since Triton's objects cannot be sent."""

    name: str
    architecture: int
    module: str
    function: str
    source: type
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, launch: Launch) -> _Task:
        source = launch.source
        module, function = source.fn.__module__, source.fn.fn.__name__
        arguments = source.signature, source.constants, source.attrs
        return cls(launch.name, launch.architecture, module, function, type(source), arguments, launch.options)

    def launch(self) -> Launch:
        function = getattr(importlib.import_module(self.module), self.function)
        return Launch(self.name, self.architecture, self.source(function, *self.arguments), self.options)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One of each kernel: launches that Triton would look for under one hash are compiled once."""
    found = {(one.architecture, one.source.hash(), str(sorted(one.options.items()))): one for one in launches}
    return list(found.values())


def compile_all(launches: Sequence[Launch], jobs: int | None = None) -> Iterator[Compiled]:
    """Compile distinct launches, each as it is done; `jobs` processes, by default one for each usable core, at most
    `MOST_JOBS`.

    One that fails is reported, and the others go on. Raises ValueError for fewer than one job.
    """
    jobs = min(len(os.sched_getaffinity(0)), MOST_JOBS) if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    if jobs == 1 or len(launches) < 2:
        for launch in launches:
            yield _compile(launch)
        return
    tasks = [_Task.of(launch) for launch in launches]
    # spawned, not forked: threads of PyTorch and of a GPU's driver do not survive a fork
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_compile_task, task): task.name for task in tasks}
        try:
            for future in as_completed(futures):
                yield _result(future, futures[future])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[Compiled], name: str) -> Compiled:
    try:
        return future.result()
    except BrokenProcessPool:
        return Compiled(name, 0.0, False, "the process that compiled it was ended; try again with fewer jobs")


def _compile_task(task: _Task) -> Compiled:
    return _compile(task.launch())


def _compile(launch: Launch) -> Compiled:
    begin, heard = time.perf_counter(), list[Compilation]()
    try:
        with listening(heard.append):
            launch.build_launcher(launch.compiled())
    except Exception as error:  # of any pass of the compiler, or of the disk
        said = cannot_write(error, "TRITON_CACHE_DIR") if isinstance(error, OSError) else None
        why = said or f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        return Compiled(launch.name, time.perf_counter() - begin, False, why)
    was_there = bool(heard) and all(one.was_there for one in heard)
    return Compiled(launch.name, time.perf_counter() - begin, was_there)


Say = Callable[[str], object]


def report(launches: Sequence[Launch], say: Say, jobs: int | None = None) -> list[Compiled]:
    """`compile_all`, with a line for each kernel and one for all of them."""
    begin, done = time.perf_counter(), list[Compiled]()
    for one in compile_all(launches, jobs):
        done.append(one)
        if one.error is not None:
            how = f"NOT compiled: {one.error}"
        else:
            how = "in the cache already" if one.was_there else f"compiled in {one.seconds:.1f} s"
        say(f"[{len(done)}/{len(launches)}] {one.name}: {how}")
    failed, there = sum(one.error is not None for one in done), sum(one.was_there for one in done)
    lost = f", {failed} NOT compiled" if failed else ""
    new = len(done) - failed - there
    say(f"{new} kernels compiled, {there} were in the cache{lost}: {time.perf_counter() - begin:.1f} s")
    return done


def build_launcher(say: Say) -> None:
    """Build what Triton launches kernels with on the GPU that is here: C, which it compiles once and keeps as well."""
    begin = time.perf_counter()
    _ = driver.active.utils
    say(f"Triton's launcher: {time.perf_counter() - begin:.1f} s")

"""The machine's suite as pytest-benchmark tests: `pytest benchmarks/workloads -k decode`.

pytest collects, filters, prints and exports them as usual. The samples are those of `python -m benchmarks run`, taken
by its timer behind its oracle, and its records are written too: they are what counts. Options of pytest-benchmark that
say how long to measure have no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner, watched
from benchmarks.cases.key import Key
from benchmarks.commands import options
from benchmarks.commands.run import run_command
from benchmarks.correctness import row_sampling
from benchmarks.history import run_file
from benchmarks.runner import Measurement
from benchmarks.timing import gpu_watch, peak
from benchmarks.timing.gpu_watch import GpuWatch
from benchmarks.workloads import suite
from harness import arguments, fingerprint, machines
from harness.machines import Machine, WrongMachineError
from nsa import backends

Measure = Callable[[Key], Measurement]


class Session:
    """One run: which machine, which keys, and where its records go."""

    def __init__(self, config: pytest.Config) -> None:
        self.machine: Machine = machines.machine(config.getoption("gpu"), machines.visible_gpu())
        self.backend: str = config.getoption("backend")
        self.quick = not config.getoption("full")
        self._results: Path = config.getoption("results")
        self.seed = row_sampling.new_seed()
        self.path: Path | None = None
        """The file of records; None before the first measurement."""

    def keys(self) -> list[Key]:
        """What is timed on this machine; memory is no time."""
        on_gpu = self.machine.device == "cuda"
        keys = suite.planned(suite.table(self.machine.suite), quick=self.quick, backend=self.backend, on_gpu=on_gpu)
        return suite.absent_once([key for key in keys if key.mode not in suite.IN_CHILDREN], self.machine.device)

    @cached_property
    def watch(self) -> GpuWatch | None:
        """Begun before the first measurement."""
        return gpu_watch.begin(self.machine)

    @cached_property
    def identity(self) -> fingerprint.Fingerprint:
        """Taken once, when it is first needed."""
        return fingerprint.take(self.machine.id, self.machine.device, peak.measure(self.machine))

    def measure(self, key: Key) -> Measurement:
        """Measure and write the record."""
        command = run_command(self.machine.id, self.backend, quick=self.quick, seed=self.seed)
        watch = self.watch  # begun before `identity` measures what the GPU reaches
        if self.path is None:
            self.path = run_file.create(self._results, self.identity, command)
        plan = runner.QUICK if self.quick else runner.FULL
        case_command = partial(run_file.case_command, command)

        def run(keys: Sequence[Key]) -> Iterator[Measurement]:
            return runner.run(keys, self.machine.device, plan, self.identity, case_command, seed=self.seed)

        (measured,) = watched.run([key], run, watch)
        measured = runner.unless_changed(measured)
        run_file.append(self.path, measured.record)
        if measured.raw:
            run_file.append_samples(self.path, measured.raw)
        return measured


SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("NSA benches")
    group.addoption("--gpu", type=arguments.machine_id, help="refuse any other machine (default: what is found)")
    group.addoption("--backend", choices=backends.NAMES, default="auto", help="NSA's backend (default: auto)")
    group.addoption("--full", action="store_true", help="the machine's whole suite (default: its quick part)")
    group.addoption("--results", type=Path, default=options.RESULTS, help="where records go (default: results)")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            "benchmarks/workloads needs pytest-benchmark: install it, and leave out -p no:benchmark"
        )
    try:
        config.stash[SESSION] = Session(config)
    except WrongMachineError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "key" in metafunc.fixturenames:
        keys = metafunc.config.stash[SESSION].keys()
        metafunc.parametrize("key", keys, ids=[key.name for key in keys])


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """What pytest-benchmark's export does not know: the GPU, its driver, the commit."""
    machine_info["nsa"] = dataclasses.asdict(config.stash[SESSION].identity)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if path := config.stash[SESSION].path:
        terminalreporter.write_line(f"records: {path}")


@pytest.fixture(scope="session")
def measure(request: pytest.FixtureRequest) -> Measure:
    """Measures a key and writes its record."""
    return request.config.stash[SESSION].measure

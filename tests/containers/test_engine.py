"""Which engine is taken, and that an absent one is said and not guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from containers import engine
from containers.__main__ import parser
from containers.engine import Engine, EngineError
from tests.containers import fake_host


@pytest.mark.parametrize(
    ("there", "asked", "wanted"),
    [
        ({"docker", "podman"}, None, "docker"),
        ({"podman"}, None, "podman"),
        ({"docker", "podman"}, "podman", "podman"),
        (set(), None, None),
        ({"docker"}, "none", None),
    ],
)
def test_docker_then_podman_then_none(there: set[str], asked: str | None, wanted: str | None) -> None:
    choice = engine.choose(asked, lambda name: Engine(name, "1.2") if name in there else "not installed")
    assert (choice.engine.name if choice.engine else None) == wanted
    assert (wanted or "none") in choice.message
    assert "\n" not in choice.message


def test_without_any_the_reasons_are_said() -> None:
    message = engine.choose(None, lambda name: f"{name} is broken").message
    assert "docker: docker is broken; podman: podman is broken" in message


def test_an_engine_that_was_asked_for_is_not_replaced() -> None:
    with pytest.raises(EngineError, match="docker: not installed"):
        engine.choose("docker", lambda name: Engine(name, "1") if name == "podman" else "not installed")
    with pytest.raises(ValueError, match="docker, podman, none; got 'lxc'"):
        engine.choose("lxc")


def test_a_client_without_its_daemon_is_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_host.program(monkeypatch, tmp_path, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    assert engine.ask("docker") == "does not answer (Cannot connect to the Docker daemon)"


def test_engine_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_ENGINE", "podman")
    assert parser().parse_args(["preflight"]).engine == "podman"
    assert parser().parse_args(["preflight", "--engine", "none"]).engine == "none"

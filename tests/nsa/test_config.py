"""NSAConfig: the paper's defaults, and an error that names the field for everything that cannot work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nsa import NSAConfig


def test_defaults_are_the_papers() -> None:
    config = NSAConfig()
    assert (config.l, config.d, config.l_sel, config.n_sel, config.w) == (32, 16, 64, 16, 512)
    assert (config.init_blocks, config.local_blocks) == (1, 2)


def test_config_is_frozen_and_hashable() -> None:
    config = NSAConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.w = 3  # type: ignore[misc]
    assert hash(config) == hash(NSAConfig())
    assert config == NSAConfig()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d": 5}, "d must divide l; got d=5, l=32"),
        ({"l": 48, "d": 48}, "d must divide l_sel; got d=48, l_sel=64"),
        ({"l": 96}, "l must be at most l_sel; got l=96, l_sel=64"),
        ({"n_sel": 2}, "n_sel must hold the forced blocks: init_blocks + local_blocks = 3, but n_sel=2"),
        ({"w": 0}, "w must be at least 1; got 0"),
        ({"l": 0}, "l must be at least 1; got 0"),
        ({"d": -16}, "d must be at least 1; got -16"),
        ({"n_sel": 0}, "n_sel must be at least 1; got 0"),
        ({"init_blocks": -1}, "init_blocks must be at least 0; got -1"),
        ({"local_blocks": -1}, "local_blocks must be at least 0; got -1"),
        ({"phi": "max"}, "phi must be one of avg, linear, mlp; got 'max'"),
    ],
)
def test_impossible_value_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is compared)
        NSAConfig(**wrong)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [512.0, "512", None, True])
@pytest.mark.parametrize("field", ["l", "d", "l_sel", "n_sel", "w", "init_blocks", "local_blocks"])
def test_wrong_type_is_named(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"^{field} must be an int; got "):
        NSAConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("phi", ["avg", "linear", "mlp"])
def test_each_phi_is_allowed(phi: str) -> None:
    assert NSAConfig(phi=phi).phi == phi


def test_from_mapping_takes_the_papers_letters() -> None:
    read = NSAConfig.from_mapping({"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 32, "phi": "mlp"})
    assert read == NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=32, phi="mlp")
    assert NSAConfig.from_mapping({}) == NSAConfig()


@pytest.mark.parametrize(
    ("key", "hint"), [("l_sell", r"did you mean 'l_sel'\?"), ("window", "known keys: l, d, l_sel, n_sel, w, phi")]
)
def test_unknown_key_gets_a_hint(key: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown NSA setting '{key}'; {hint}"):
        NSAConfig.from_mapping({key: 1})


def test_from_mapping_checks_values_too() -> None:
    with pytest.raises(ValueError, match="d must divide l"):
        NSAConfig.from_mapping({"d": 7})

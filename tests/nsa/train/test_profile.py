"""Profiles: the field's file loads as it is, every value has an origin, and a typo names the nearest key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsa.model import BASE_125M, SHOWCASE, DecoderLM
from nsa.train import memory_estimate, profile
from nsa.train.profile import ProfileError

FIELD = """
model:
  dim: 768
  n_layers: 12
  n_heads: 12
  n_kv_groups: 2
  d_k: 64
  d_v: 64

nsa:
  l: 32         # Compression block size
  d: 16         # Compression stride
  l_sel: 64     # Selection block size
  n_sel: 16     # Number of selected blocks
  w: 512        # Sliding window size
  phi: "avg"    # Compression operator

runtime:
  device: "cuda"
  precision: "bf16"
  gradient_checkpointing: true
  use_flash: true      # Gated by NSA_SDPA_NO_FLASH env var
  use_triton_sel: false
  sel_triton_min_L: 4096

train:
  steps: 50000
  seq_len: 2048
  batch_size: 2
  accumulate_grad_batches: 2
  lr: 2.0e-4
  lr_schedule: "cosine"
  warmup_steps: 2000
  weight_decay: 0.01
  grad_clip: 1.0
  save_every: 5000
"""
"""As the field's report of its run on one A100 prints it."""


@pytest.fixture
def field(tmp_path: Path) -> str:
    path = tmp_path / "m7c_125m_1xa100_prod_v1.yaml"
    path.write_text(FIELD)
    return str(path)


def test_the_fields_file_loads_as_it_is(field: str) -> None:
    found = profile.load(field)
    assert found.model == BASE_125M
    assert (found.train.steps, found.train.lr, found.train.save_every) == (50_000, 2e-4, 5000)
    assert found.runtime.gradient_checkpointing is True
    assert [note.split()[0] for note in found.notes] == ["runtime.use_triton_sel", "runtime.sel_triton_min_L"]
    assert found.origins["model.num_kv_heads"] == field  # which calls it n_kv_groups
    own = {dotted: value for dotted, value, _ in profile.flat(profile.load("m7c_125m_1xa100_prod_v1"))}
    assert all(own[dotted] == value for dotted, value, origin in profile.flat(found) if origin == field)


def test_every_profile_loads() -> None:
    assert profile.names() == [
        "h200_125m", "m7c_125m_1xa100_prod_v1", "m7c_125m_2xa100_production", "m7c_125m_fast_log", "m7c_3090_smoke",
        "train_50k", "train_showcase",
    ]  # fmt: skip
    for name in profile.names():
        assert profile.load(name).model in (BASE_125M, SHOWCASE)


def test_each_value_has_its_origin(field: str) -> None:
    read = profile.read_environment({"NSA_TB_DISABLE": "1", "NSA_SDPA_NO_FLASH": "1", "HOME": "/"})
    found = profile.load(field, environment=read.values, overrides={"train.steps": 7, "runtime.use_flash": True})
    origins = {dotted: (value, origin) for dotted, value, origin in profile.flat(found)}
    assert origins["train.steps"] == (7, "command line")
    assert origins["train.lr"] == (2e-4, field)
    assert origins["telemetry.tensorboard"] == (False, "environment, NSA_TB_DISABLE=1")
    assert origins["runtime.use_flash"] == (True, "command line")
    assert origins["train.seed"] == (1337, "default")
    assert "train.steps" in profile.table(found)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train: {save_evry: 5}", "did you mean 'train.save_every'"),
        ("trian: {steps: 5}", "did you mean 'train'"),
        ("train: {steps: 5, steps: 6}", "given twice"),
        ("train: {steps: 5.5}", "train.steps must be int; got 5.5"),
        ("train: {steps: true}", "train.steps must be int; got True"),
        ("train: {lr: fast}", "train.lr must be float; got 'fast'"),
        ("train: {lr: .nan}", "train.lr must be finite"),
        ("train: {steps: 0}", "train.steps must be at least 1; got 0"),
        ("train: 5", "train in .* must hold keys; got int"),
        ("train: [", "is no YAML"),
        ("- 5", "must hold sections"),
        ("nsa: {l: 32, d: 5}", "d must divide l"),
        ("runtime: {precision: int8}", "runtime.precision must be one of"),
        ("runtime: {gradient_checkpointing: some}", "runtime.gradient_checkpointing must be one of"),
        ("data: {dataset: files}", "data.path must be given"),
        ("train: {seq_len: 2048, batch_size: 8}", "data.packing must be false with dense attention over 16,384 tokens"),
        ("data: {dataset: python, path: x}", "data.path must be null"),
        ("model: {dim: 8}", "must give model.n_layers"),
        ("model: {num_kv_heads: 1, n_kv_groups: 1}", "gives model.num_kv_heads twice, once as model.n_kv_groups"),
    ],
)
def test_names_what_is_wrong(line: str, says: str, tmp_path: Path) -> None:
    model = (
        ""
        if line.startswith(("model", "-"))
        else "model: {dim: 8, n_layers: 1, n_heads: 2, num_kv_heads: 1, d_k: 4, d_v: 4}\n"
    )
    path = tmp_path / "wrong.yaml"
    path.write_text((model.replace("d_v: 4", "d_v: 4, attention: dense") if "seq_len" in line else model) + line)
    with pytest.raises(ProfileError, match=says):
        profile.load(str(path))


@pytest.mark.parametrize(
    ("name", "says"), [("train_showcas", "did you mean 'train_showcase'"), ("x.yaml", "cannot be read")]
)
def test_names_a_profile_that_is_not_there(name: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        profile.load(name)


def test_an_override_may_have_the_fields_name(field: str) -> None:
    assert profile.load(field, overrides={"model.n_kv_groups": 3}).model.num_kv_heads == 3


@pytest.mark.parametrize("overrides", [{"train.sav_every": 1}, {"modle.dim": 1}, {"steps": 1}])
def test_an_override_may_not_be_misspelt(overrides: dict[str, Any]) -> None:
    with pytest.raises(ProfileError, match=r"unknown key .* \(command line\)"):
        profile.load("train_50k", overrides=overrides)


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 reads 2e-4 as text."""
    path = tmp_path / "p.yaml"
    path.write_text(FIELD.replace("2.0e-4", "2e-4"))
    assert profile.load(str(path)).train.lr == 2e-4


def test_environment_suggests_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean NSA_TB_DISABLE"):
        profile.read_environment({"NSA_TB_DISABLED": "1"})
    with pytest.raises(ValueError, match="NSA_TB_DISABLE must be 0 or 1; got 'yes'"):
        profile.read_environment({"NSA_TB_DISABLE": "yes"})


def test_environment_says_what_replaced_a_flag() -> None:
    read = profile.read_environment({"NSA_PREFILL_BATCHED": "1", "CONFIG": "a.yaml", "NSA_DISABLE_AUX_STATS": "0"})
    assert len(read.notes) == 2
    assert read.values == {"telemetry.statistics": (True, "NSA_DISABLE_AUX_STATS=0")}


@pytest.mark.parametrize("name", ["train_showcase", "m7c_3090_smoke"])
def test_parameters_are_counted_on_the_model(name: str) -> None:
    chosen = profile.load(name)
    assert memory_estimate.num_parameters(chosen) == sum(p.numel() for p in DecoderLM(chosen.model).parameters())

"""NSAConfig of transformers, what is saved and loaded, and the extra that it needs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from nsa.integrations.transformers import NSAConfig, NSAForCausalLM, NSAModel
from nsa.integrations.transformers.configuration import ATTENTION_FIELDS, MODEL_FIELDS
from nsa.model import BASE_125M, SHOWCASE, ModelConfig
from tests.nsa.integrations.models import decoder, make, text, tiny_config


@pytest.mark.parametrize("config", [SHOWCASE, BASE_125M, decoder().config])
def test_every_size_goes_there_and_back(config: ModelConfig) -> None:
    assert NSAConfig.from_model_config(config).model_config() == config


def test_every_field_of_nsa_has_a_name_here() -> None:
    assert {*MODEL_FIELDS, "nsa", "attention"} == set(ModelConfig.__dataclass_fields__)
    assert set(ATTENTION_FIELDS) == set(type(SHOWCASE.nsa).__dataclass_fields__)
    config = NSAConfig()
    for name in (*MODEL_FIELDS.values(), *ATTENTION_FIELDS.values()):
        assert hasattr(config, name)


def test_defaults_are_the_papers() -> None:
    config = NSAConfig(hidden_size=512, num_attention_heads=8)
    assert config.model_config().nsa == type(SHOWCASE.nsa)()
    assert (config.num_key_value_heads, config.head_dim, config.v_head_dim) == (8, 64, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_stride": 3}, "compress_stride must divide compress_block_size; got compress_stride=3"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must divide num_attention_heads; got 5 and 12"),
        ({"num_selected_blocks": 2}, "num_selected_blocks must hold the forced blocks: num_init_blocks"),
        ({"compression": "max"}, "compression must be one of avg, linear, mlp; got 'max'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be positive or None"),
        ({"window_sizes": 64}, "unknown field 'window_sizes' of NSAConfig; did you mean 'window_size'?"),
        ({"n_sel": 8}, "unknown field 'n_sel' of NSAConfig; did you mean 'num_selected_blocks'?"),
        ({"num_layers": 8}, "unknown field 'num_layers' of NSAConfig; did you mean 'num_hidden_layers'?"),
        ({"d_model": 8}, "unknown field 'd_model' of NSAConfig; did you mean 'hidden_size'?"),
        ({"window": 8}, "unknown field 'window' of NSAConfig; did you mean 'window_size'?"),
        ({"block_size": 8}, "unknown field 'block_size' of NSAConfig; did you mean 'selected_block_size'?"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0, NSA has nothing else; got 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', NSA has nothing else; got 'gelu'"),
        ({"sliding_window": 512}, "sliding_window must be None, NSA has nothing else; got 512"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .* must be none"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling .* must be none"),
        ({"rope_theta": 0}, "rope_theta must be positive; got 0"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta must be positive; got -1.0"),
        ({"nsa_backend": "cuda"}, "nsa_backend must be one of .*; got 'cuda'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1; got 0"),
        ({"initializer_range": -0.1}, "initializer_range must be at least 0; got -0.1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1; got 0"),
    ],
)
def test_a_wrong_field_is_named_as_it_is_called_here(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        NSAConfig(**changes)


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", "768"), ("window_size", 64.0), ("use_cache", "no"), ("rope_theta", "1e4")]
)
def test_a_wrong_type_is_named(field: str, value: object) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{field}'"):
        NSAConfig(**{field: value})


def test_the_base_of_rope_is_taken_over_in_the_spelling_of_transformers_5(tmp_path: Path) -> None:
    config = NSAConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, hidden_act="swish")
    assert config.model_config().rope_base == 5e5
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).rope_theta == 5e5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("phi", ["linear", "mlp"])
def test_saved_and_loaded_it_is_the_same_model(tmp_path: Path, dtype: torch.dtype, tied_head: bool, phi: str) -> None:
    model = make(dtype, phi=phi, tied_head=tied_head)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied_head  # noqa: SIM118 (a file, not a mapping)
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is NSAForCausalLM
    assert not any(info.values()), info
    assert loaded.dtype == dtype
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied_head
    assert AutoConfig.from_pretrained(tmp_path).model_config() == model.config.model_config()
    tokens = text(2, 30)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    with torch.no_grad():
        base = AutoModel.from_pretrained(tmp_path)
        assert type(base) is NSAModel
        assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)


def test_what_a_checkpoint_lacks_starts_as_in_nsa_model(tmp_path: Path) -> None:
    """Gates and φ are parameters of their own; what the checkpoint has stays."""
    model = make(torch.float32, phi="linear")
    lacking = {name: x for name, x in model.state_dict().items() if ".compress_" not in name and ".gates." not in name}
    model.save_pretrained(tmp_path, state_dict=dict(lacking))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == set(model.state_dict()) - set(lacking)
    for name, x in loaded.state_dict().items():
        if name in lacking:
            assert torch.equal(x, lacking[name]), name
    for attention in loaded.model.attentions():
        mean = torch.eye(6).repeat(1, 4) / 4
        assert torch.equal(attention.compress_k.linear.weight, mean)
        assert attention.gates.linear.weight.abs().max() <= 12**-0.5
        assert attention.gates.linear.weight.std() > 0.1


def test_a_new_model_starts_as_nsa_model_starts() -> None:
    torch.manual_seed(0)
    ours, theirs = NSAForCausalLM(tiny_config()), decoder(torch.float32)
    renamed = NSAForCausalLM.from_decoder(theirs).state_dict()
    for name, x in ours.state_dict().items():
        if "norm" in name or "compress" in name:
            assert torch.equal(x, renamed[name]), name
        else:
            assert x.std() == pytest.approx(renamed[name].std(), rel=0.5), name
            assert x.dim() == 1 or "embed" in name or x.abs().max() <= x.shape[1] ** -0.5, name


def test_resized_embeddings_stay_tied() -> None:
    model = make(torch.float32, tied_head=True)
    before = model(text(1, 9)).logits
    model.resize_token_embeddings(23)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    torch.testing.assert_close(model(text(1, 9)).logits[..., :19], before)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("nsa.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[transformers\]'"):
        importlib.import_module("nsa.integrations.transformers")


def test_nsa_itself_does_not_import_transformers() -> None:
    code = "import sys, nsa, nsa.model, nsa.generate; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

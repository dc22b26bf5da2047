"""A dense Llama becomes NSA: its weights are kept, and while a text is short it is nearly what it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nsa import NSAConfig
from nsa.integrations.transformers import NSAForCausalLM, convert
from nsa.integrations.transformers.__main__ import main
from tests.nsa.integrations.models import VOCAB, text

SMALL = NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=32, phi="mlp")


def llama(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """A random one, saved."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tied", "shared_kv"), [(False, False), (True, True)])
def test_weights_are_kept_and_what_is_new_is_told(
    tmp_path: Path, dtype: torch.dtype, tied: bool, shared_kv: bool
) -> None:
    dense = llama(tmp_path / "dense", dtype, tie_word_embeddings=tied)
    told = convert(tmp_path / "dense", tmp_path / "nsa", SMALL, shared_kv=shared_kv)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa")
    assert type(model) is NSAForCausalLM
    assert model.dtype == dtype
    assert model.config.model_config().nsa == SMALL
    assert (model.config.rope_theta, model.config.rms_norm_eps) == (5000.0, 1e-5)
    assert sorted((*told.kept, *told.tripled)) == sorted(dense.state_dict())
    assert len(told.tripled) == (0 if shared_kv else 4)
    assert {name.split(".", 4)[4].split(".")[0] for name in told.new} == {"gates", "compress_k", "compress_v"}
    assert told.dropped == ()
    for attention, layer in zip(model.model.attentions(), dense.model.layers, strict=True):
        sets = 1 if shared_kv else 3
        assert torch.equal(attention.k.weight, layer.self_attn.k_proj.weight.repeat(sets, 1))
        assert torch.equal(attention.v.weight, layer.self_attn.v_proj.weight.repeat(sets, 1))
        assert torch.equal(attention.q.weight, layer.self_attn.q_proj.weight)
        gates = attention.gates(torch.randn(1, 3, 32, dtype=dtype)).float()
        torch.testing.assert_close(gates, torch.tensor([0.1, 0.45, 0.45]).expand_as(gates), atol=2e-3, rtol=0)
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)


def test_with_window_and_selection_alone_a_short_text_is_what_it_was(tmp_path: Path) -> None:
    """Every weight is in its place, also positions, norms and head: without the compressed branch nothing differs."""
    dense = llama(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "nsa", SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa")
    tokens = text(2, SMALL.w)
    with torch.no_grad():
        truth = dense.double()(tokens).logits
        for attention in model.model.attentions():
            attention.gates.linear.bias.copy_(torch.tensor([-100.0, 0.0, 0.0]).repeat(4))
        torch.testing.assert_close(model.double()(tokens).logits, truth, atol=1e-5, rtol=0)  # RoPE: float32 in Llama
        beyond = text(2, 4 * SMALL.w)
        assert (model(beyond).logits - dense(beyond).logits).abs().max() > 1e-2


def test_files_of_the_tokenizer_come_along(tmp_path: Path) -> None:
    llama(tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    (tmp_path / "dense" / "tokenizer_code.py").write_text("raise SystemExit")
    told = convert(tmp_path / "dense", tmp_path / "nsa", SMALL)
    assert told.copied == ("generation_config.json", "tokenizer.json")
    assert (tmp_path / "nsa" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "nsa" / "tokenizer_code.py").exists()
    assert "2 files copied:\n  generation_config.json\n  tokenizer.json" in str(told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type must be 'llama'; got 'qwen2'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"mlp_bias": True}, "mlp_bias must be False"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0"),
        ({"pretraining_tp": 2}, "pretraining_tp must be 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised weights"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            r"rope_scaling .* must be none",
        ),
        ({"num_hidden_layers": 3}, "source lacks tensors .*model.layers.2.mlp"),
        ({"num_hidden_layers": 1}, "source has tensors that NSA has no place for: .*model.layers.1.mlp"),
        ({"num_key_value_heads": 4}, "source lacks tensors .*another shape.*k_proj"),
    ],
)
def test_what_cannot_be_carried_over_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    llama(tmp_path / "dense")
    rewrite(tmp_path / "dense" / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "dense", tmp_path / "nsa", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_the_target_appears_with_all_of_it_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama(tmp_path / "dense")

    (tmp_path / "dense" / "tokenizer.json").write_text("{}")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "nsa"))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy", full)  # the last step
        with pytest.raises(OSError, match="No space left"):
            convert(tmp_path / "dense", tmp_path / "nsa", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    (tmp_path / "nsa").mkdir()
    with pytest.raises(ValueError, match="target must not be there yet"):
        convert(tmp_path / "dense", tmp_path / "nsa", SMALL)


def test_what_the_source_was_run_with_does_not_matter(tmp_path: Path) -> None:
    """Another attention, another name of silu, and a cache that NSA does not serve, which is told."""
    llama(tmp_path / "dense")
    rewrite(tmp_path / "dense" / "config.json", attn_implementation="flash_attention_2", hidden_act="swish")
    rewrite(tmp_path / "dense" / "generation_config.json", cache_implementation="static", temperature=0.5)
    told = convert(tmp_path / "dense", tmp_path / "nsa", SMALL)
    assert told.dropped_settings == ("cache_implementation",)
    assert "1 settings of generation_config.json dropped:\n  cache_implementation" in str(told)
    settings = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa").generation_config
    assert (settings.cache_implementation, settings.temperature) == (None, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10**12}, "asks for .* weights, but the safetensors files hold"),
        ({"num_hidden_layers": 10**12}, "asks for .* weights, but the safetensors files hold"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1; got 0"),
        ({"hidden_size": "32"}, "hidden_size must be an int"),
        ({"dtype": "nonsense"}, "dtype must be the name of a floating-point dtype"),
        ({"pad_token_id": 10**6}, "pad_token_id must be below vocab_size=19"),
        ({"rope_parameters": [1]}, "must be a dict or None; got list"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": "a"}}, "rope_theta"),
    ],
)
def test_a_hostile_configuration_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    llama(tmp_path / "dense")
    rewrite(tmp_path / "dense" / "config.json", **changes)
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "dense"), str(tmp_path / "nsa")]) == 2
    told = capsys.readouterr().err
    assert re.search(rf"dense/config\.json: .*{message}", told), told
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("config.json", "[1, 2]", 2),
        ("config.json", "{", 2),
        ("config.json", "[" * 100000, 2),
        ("model.safetensors.index.json", "[]", 2),
        ("generation_config.json", "{", 2),
        ("model.safetensors", None, 1),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, code: int
) -> None:
    llama(tmp_path / "dense")
    path = tmp_path / "dense" / name
    if content is None:
        path.write_bytes(path.read_bytes()[:-9])
    else:
        path.write_text(content)
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "dense"), str(tmp_path / "nsa")]) == code
    told = capsys.readouterr().err
    assert str(path) in told
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_full_disk_is_told_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(tmp_path / "dense")

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(NSAForCausalLM, "save_pretrained", full)
    assert main(["convert", str(tmp_path / "dense"), str(tmp_path / "nsa")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("no room for ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--w", "9" * 20], "argument --w: must be at most 2147483647; got 9999"),
        (["--w", "many"], "argument --w: invalid"),
        (["--phi", "max"], "argument --phi: invalid choice: 'max'"),
    ],
)
def test_a_wrong_option_is_named(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "SOURCE", "TARGET", *words])
    assert message in capsys.readouterr().err


def test_no_pickle_is_read(tmp_path: Path) -> None:
    dense = llama(tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").unlink()
    torch.save(dense.state_dict(), tmp_path / "dense" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        convert(tmp_path / "dense", tmp_path / "nsa", SMALL)


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(tmp_path / "dense")
    words = ["convert", str(tmp_path / "dense"), str(tmp_path / "nsa"), "--l", "4", "--d", "2", "--l-sel", "8"]
    assert main([*words, "--n-sel", "4", "--w", "16", "--phi", "linear"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("17 tensors kept, 4 kept once for each branch\n8 new:\n")
    assert "  model.layers.1.attention.gates.linear.bias\n" in told
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "nsa").config.window_size == 16
    assert main(words) == 2
    assert "target must not be there yet" in capsys.readouterr().err
    assert main([*words[:2], str(tmp_path / "other"), "--d", "5"]) == 2
    assert "d must divide l; got d=5, l=32" in capsys.readouterr().err

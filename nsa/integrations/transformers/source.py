"""What a dense Llama checkpoint says of itself, read before anything of its size is made.

Its files are not trusted: sizes are compared with what the safetensors files hold, so that no config.json can ask for
more memory than its weights explain.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import LlamaConfig

from nsa.integrations.transformers.configuration import check_fixed, unscaled_rope_theta
from nsa.layer import a_size

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Fields of a Llama's config.json that are sizes; all of them are kept."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError naming the file for anything else, OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold a JSON object; got {type(found).__name__}")
    return found


def read_config(source: Path) -> LlamaConfig:
    """The checked config.json of a Llama checkpoint. ValueError naming what NSA has no place for or cannot be."""
    path = source / "config.json"
    found = read_object(path)
    if found.get("model_type") != "llama":
        raise ValueError(f"model_type must be 'llama'; got {found.get('model_type')!r}")
    if found.get("quantization_config") is not None:
        raise ValueError("quantization_config: quantised weights cannot be carried over; convert the original ones")
    check_fixed(found)
    try:
        for name in SIZES:
            if found.get(name) is not None:
                a_size(name, found[name])
        for name in ("rope_parameters", "rope_scaling"):
            if found.get(name) is not None:
                unscaled_rope_theta(found[name])
        for name in ("dtype", "torch_dtype"):
            _check_dtype(name, found.get(name))
        llama = LlamaConfig(**found)
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    pad = llama.pad_token_id
    if pad is not None and not -llama.vocab_size <= pad < llama.vocab_size:
        raise ValueError(f"{path}: pad_token_id must be below vocab_size={llama.vocab_size}; got {pad}")
    return llama


def check_weights(source: Path, llama: LlamaConfig) -> None:
    """Read the headers of the safetensors files.

    ValueError where the configuration asks for more than twice the numbers that they hold (tensors that are wanting are
    named when they are loaded), and OSError naming a file that is damaged.
    """
    if (index := source / "model.safetensors.index.json").is_file() and not isinstance(
        read_object(index).get("weight_map"), dict
    ):
        raise ValueError(f"{index}: must hold weight_map, the file of each tensor")
    files = sorted(source.glob("*.safetensors"))
    held = sum(_numel(path) for path in files)
    asked = _num_parameters(llama)
    if files and asked > 2 * held:
        raise ValueError(
            f"{source / 'config.json'}: asks for {asked} weights, but the safetensors files hold {held}; its sizes are "
            "not those of this checkpoint"
        )


def _check_dtype(name: str, value: object) -> None:
    if value is None:
        return
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name} must be the name of a floating-point dtype of torch; got {value!r}")


def _numel(path: Path) -> int:
    """Numbers in a safetensors file, by its header."""
    try:
        with safe_open(path, "pt") as file:
            return sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{path}: not a whole safetensors file: {error}") from None


def _num_parameters(llama: LlamaConfig) -> int:
    """Weights of a LlamaForCausalLM without biases."""
    hidden, heads, groups = llama.hidden_size, llama.num_attention_heads, llama.num_key_value_heads
    attention = 2 * hidden * llama.head_dim * (heads + groups)
    per_layer = attention + 3 * hidden * llama.intermediate_size + 2 * hidden
    embeddings = (1 if llama.tie_word_embeddings else 2) * llama.vocab_size * hidden
    return int(llama.num_hidden_layers * per_layer + embeddings + hidden)

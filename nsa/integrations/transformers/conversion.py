"""A dense Llama checkpoint as NSA: every weight is kept, gates and φ are new.

NSA's three branches have keys and values of their own, so the dense ones are kept three times (once with `shared_kv`).
Gates start as constants: their weights are 0, their biases such that the compressed branch gives 0.1 of its output and
the other two 0.45 each. While a text is not longer than the window, and has no more blocks than are selected, both of
these are dense attention, so the model starts close to what it was, and every gate is far enough from 0 and 1 to be
trained. φ starts as the mean of a block ("avg", "linear"), or untrained ("mlp").
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nsa.config import NSAConfig as AttentionConfig
from nsa.integrations.transformers.configuration import NSAConfig, attention_fields, unscaled_rope_theta
from nsa.integrations.transformers.modeling import NSAForCausalLM
from nsa.integrations.transformers.source import SIZES, check_weights, read_config, read_object
from nsa.io import atomic_write

GATES = (0.1, 0.45, 0.45)
"""What the gates are before any training: compressed, selected, window.

From a Llama of two layers, trained on bytes of source code to 1.766 nats at four times the window, a model begins at
1.765 so, and at 1.853 with a third for each branch.
"""
_LAYER_NAMES = {
    "self_attn.q_proj.weight": "attention.q.weight",
    "self_attn.k_proj.weight": "attention.k.weight",
    "self_attn.v_proj.weight": "attention.v.weight",
    "self_attn.o_proj.weight": "attention.o.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
}
_PER_BRANCH = ("attention.k.weight", "attention.v.weight")
_KEPT_FIELDS = (
    *SIZES,
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*")
_GENERATION = "generation_config.json"
_NOT_SERVED = ("cache_implementation",)


@dataclass(frozen=True)
class Conversion:
    """What became of the tensors. Names are those of the file that holds them."""

    kept: tuple[str, ...]
    """As they were."""
    tripled: tuple[str, ...]
    """Keys' and values' projections, once for each branch; empty with shared_kv."""
    new: tuple[str, ...]
    """Gates and φ."""
    dropped: tuple[str, ...]
    """In the checkpoint, and without a place here: rotary tables, which are computed."""
    copied: tuple[str, ...]
    """Files of the tokenizer, and settings of `generate`."""
    dropped_settings: tuple[str, ...] = ()
    """Settings of generation_config.json that NSA does not serve."""

    def __str__(self) -> str:
        lines = [f"{len(self.kept)} tensors kept, {len(self.tripled)} kept once for each branch"]
        titled = {
            "new": self.new,
            "dropped": self.dropped,
            "files copied": self.copied,
            "settings of generation_config.json dropped": self.dropped_settings,
        }
        for title, names in titled.items():
            lines += [f"{len(names)} {title}" + (":" if names else ""), *(f"  {name}" for name in names)]
        return "\n".join(lines)


def convert(
    source: Path | str, target: Path | str, attention: AttentionConfig | None = None, *, shared_kv: bool = False
) -> Conversion:
    """Write the Llama checkpoint in `source` as an NSAForCausalLM to `target`, a folder that is not there yet.

    Args:
        source: a folder with config.json and safetensors files. Nothing is downloaded, and no pickle is read.
        target: appears when all of it is written, and not before.
        attention: l, d, l', n, w and φ; the paper's unless given.
        shared_kv: keep keys and values once, for all branches.

    Raises ValueError naming what cannot be carried over, and OSError.
    """
    source, target = Path(source), Path(target)
    if not (source / "config.json").is_file():
        raise ValueError(f"source must be a folder with a config.json; got {source}")
    if target.exists():
        raise ValueError(f"target must not be there yet; {target} is. Name another folder")
    llama = read_config(source)
    try:
        config = _configuration(llama, attention or AttentionConfig(), shared_kv)
    except StrictDataclassError as error:
        raise ValueError(f"{source / 'config.json'}: {error}") from None
    check_weights(source, llama)
    settings = read_object(source / _GENERATION) if (source / _GENERATION).is_file() else {}
    left_out = tuple(name for name in _NOT_SERVED if settings.pop(name, None) is not None)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        dense, dropped = _dense(source)
        model = NSAForCausalLM(config).to(dense.dtype)
        weights = {name: _placed(name, tensor, shared_kv) for name, tensor in dense.state_dict().items()}
        report = _load(model, dict(weights.values()), {new: old for old, (new, _) in weights.items()}, shared_kv)
        copied = _write(model, source, settings, Path(scratch) / "model")
        (Path(scratch) / "model").rename(target)
    return dataclasses.replace(report, dropped=dropped, copied=copied, dropped_settings=left_out)


def _dense(source: Path) -> tuple[LlamaForCausalLM, tuple[str, ...]]:
    """The model, and the tensors without a place. ValueError for tensors that are wanting or not known."""
    dense, found = LlamaForCausalLM.from_pretrained(
        source,
        dtype="auto",
        attn_implementation="eager",  # it is not called: config.json may name one that is not installed
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused here, by name
    )
    missing = [*found["missing_keys"], *(str(key) for key in found["mismatched_keys"])]
    if missing:
        raise ValueError(f"source lacks tensors of its own configuration, or has them in another shape: {missing}")
    dropped = tuple(sorted(found["unexpected_keys"]))
    if foreign := [name for name in dropped if not name.endswith("rotary_emb.inv_freq")]:
        raise ValueError(f"source has tensors that NSA has no place for: {foreign}")
    return dense, dropped


def _configuration(llama: LlamaConfig, attention: AttentionConfig, shared_kv: bool) -> NSAConfig:
    """NSA's configuration from Llama's. ValueError naming what it has no place for."""
    kept = {name: getattr(llama, name) for name in _KEPT_FIELDS}
    theta = unscaled_rope_theta(llama.rope_parameters)
    return NSAConfig(**kept, **attention_fields(attention), shared_kv=shared_kv, rope_theta=theta)


def _placed(name: str, tensor: Tensor, shared_kv: bool) -> tuple[str, Tensor]:
    """A dense tensor's name here, and what stands there."""
    if not name.startswith("model.layers."):
        return name, tensor  # embedding, last norm and head are called alike
    *prefix, rest = name.split(".", 3)
    own = _LAYER_NAMES[rest]
    sets = 3 if own in _PER_BRANCH and not shared_kv else 1
    return ".".join([*prefix, own]), tensor.repeat(sets, 1) if sets > 1 else tensor


@torch.no_grad()
def _load(model: NSAForCausalLM, weights: dict[str, Tensor], was: dict[str, str], shared_kv: bool) -> Conversion:
    """Fill the model, and say what was filled."""
    absent = model.load_state_dict(weights, strict=False)
    assert not absent.unexpected_keys, absent.unexpected_keys
    for attention in model.model.attentions():
        attention.gates.linear.weight.zero_()
        logits = torch.tensor(GATES).logit().repeat(attention.num_heads)
        attention.gates.linear.bias.copy_(logits)
    tripled = [] if shared_kv else [was[name] for name in weights if name.endswith(_PER_BRANCH)]
    kept = [name for name in was.values() if name not in tripled]
    return Conversion(tuple(kept), tuple(tripled), tuple(absent.missing_keys), (), ())


def _write(model: NSAForCausalLM, source: Path, settings: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """The model, and the files beside it, whose names are returned."""
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # it hides the error of the file system in its text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(folder)) from None
    files = sorted(path for pattern in _TOKENIZER for path in source.glob(pattern) if path.suffix != ".py")
    files = [path for path in dict.fromkeys(files) if path.is_file()]
    for path in files:
        shutil.copy(path, folder)
    if settings:
        atomic_write(folder / _GENERATION, json.dumps(settings, indent=2) + "\n")
    return tuple(sorted([path.name for path in files] + [_GENERATION] * bool(settings)))

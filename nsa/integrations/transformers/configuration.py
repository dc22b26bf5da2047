"""NSAConfig of transformers: the sizes of `nsa.model.ModelConfig` and of `nsa.NSAConfig` in one flat file.

Annotations are not postponed here: `strict` checks the types of fields, and skips those that are strings.
"""

import dataclasses
import difflib
import math
import re
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from nsa import backends
from nsa.config import NSAConfig as AttentionConfig
from nsa.layer import a_size
from nsa.model import ModelConfig

MODEL_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "d_k": "head_dim",
    "d_v": "v_head_dim",
    "shared_kv": "shared_kv",
    "vocab_size": "vocab_size",
    "mlp_dim": "intermediate_size",
    "tied_head": "tie_word_embeddings",
    "rope_base": "rope_theta",
    "backend": "nsa_backend",
    "norm_eps": "rms_norm_eps",
}
"""Field of `nsa.model.ModelConfig` -> its name here."""
ATTENTION_FIELDS = {
    "l": "compress_block_size",
    "d": "compress_stride",
    "l_sel": "selected_block_size",
    "n_sel": "num_selected_blocks",
    "w": "window_size",
    "phi": "compression",
    "init_blocks": "num_init_blocks",
    "local_blocks": "num_local_blocks",
}
"""Field of `nsa.NSAConfig` -> its name here."""
_OWN_NAMES = {**MODEL_FIELDS, **ATTENTION_FIELDS}
_OTHER_NAMES = {
    **_OWN_NAMES,
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_positions": "max_position_embeddings",
    "window": "window_size",
    "block_size": "selected_block_size",
}
"""What other models call a field -> its name here."""
FIXED_FIELDS: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
}
"""Field of other decoders -> the one value that NSA has."""
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def attention_fields(config: AttentionConfig) -> dict[str, Any]:
    """The fields of a `nsa.NSAConfig` by their names here."""
    return {name: getattr(config, theirs) for theirs, name in ATTENTION_FIELDS.items()}


def check_fixed(fields: dict[str, Any]) -> None:
    """ValueError for a field of another decoder with a value that NSA does not have; None asks for nothing."""
    for name, wanted in FIXED_FIELDS.items():
        value = fields.get(name)
        if name == "hidden_act" and value == "swish":  # another name of silu
            continue
        if value is not None and value != wanted:
            raise ValueError(f"{name} must be {wanted!r}, NSA has nothing else; got {value!r}")


def unscaled_rope_theta(rope: object) -> float | None:
    """`rope_theta` of transformers' `rope_parameters`, None where it is not there.

    ValueError for RoPE that is scaled or partial, TypeError for what is no dict.
    """
    if not isinstance(rope, dict):
        raise TypeError(f"rope_parameters (rope_scaling) must be a dict or None; got {type(rope).__name__}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or set(rope) - _ROPE_KEYS or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rope_scaling (rope_parameters) must be none, NSA scales no positions; got {rope}")
    return rope.get("rope_theta")


@strict
class NSAConfig(PreTrainedConfig):
    """Configuration of NSAForCausalLM: transformers' names for the model, long names for the paper's letters.

    Raises ValueError or TypeError naming the field for sizes that cannot work, for a misspelt field, and for a field of
    other decoders with a value that NSA does not have (scaled RoPE, dropout, biases). A value of a wrong type is
    `huggingface_hub.errors.StrictDataclassFieldValidationError`, as in every configuration of transformers.
    """

    model_type = "native_sparse_attention"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (the Trainer adds it to a list)

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    """Hidden channels of the MLP; None for 8/3 · hidden_size, rounded up to a multiple of 64."""
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    """Query heads (Hq)."""
    num_key_value_heads: int | None = None
    """Key/value heads (Hkv), which divide Hq; None for Hq."""
    head_dim: int | None = None
    """Head size of queries and keys (Dk); None for hidden_size // num_attention_heads."""
    v_head_dim: int | None = None
    """Head size of values (Dv); None for head_dim."""
    max_position_embeddings: int = 4096
    """Tokens for which `use_cache=True` reserves a cache where none is given; positions themselves have no limit."""
    initializer_range: float | int = 0.02
    """Standard deviation of the embedding at the start; the other weights start as those of `nsa.model`."""
    rms_norm_eps: float | None = None
    """None for the machine epsilon of what is normalised, as `nsa.model`."""
    rope_theta: float | int = 10000.0
    """Base of RoPE; `rope_parameters={"rope_type": "default", "rope_theta": ...}` sets it too."""
    tie_word_embeddings: bool = True
    use_cache: bool = True
    """Whether `generate` keeps keys and values. `forward` makes a cache only where it is told `use_cache=True`."""
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    compress_block_size: int = 32
    """Tokens in a compression block (the paper's l)."""
    compress_stride: int = 16
    """Tokens between two compression blocks (d); divides the sizes of both kinds of blocks."""
    selected_block_size: int = 64
    """Tokens in a selection block (l')."""
    num_selected_blocks: int = 16
    """Blocks selected per token and group (n), the forced ones included."""
    window_size: int = 512
    """Tokens in the sliding window (w), the current one included."""
    compression: str = "avg"
    """How a block is compressed (φ): "avg", "linear" or "mlp" (the paper's)."""
    num_init_blocks: int = 1
    """First blocks that are always selected."""
    num_local_blocks: int = 2
    """Blocks always selected that end with the one holding the current token."""
    shared_kv: bool = False
    """One set of keys and values for the three branches, in place of one each."""
    nsa_backend: str = "auto"
    """"reference", "torch", "triton" or "auto"."""

    def __post_init__(self, **kwargs: Any) -> None:
        _refuse_misspelt(kwargs)
        check_fixed(kwargs)
        for name in ("rope_parameters", "rope_scaling"):
            if (rope := kwargs.pop(name, None)) is not None and (theta := unscaled_rope_theta(rope)) is not None:
                self.rope_theta = theta
        self._check_sizes()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.v_head_dim is None:
            self.v_head_dim = self.head_dim
        self.model_config()
        super().__post_init__(**kwargs)

    def _check_sizes(self) -> None:
        """ValueError or TypeError for what `nsa.model` does not check, or checks only after it was computed with."""
        for name in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
            a_size(name, getattr(self, name))
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ValueError(f"rope_theta must be positive; got {self.rope_theta}")
        if not (math.isfinite(self.initializer_range) and self.initializer_range >= 0):
            raise ValueError(f"initializer_range must be at least 0; got {self.initializer_range}")
        if self.nsa_backend not in backends.NAMES:
            raise ValueError(f"nsa_backend must be one of {', '.join(backends.NAMES)}; got {self.nsa_backend!r}")

    def model_config(self) -> ModelConfig:
        """The same sizes for `nsa.model`. Raises ValueError or TypeError with the names that the fields have here."""
        sizes = {theirs: getattr(self, name) for theirs, name in MODEL_FIELDS.items()}
        attention = {theirs: getattr(self, name) for theirs, name in ATTENTION_FIELDS.items()}
        try:
            return ModelConfig(**sizes, nsa=AttentionConfig(**attention))
        except (ValueError, TypeError) as error:
            names = "|".join(sorted(_OWN_NAMES, key=len, reverse=True))
            renamed = re.sub(rf"\b({names})\b", lambda found: _OWN_NAMES[found[0]], str(error))
            raise type(error)(renamed) from None

    @classmethod
    def from_model_config(cls, config: ModelConfig, **other: Any) -> "NSAConfig":
        """The configuration of a `nsa.model.DecoderLM`; `other` are further fields, by the names that they have here.

        ValueError for the dense twin.
        """
        if config.attention != "nsa":
            raise ValueError(f"config must have attention 'nsa'; got {config.attention!r}")
        values = {name: getattr(config, theirs) for theirs, name in MODEL_FIELDS.items()}
        return cls(**{**values, **attention_fields(config.nsa), **other})


def _refuse_misspelt(unknown: dict[str, Any]) -> None:
    """ValueError for what transformers would keep as an attribute that nothing reads."""
    known = [field.name for field in dataclasses.fields(NSAConfig)]
    for key in unknown:
        meant = _OTHER_NAMES.get(key) or next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.8)), None)
        if meant is not None:
            raise ValueError(f"unknown field {key!r} of NSAConfig; did you mean {meant!r}?")

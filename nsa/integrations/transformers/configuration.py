"""NSAConfig of transformers: the sizes of `nsa.model.ModelConfig` and of `nsa.NSAConfig` in one flat file."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from nsa.config import NSAConfig as AttentionConfig
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


@strict
class NSAConfig(PreTrainedConfig):
    """Configuration of NSAForCausalLM: transformers' names for the model, long names for the paper's letters.

    Raises ValueError or TypeError naming the field for sizes that cannot work and for a misspelt field.
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
    initializer_range: float = 0.02
    """Standard deviation of the embedding at the start; the other weights start as those of `nsa.model`."""
    rms_norm_eps: float | None = None
    """None for the machine epsilon of what is normalised, as `nsa.model`."""
    rope_theta: float = 10000.0
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
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.v_head_dim is None:
            self.v_head_dim = self.head_dim
        self.model_config()
        super().__post_init__(**kwargs)

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
    def from_model_config(cls, config: ModelConfig, **other: Any) -> NSAConfig:
        """The configuration of a `nsa.model.DecoderLM`; `other` are further fields, by the names that they have here.

        ValueError for the dense twin.
        """
        if config.attention != "nsa":
            raise ValueError(f"config must have attention 'nsa'; got {config.attention!r}")
        values = {name: getattr(config, theirs) for theirs, name in MODEL_FIELDS.items()}
        letters = {name: getattr(config.nsa, theirs) for theirs, name in ATTENTION_FIELDS.items()}
        return cls(**{**values, **letters, **other})


def _refuse_misspelt(unknown: dict[str, Any]) -> None:
    """ValueError for what transformers would keep as an attribute that nothing reads."""
    known = [field.name for field in dataclasses.fields(NSAConfig)]
    for key in unknown:
        meant = _OWN_NAMES.get(key) or next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.8)), None)
        if meant is not None:
            raise ValueError(f"unknown field {key!r} of NSAConfig; did you mean {meant!r}?")

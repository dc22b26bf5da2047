"""Tiny models, random tokens and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.integrations.transformers import NSAConfig, NSAForCausalLM
from nsa.model import DecoderLM, ModelConfig
from tests.nsa.layers import small_config

VOCAB = 19


def decoder(dtype: torch.dtype = torch.float64, phi: str = "linear", **changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 12, "n_layers": 2, "n_heads": 4, "num_kv_heads": 2, "d_k": 6, "d_v": 5}
    config = ModelConfig(**{**sizes, "nsa": small_config(phi), "vocab_size": VOCAB, "tied_head": False, **changes})
    return DecoderLM(config).to(dtype)


def make(dtype: torch.dtype = torch.float64, **changes: Any) -> NSAForCausalLM:
    """Untied, so that greedy texts are not one token over and over."""
    return NSAForCausalLM.from_decoder(decoder(dtype, **changes)).eval()


def tiny_config(**changes: Any) -> NSAConfig:
    """The same sizes under transformers' names."""
    return NSAConfig.from_model_config(decoder().config, **changes)


def text(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def mask_of(lengths: list[int], columns: int, side: str = "left") -> Tensor:
    """int64 [rows, columns]: as many ones as each row has tokens."""
    left = torch.tensor([[column >= columns - length for column in range(columns)] for length in lengths]).long()
    return left if side == "left" else left.flip(1)

"""How much memory a training run will take, estimated before it starts; what preflight compares with the device's."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from nsa.model import Block, DecoderLM
from nsa.train import distributed
from nsa.train.settings import MIB, Settings
from nsa.train.trainer import COMPUTE, model_config

_PROBED_TOKENS = 256
"""The difference between so many tokens and twice as many is what they take: casts of weights are kept once."""


def num_parameters(settings: Settings) -> int:
    """Trained numbers, counted on the model itself, without memory for it."""
    with torch.device("meta"):
        return DecoderLM(settings.model).num_parameters()


def peak_mem_mib(settings: Settings, ranks: int = 1) -> float:
    """An estimate for one device: weights, gradients and AdamW's state, and what the forward pass keeps.

    The latter is counted, on a block of the real width: the bytes that autograd saves for a token. Where a part of a
    block is computed again, it and its gradients come on top. A CUDA graph keeps the memory of its pass for itself, and
    a pass that is observed takes as much again.
    """
    runtime, model = settings.runtime, settings.model
    bytes_each = 16 if runtime.fp32_master_weights or runtime.precision == "fp32" else 8
    if runtime.fp32_master_weights and runtime.precision != "fp32":
        bytes_each += 2  # what autocast makes of the weights stands until the backward pass has used it
    weights: float = num_parameters(settings) * bytes_each
    block, mlp = _saved_bytes_per_token(settings)
    every = model.n_layers
    again = {True: block, "selective": mlp, False: 0.0}[runtime.gradient_checkpointing]
    kept = {True: 4 * model.dim, "selective": block - mlp, False: block}[runtime.gradient_checkpointing]
    tokens = settings.train.batch_size * settings.train.seq_len / ranks
    if runtime.parallel == "fsdp2" and ranks > 1:
        weights = weights / ranks + _gathered_bytes(settings)
    observed = settings.telemetry.statistics and model.attention == "nsa"
    passes = 2 if runtime.cuda_graph and observed else 1
    return (weights + passes * tokens * (every * kept + 2 * again)) / MIB


def checkpoint_mib(settings: Settings) -> float:
    """One checkpoint: weights and AdamW's two moments."""
    bytes_each = 12 if settings.runtime.fp32_master_weights or settings.runtime.precision == "fp32" else 6
    return num_parameters(settings) * bytes_each / MIB


def _gathered_bytes(settings: Settings) -> int:
    """What FSDP2 holds of whole groups: the weights of one and of the next, and gradients before and after reducing."""
    with torch.device("meta"):
        groups = distributed.group_blocks(list(DecoderLM(settings.model).blocks))
    return 4 * 4 * max(sum(x.numel() for block in group for x in block.parameters()) for group in groups)


def _saved_bytes_per_token(settings: Settings) -> tuple[float, float]:
    """(of a whole block, of its MLP): bytes that one forward pass leaves for the backward pass."""
    config = dataclasses.replace(model_config(settings), n_layers=1, backend="auto")
    block = Block(config)
    compute = COMPUTE[settings.runtime.precision]

    def saved(num_tokens: int) -> tuple[int, int]:
        x = torch.randn(1, num_tokens, config.dim, requires_grad=True)
        with torch.autocast("cpu", dtype=compute, enabled=compute != torch.float32):
            return _saved_bytes(block, lambda: block(x, None, None)), _saved_bytes(block, lambda: block.mlp(x))

    fewer, more = saved(_PROBED_TOKENS), saved(2 * _PROBED_TOKENS)
    return (more[0] - fewer[0]) / _PROBED_TOKENS, (more[1] - fewer[1]) / _PROBED_TOKENS


def _saved_bytes(module: nn.Module, call: object) -> int:
    """Of the tensors that autograd saves in a call, each storage once, without the module's own parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    held: list[Tensor] = []  # so that no storage is freed and its address taken by another

    def keep(x: Tensor) -> Tensor:
        held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = call()  # type: ignore[operator]
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    del out
    return sum(size for pointer, size in sizes.items() if pointer not in own)

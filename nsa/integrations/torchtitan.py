"""NSA as the attention of a torchtitan model, and the parallelize function that goes with it.

Written against torchtitan 0.3.0: a block calls `attention(x, attention_masks, positions)`, and a `ModelSpec` holds the
model's configuration and `parallelize_fn`. `with_nsa` alone imports torchtitan. The rest is PyTorch: `Attention` fits
any block that calls its attention so, `shard` any model whose blocks are in `model.layers`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nsa.config import NSAConfig
from nsa.layer import NativeSparseAttention

__all__ = ["Attention", "parallelize", "shard", "with_nsa"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Attention(NativeSparseAttention):
    """`nsa.NativeSparseAttention` with the call of a torchtitan attention: x [B, S, dim] -> [B, S, dim]."""

    def forward(self, x: Tensor, attention_masks: object = None, positions: Tensor | None = None) -> Tensor:
        """Causal attention in each row, or in each document of `attention_masks`.

        Args:
            x: [B, S, dim].
            attention_masks: None, or torchtitan's `VarlenMetadata`, whose `cu_seq_q` int32 [N+1] bounds the documents
                of all rows laid end to end.
            positions: int [B, S] as torchtitan's loader makes them, 0 at each document's first token. Not read: RoPE
                counts from the bounds. Without masks they are refused, because documents would see one another.

        Raises TypeError for another kind of mask, ValueError for positions without masks.
        """
        if attention_masks is None:
            if positions is not None:
                raise ValueError("attention_masks must come with positions; use attn_backend='varlen'")
            return super().forward(x)
        cu_seqlens = getattr(attention_masks, "cu_seq_q", None)
        if not isinstance(cu_seqlens, Tensor):
            came = type(attention_masks).__name__
            raise TypeError(
                f"attention_masks must be VarlenMetadata or None, NSA has masks of its own; got {came}: "
                "use attn_backend='varlen'"
            )
        packed = super().forward(x.flatten(0, 1)[None], cu_seqlens=cu_seqlens.int())
        return packed.view_as(x)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    recompute: bool = False,
    compile_backend: str | None = None,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Activation checkpointing, `torch.compile` and FSDP2 on each block of `model.layers`; returns the model.

    Gradients are summed over the ranks, not averaged, as torchtitan's trainer expects: divide the loss by the tokens
    of all ranks.

    Args:
        model: its blocks are the children of `model.layers`; it may be on the meta device.
        mesh: one dimension, over which parameters are sharded.
        recompute: whether a block's activations are computed again in the backward pass.
        compile_backend: of `torch.compile`, for each block as one graph; None compiles nothing.
        param_dtype: of parameters and activations in a pass.
        reduce_dtype: in which gradients are summed over the ranks.
        reshard_after_forward: whether a block's parameters are freed between its forward and backward pass.

    Raises AttributeError if the model has no `layers`.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    layers = model.get_submodule("layers")
    if recompute:
        for name, block in list(layers.named_children()):
            layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
    if compile_backend is not None:
        for block in layers.children():
            block.compile(backend=compile_backend, fullgraph=True)
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in layers.children():
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    return model


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str = "",
) -> nn.Module:
    """The `parallelize_fn` of a torchtitan `ModelSpec` whose attention is NSA; the arguments are torchtitan's.

    FSDP2 (`shard`) over the mesh "fsdp", with any of torchtitan's activation checkpointing and `torch.compile`.

    Raises NotImplementedError naming what is not served: context, tensor, pipeline and expert parallelism, replicas
    (HSDP), offloading to the CPU, symmetric memory, and every `parallelism.spmd_backend` but "partial_dtensor".
    """
    kinds = {"cp": "context", "tp": "tensor", "pp": "pipeline", "ep": "expert"}
    for short, kind in kinds.items():
        if getattr(parallel_dims, f"{short}_enabled"):
            raise NotImplementedError(
                f"{kind} parallelism is not served with NSA; set parallelism.{kind}_parallel_degree to 1"
            )
    if parallel_dims.dp_replicate_enabled:
        raise NotImplementedError("replicas are not served; set parallelism.data_parallel_replicate_degree to 1")
    if training.enable_cpu_offload:
        raise NotImplementedError("offloading is not served; set training.enable_cpu_offload to False")
    if parallelism.enable_fsdp_symm_mem:
        raise NotImplementedError("symmetric memory is not served; set parallelism.enable_fsdp_symm_mem to False")
    if parallelism.spmd_backend != "partial_dtensor":
        raise NotImplementedError(
            f"parallelism.spmd_backend must be 'partial_dtensor' with NSA; got {parallelism.spmd_backend!r}"
        )
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    compiled = compile_config.enable and "model" in compile_config.components
    return shard(
        model,
        parallel_dims.get_mesh("fsdp"),
        compile_backend=compile_config.backend if compiled else None,
        param_dtype=DTYPES[training.mixed_precision_param],
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
    )


def with_nsa(spec: Any, config: NSAConfig, *, shared_kv: bool = False, backend: str = "auto") -> Any:
    """A copy of a torchtitan `ModelSpec` whose blocks attend with NSA; needs torchtitan 0.3.

    The spec must be a decoder's with grouped-query attention and `attn_backend="varlen"`, such as Llama 3's. Sizes and
    the base of RoPE are taken over. RoPE itself is this project's (pairs of channels i and i + D/2, no scaling), and
    weights are those of training from scratch: checkpoints of the dense model are refused (no `state_dict_adapter`).

    Args:
        spec: a `torchtitan.protocols.model_spec.ModelSpec`; it stays as it is.
        config: NSAConfig.
        shared_kv: as for `nsa.NativeSparseAttention`.
        backend: likewise.

    Raises ImportError without torchtitan, TypeError for another kind of attention, ValueError for another mask.
    """
    attention = _module()
    layers = [
        dataclasses.replace(layer, attention=_config(attention, layer.attention, config, shared_kv, backend))
        for layer in spec.model.layers
    ]
    model = dataclasses.replace(spec.model, layers=layers)
    return dataclasses.replace(
        spec, model=model, parallelize_fn=parallelize, pipelining_fn=None, state_dict_adapter=None
    )


def _config(attention: Any, dense: Any, config: NSAConfig, shared_kv: bool, backend: str) -> Any:
    """The configuration of NSA in place of that of a dense attention."""
    from torchtitan.models.common.attention import GQAttention, VarlenAttention

    if type(dense) is not GQAttention.Config:  # what a subclass adds would be lost
        raise TypeError(f"attention must be GQAttention.Config; got {type(dense).__qualname__}")
    if not isinstance(dense.inner_attention, VarlenAttention.Config):
        raise ValueError("attn_backend must be 'varlen' for NSA, whose documents are told by their bounds")
    if dense.qk_norm is not None:
        raise ValueError("qk_norm must be None for NSA, which has no norm of queries and keys")
    taken = {field.name: getattr(dense, field.name) for field in dataclasses.fields(dense)}
    return attention.Config(**taken, nsa=config, shared_kv=shared_kv, backend=backend)


@functools.cache
def _module() -> Any:
    """`Attention` as a torchtitan `Module` with a `Config`; its submodules are `Module`s too, which initialise
    themselves when torchtitan asks for it."""
    from torchtitan.models.common.attention import GQAttention
    from torchtitan.protocols.module import Module

    class TitanAttention(Attention, Module):  # type: ignore[misc]  # Module is untyped where torchtitan is not
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(GQAttention.Config):  # type: ignore[misc]
            nsa: NSAConfig
            shared_kv: bool
            backend: str

        def __init__(self, config: Any) -> None:
            sizes = config.dim, config.n_heads, config.n_kv_heads or config.n_heads
            head_dim = config.head_dim or config.dim // config.n_heads
            super().__init__(
                *sizes,
                head_dim,
                head_dim,
                config.nsa,
                shared_kv=config.shared_kv,
                backend=config.backend,
                rope_base=config.rope.theta,
            )
            for module in list(self.modules())[1:]:
                kind = type(module)
                module.__class__ = type(kind.__name__, (kind, Module), {})

    return TitanAttention

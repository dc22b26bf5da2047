"""Attention over a sequence that several ranks share: projected queries, keys and values, or a layer, or a model."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nsa import backends, checks
from nsa.attention import Aux, Branches
from nsa.config import BRANCHES, NSAConfig
from nsa.layer import NativeSparseAttention, PerBranch
from nsa.parallel.branches import HaloRows, ParallelBranches
from nsa.parallel.context import ContextParallel, as_context
from nsa.parallel.order import TokenOrder
from nsa.parallel.plan import Plan


@overload
def context_parallel_attention(
    q: Tensor, k: Branches, v: Branches, gates: Tensor, config: NSAConfig, *, mesh: DeviceMesh | ContextParallel,
    order: TokenOrder | None = ..., cu_seqlens: Tensor | None = ..., scale: float | None = ..., backend: str = ...,
    return_aux: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Branches, v: Branches, gates: Tensor, config: NSAConfig, *, mesh: DeviceMesh | ContextParallel,
    order: TokenOrder | None = ..., cu_seqlens: Tensor | None = ..., scale: float | None = ..., backend: str = ...,
    return_aux: Literal[True],
) -> tuple[Tensor, Aux]: ...  # fmt: skip
def context_parallel_attention(
    q: Tensor,
    k: Branches,
    v: Branches,
    gates: Tensor,
    config: NSAConfig,
    *,
    mesh: DeviceMesh | ContextParallel,
    order: TokenOrder | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """`nsa.nsa_attention` over a sequence whose tokens are spread over the ranks of a mesh; phi is "avg".

    Every rank calls it with its own S of the T tokens, in the order in which it holds them, RoPE applied for where
    they stand in the sequence. The PyTorch backend on a CPU gives the output, the blocks and dq of one device bit for
    bit; dk and dv are summed over the ranks in float32, in an order that depends on the ranks alone.

    Beside its own rows a rank holds, for the time of a call, the keys and values of the selected branch of all T
    tokens, each while it arrives twice: at most 4 · T · Hkv · max(Dk, Dv) · (bytes of a number) / 1e9 GB, 4.3 GB for
    1M tokens, 4 heads of 128 and bf16. Until the backward pass it keeps the w - 1 rows before each piece that came from
    others. The backward pass gathers the selected branch's keys and values again, and adds float32 sums, with those of
    a piece and those that travel at most 3 · 4 · T · Hkv · (Dk + Dv) / 1e9 GB, 12.9 GB there.

    Args:
        q: [B, S, Hq, Dk].
        k: [B, S, Hkv, Dk], one tensor for all branches or (compressed source, selected, window).
        v: [B, S, Hkv, Dv], likewise.
        gates: [B, S, Hq, 3] in the order compressed, selected, window.
        config: NSAConfig.
        mesh: a DeviceMesh of one dimension, or the `ContextParallel` made of one, which keeps its plans.
        order: who holds which tokens; None for head-tail order, or for packed documents dealt in tiles.
        cu_seqlens: int32 [N+1], the bounds of N packed documents in the whole sequence (B = 1), on every rank.
        scale: of the scores; 1/sqrt(Dk) unless given.
        backend: "torch", "triton", or "auto".

    Returns o [B, S, Hq, Dv], and `Aux` of the own queries with return_aux=True.
    Raises ValueError or TypeError naming the rank, the argument, what came and what is wanted.
    """
    config = checks.a_config(config)
    if config.phi != "avg":
        raise ValueError(f"config.phi must be 'avg' here, whose weights the layer holds; got {config.phi!r}")
    context = as_context(mesh, order)
    sources, selected, window = zip(checks.branches("k", k), checks.branches("v", v), strict=True)
    q, k_sel = checks.queries_and_keys(q, selected[0], k_name="k[1]")
    v_sel = checks.values(selected[1], k_sel, v_name="v[1]", k_name="k[1]")
    k_src, v_src = (
        checks.tensor(f"{name}[0]", x, y.shape, like=q)
        for name, x, y in zip("kv", sources, (k_sel, v_sel), strict=True)
    )
    k_win, v_win = (
        checks.tensor(f"{name}[2]", x, y.shape, like=q) for name, x, y in zip("kv", window, (k_sel, v_sel), strict=True)
    )
    checks.same_dtype(q=q, **{"k[0]": k_src, "v[0]": v_src, "k[2]": k_win, "v[2]": v_win})
    name, run = backends.choose_parallel(backend, q, v_sel)
    plan = context.plan(q, config, cu_seqlens, name, name="q")
    context.fits("k[1]", k_sel, plan.num_tokens)
    with torch.autocast(q.device.type, enabled=False):
        k_cmp, v_cmp = (_mean(x, plan, run) for x in (k_src, v_src))
        scale = checks.a_scale(scale, q.shape[-1])
        return attend(q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win), gates, plan, (name, run), scale, return_aux)


def attend(
    q: Tensor, k: PerBranch, v: PerBranch, gates: Tensor, plan: Plan, backend: tuple[str, backends.ParallelBackend],
    scale: float, return_aux: bool,
) -> Tensor | tuple[Tensor, Aux]:  # fmt: skip
    """`context_parallel_attention` on checked arguments; k[0] and v[0] are the own compressed rows."""
    gates = checks.gates(gates, q)
    name, run = backend
    pairs = (x for pair in zip(k, v, strict=True) for x in pair)
    o, *lse_of_branches, chosen, read_cmp, read_sel, read_win = ParallelBranches.apply(
        q, *pairs, gates, plan, run, scale
    )
    if not return_aux:
        return o
    lse = dict(zip(BRANCHES, (x.float() for x in lse_of_branches), strict=True))
    total = dict(zip(BRANCHES, (x.sum(dtype=torch.int64) for x in (read_cmp, read_sel, read_win)), strict=True))
    return o, Aux(chosen, lse, total, name, plan.positions)


def context_parallel(
    module: nn.Module, mesh: DeviceMesh | ContextParallel, order: TokenOrder | None = None
) -> ContextParallel:
    """Let every `NativeSparseAttention` in a layer or model, `DecoderLM` among them, share its sequences over a mesh.

    Each rank then calls the module with its own tokens, cut by `ContextParallel.shard`; `cu_seqlens` stays that of
    the whole sequence. Everything but attention is a token's own. Gradients of the parameters are those of the own
    tokens: DDP or FSDP2 over all ranks of the mesh adds them up. Memory: `context_parallel_attention`.

    Args:
        module: is changed in place.
        mesh: a DeviceMesh of one dimension, `mesh["context"]` of one that FSDP2 shares.
        order: who holds which tokens; None for head-tail order, or for packed documents dealt in tiles.

    Returns what cuts tensors and knows the order. Raises ValueError if the module has no such layer.
    """
    context = as_context(mesh, order)
    layers = [x for x in module.modules() if isinstance(x, NativeSparseAttention)]
    if not layers:
        raise ValueError(f"module must hold a NativeSparseAttention; {type(module).__name__} has none")
    for layer in layers:
        layer.context = _LayerContext(context)
    return context


class _LayerContext:
    """What a layer asks in place of attention over its own tokens alone."""

    def __init__(self, context: ContextParallel) -> None:
        self._context = context
        self.forward = torch.compiler.disable(self._forward)  # not in the class: it imports the compiler

    def _forward(
        self, layer: NativeSparseAttention, x: Tensor, cu_seqlens: Tensor | None, return_aux: bool
    ) -> tuple[Tensor, Tensor, Aux | None]:
        """x [B, S, dim] -> (o [B, S, Hq, Dv], gates [B, S, Hq, 3], what attention did)."""
        sizes = layer.head_dim_k, layer.head_dim_v
        probes = (x.new_empty((0, size), dtype=layer.projected_dtype) for size in sizes)
        name, run = backends.choose_parallel(layer.backend, *probes)
        plan = self._context.plan(x, layer.config, cu_seqlens, name)
        q, k, v, gates = layer.project(x, plan.positions)
        k_cmp, v_cmp = _learned(layer.compress_k, k[0], plan), _learned(layer.compress_v, v[0], plan)
        with torch.autocast(x.device.type, enabled=False):
            scale = checks.a_scale(None, q.shape[-1])
            keys, vals = (k_cmp, *k[1:]), (v_cmp, *v[1:])
            out = attend(q, keys, vals, gates, plan, (name, run), scale, return_aux)
        o, aux = out if isinstance(out, tuple) else (out, None)
        return o, gates, aux


def _mean(x: Tensor, plan: Plan, run: backends.ParallelBackend) -> Tensor:
    """phi = avg: x [B, S, H, D] -> [B, own blocks, H, D]."""
    rows = HaloRows.apply(x, plan.source_halo)
    blocks = [run.compress(rows[:, own.rows], own.layout)[:, : own.count] for own in plan.blocks]
    return torch.cat(blocks, 1) if blocks else rows[:, :0]


def _learned(phi: nn.Module, x: Tensor, plan: Plan) -> Tensor:
    """The same by the layer's phi, which is called even without a block: its weights get a gradient on every rank."""
    rows = HaloRows.apply(x, plan.source_halo)
    blocks = [phi(rows[:, own.rows], own.layout.cu_seqlens)[:, : own.count] for own in plan.blocks]
    return torch.cat(blocks or [phi(rows[:, :0])], 1)

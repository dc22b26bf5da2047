"""A layer and a model over several ranks, with each phi, recomputed and compiled; and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import nsa
from nsa.model import DecoderLM, ModelConfig
from nsa.parallel import ContextParallel, TokenOrder, context_parallel, context_parallel_attention, head_tail
from nsa.train import objective
from nsa.train.objective import Objective
from tests.nsa.parallel.cases import SMALL
from tests.nsa.parallel.pool import Pool, RankError

MODEL = ModelConfig(dim=32, n_layers=2, n_heads=4, num_kv_heads=2, d_k=8, d_v=12, nsa=SMALL)
TOKENS = 320
VARIANTS: dict[str, dict[str, Any]] = {
    "avg": {},
    "mlp": {"phi": "mlp"},
    "linear, documents": {"phi": "linear", "cu_seqlens": (0, 100, 101, 320)},
    "recomputed, documents": {"recompute": True, "cu_seqlens": (0, 100, 101, 320)},
    "compiled": {"compile": True},
    "bf16 autocast": {"autocast": True},
    "shared keys, float64": {"shared_kv": True, "dtype": torch.float64},
}


def _losses(name: str, mesh: DeviceMesh | None) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss of the own tokens, the gradients of the parameters) of a small model."""
    variant = VARIANTS[name]
    config = dataclasses.replace(MODEL, shared_kv=variant.get("shared_kv", False))
    config = dataclasses.replace(config, nsa=dataclasses.replace(SMALL, phi=variant.get("phi", "avg")))
    torch.manual_seed(0)
    lm = DecoderLM(config).to(variant.get("dtype", torch.float32))
    tokens, targets = torch.randint(256, (2, 1, TOKENS), generator=torch.Generator().manual_seed(1))
    bounds = variant.get("cu_seqlens")
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    objective.recompute(lm, variant.get("recompute", False))
    if variant.get("compile") and mesh is not None:
        for block in lm.blocks:
            block.compile(backend="eager")
    if mesh is not None:
        context = context_parallel(lm, mesh)
        order = context.order(TOKENS, config.nsa, cu_seqlens)
        tokens, targets = context.shard(tokens, order), context.shard(targets, order)
    with torch.autocast("cpu", torch.bfloat16, enabled=variant.get("autocast", False)):
        loss = Objective(lm)(tokens, targets, cu_seqlens)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


def _on_rank(mesh: DeviceMesh, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    return _losses(name, mesh)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_is_one_devices(pool: Pool, name: str) -> None:
    """Loss and the sum of the ranks' gradients; a product of matrices may add in another order for fewer rows."""
    loss, gradients = _losses(name, None)
    parts = pool.run(2, _on_rank, name)
    error = 1e-10 if loss.dtype == torch.float64 else 5e-2 if "autocast" in VARIANTS[name] else 1e-4
    close = {"rtol": error, "atol": error * max(1.0, *(x.abs().max().item() for x in gradients.values()))}
    torch.testing.assert_close(sum(part[0] for part in parts), loss, **close)
    assert set(parts[0][1]) == set(gradients)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(sum(part[1][parameter] for part in parts), gradient, **close, msg=parameter)


def _without_blocks(mesh: DeviceMesh) -> list[str]:
    """Parameters without a gradient, where no rank has a whole block, or a token."""
    torch.manual_seed(0)
    layer = nsa.NativeSparseAttention(8, 2, 1, 4, 4, dataclasses.replace(SMALL, phi="mlp"))
    context = context_parallel(layer, mesh, TokenOrder(5, (((0, 5),), ())))
    layer(context.shard(torch.randn(1, 5, 8), context.order(5, SMALL))).sum().backward()
    return [name for name, parameter in layer.named_parameters() if parameter.grad is None]


def test_every_parameter_gets_a_gradient_on_every_rank(pool: Pool) -> None:
    """DDP waits for one that gets none."""
    assert pool.run(2, _without_blocks) == [[], []]


def _unsharded(mesh: DeviceMesh) -> bool:
    context = ContextParallel(mesh)
    order = context.order(48, SMALL, None)
    x = torch.arange(96 * 3, dtype=torch.float32).view(2, 48, 3)
    return torch.equal(context.unshard(context.shard(x, order), order), x)


def test_what_was_cut_is_put_together(pool: Pool) -> None:
    assert all(pool.run(4, _unsharded))


def _rewritten(mesh: DeviceMesh) -> tuple[tuple[int, ...] | None, ...]:
    context, cu_seqlens = ContextParallel(mesh), torch.tensor([0, 20, 48], dtype=torch.int32)
    first = context.documents(cu_seqlens)
    cu_seqlens[1] = 30
    return first, context.documents(cu_seqlens)


def _dealt_twice(mesh: DeviceMesh) -> bool:
    context = ContextParallel(mesh)
    return context.order(48, SMALL, (0, 20, 48)) is context.order(48, SMALL, [0, 20, 48])


def test_documents_are_dealt_once_for_all_layers(pool: Pool) -> None:
    assert pool.run(1, _dealt_twice) == [True]


def test_documents_that_were_written_over_are_read_again(pool: Pool) -> None:
    assert pool.run(1, _rewritten) == [((0, 20, 48), (0, 30, 48))]


def _refused(mesh: DeviceMesh, kind: str) -> None:
    rank, x = mesh.get_local_rank(), torch.zeros(1, 24, 2, 8)
    gates, more = torch.zeros(1, 24, 2, 3), {"mesh": mesh, "backend": "torch"}
    if kind == "another order":
        more["order"] = head_tail(48, 2) if rank == 0 else TokenOrder(48, (((0, 24),), ((24, 48),)))
    elif kind == "too many tokens":
        more["order"] = head_tail(40, 2)
    elif kind == "another config":
        context_parallel_attention(x, x, x, gates, dataclasses.replace(SMALL, w=8 + rank), **more)
    elif kind == "fewer keys":
        context_parallel_attention(x, x[:, :20], x[:, :20], gates, SMALL, **more)
    elif kind == "another dtype":
        x = x.double() if rank else x
        gates = gates.to(x.dtype)
    elif kind == "reference":
        more["backend"] = "reference"
    elif kind == "phi":
        context_parallel_attention(x, x, x, gates, dataclasses.replace(SMALL, phi="mlp"), **more)
    elif kind == "documents that descend":
        more["cu_seqlens"] = torch.tensor([0, 30, 20, 48], dtype=torch.int32)
    elif kind == "documents of another type":
        more["cu_seqlens"] = torch.tensor([0, 48])
    elif kind == "no length":
        ContextParallel(mesh).order(49, SMALL)
    elif kind == "ranks":
        ContextParallel(mesh, head_tail(48, 3))
    elif kind == "mesh":
        context_parallel(nn.Linear(2, 2), mesh)
    elif kind == "cache":
        layer = nsa.NativeSparseAttention(8, 2, 1, 4, 4, SMALL)
        context_parallel(layer, mesh)
        layer(torch.zeros(1, 4, 8), cache=nsa.KVCache(layer, batch_size=1, max_tokens=8))
    context_parallel_attention(x, x, x, gates, SMALL, **more)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("another order", "order must be the same on all ranks; rank 1 has another than rank 0"),
        ("another config", "config must be the same on all ranks; rank 1 has another than rank 0"),
        ("another dtype", "shape and dtype of q must be the same on all ranks; rank 1 has another than rank 0"),
        ("too many tokens", "q must hold the 20 tokens of rank 1 of 2; got 24"),
        ("fewer keys", r"k\[1\] must hold the 24 tokens of rank 0 of 2; got 20"),
        ("reference", "backend must be auto, torch or triton under context parallelism; got 'reference'"),
        ("phi", "config.phi must be 'avg' here"),
        ("documents that descend", "cu_seqlens must ascend from 0; got [0, 30, 20, 48]"),
        ("documents of another type", r"cu_seqlens must be int32 of shape \[N\+1\]; got torch.int64 \[2\]"),
        ("no length", r"49 tokens are no multiple of the 2 ranks.*head_tail\(49, 2\)"),
        ("ranks", "order must be of the 2 ranks of the mesh; got one of 3"),
        ("mesh", "module must hold a NativeSparseAttention; Linear has none"),
        ("cache", "cache must be None where several ranks share a sequence"),
    ],
)
def test_what_is_refused(pool: Pool, kind: str, message: str) -> None:
    with pytest.raises(RankError, match=message.replace("[0, 30", r"\[0, 30").replace("48]", r"48\]")):
        pool.run(2, _refused, kind)


def test_a_mesh_is_wanted() -> None:
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh; got str"):
        ContextParallel("context")  # type: ignore[arg-type]

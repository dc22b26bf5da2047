"""`nsa_attention` and its parts: check the call, choose the backend, record what ran.

Shapes: q [B, S, Hq, Dk], k [B, T, Hkv, Dk], v [B, T, Hkv, Dv]; the S queries are the last of the T keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from nsa import backends, checks
from nsa.config import BRANCHES, NSAConfig
from nsa.geometry import Layout
from nsa.kv import DecodeOutput, KVView

Branches = Tensor | Sequence[Tensor | None]
_TENSORS = (Tensor, torch.nn.Parameter)
"""Plain tensors: a subclass may hold other data, or none."""


@dataclass(frozen=True)
class Aux:
    """What `nsa_attention` did beside its output."""

    block_indices: Tensor
    """int32 [B, S, Hkv, n]: the selected blocks, ascending, padded with -1."""
    lse: Mapping[str, Tensor]
    """Log-sum-exp of each branch's scores, float32 [B, S, Hq], differentiable; -inf where a query saw no key."""
    keys_read: Mapping[str, Tensor]
    """Keys that each branch read, counted where they were read: int64 totals over batch, tokens and kv heads."""
    backend: str
    """The backend that ran."""
    positions: Tensor | None = None
    """int64 [S]: where the queries stand in their documents, if they are one rank's share of a sequence."""

    def bytes_read(self, k: Tensor, v: Tensor) -> Mapping[str, Tensor]:
        """Bytes of the keys and values read by each branch, int64; k and v are any with their head sizes and dtype.

        A key that several queries read counts once for each.
        """
        pair = k.shape[-1] * k.itemsize + v.shape[-1] * v.itemsize
        return {branch: read * pair for branch, read in self.keys_read.items()}

    def detached(self) -> Aux:
        """The same without the graph of the call, which would stay in memory as long as this does."""
        return replace(self, lse={branch: x.detach() for branch, x in self.lse.items()})

    @classmethod
    def of(cls, decoded: DecodeOutput, backend: str) -> Aux:
        """Of a step that was one call."""
        lse = dict(zip(BRANCHES, decoded.lse.unbind(), strict=True))
        read = {name: x.sum(dtype=torch.int64) for name, x in zip(BRANCHES, decoded.keys_read, strict=True)}
        return cls(decoded.block_indices, lse, read, backend)


def compress(x: Tensor, config: NSAConfig, *, cu_seqlens: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Compress keys or values block by block with phi = "avg" (Eq. 7): x [B, T, H, D] -> [B, blocks, H, D].

    With `cu_seqlens` the blocks of all documents stand end to end in T // d rows whose unused tail is zero.
    Raises ValueError for a learned phi, whose weights the layer holds (`nsa.compression`).
    """
    config = checks.a_config(config)
    x = checks.with_data("x", checks.tensor("x", x, ("B", "T", "H", "D")))
    if config.phi != "avg":
        raise ValueError(f"compress has no weights, so phi must be 'avg'; got {config.phi!r}: use nsa.compression")
    layout = checks.layout(x, None, config, cu_seqlens)
    _, run = backends.choose(backend, x, x)
    with torch.autocast(x.device.type, enabled=False):
        return run.compress(checks.packed(x, layout), layout)


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    config: NSAConfig,
    num_keys: int | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The compressed branch: token t sees block c iff c·d + l − 1 <= t (Eq. 7).

    k_cmp [B, blocks, Hkv, Dk], v_cmp [B, blocks, Hkv, Dv] -> (o [B, S, Hq, Dv], lse float32 [B, S, Hq]).
    `num_keys` is T where queries are fewer than keys. A query that sees no block gives 0 and lse -inf.
    """
    config = checks.a_config(config)
    q, k_cmp = checks.queries_and_keys(q, k_cmp, k_name="k_cmp")
    v_cmp = checks.values(v_cmp, k_cmp, v_name="v_cmp", k_name="k_cmp")
    layout = checks.layout(q, num_keys, config, cu_seqlens)
    checks.compressed_rows("k_cmp", k_cmp, layout)
    scale = checks.a_scale(scale, q.shape[-1])
    _, run = backends.choose(backend, q, v_cmp)
    with torch.autocast(q.device.type, enabled=False):
        o, lse, _ = run.compressed_attention(checks.packed(q, layout), k_cmp, v_cmp, layout, scale)
    return o, lse.float()


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    config: NSAConfig,
    num_keys: int | None = None,
    lse: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Choose n blocks per token and group (Eq. 8 to 12) -> int32 [B, S, Hkv, n], ascending, padded with -1.

    `lse` is the compressed branch's, where it is known already. Blocks count from 0 in each document.
    """
    config = checks.a_config(config)
    q, k_cmp = checks.queries_and_keys(q, k_cmp, k_name="k_cmp")
    layout = checks.layout(q, num_keys, config, cu_seqlens)
    checks.compressed_rows("k_cmp", k_cmp, layout)
    if lse is not None:
        lse = checks.tensor("lse", lse, q.shape[:3], like=q)
    scale = checks.a_scale(scale, q.shape[-1])
    _, run = backends.choose(backend, q, k_cmp)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return run.select_blocks(q, k_cmp, layout, scale, lse)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    config: NSAConfig,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The selected branch: attention over the tokens of the chosen blocks at positions <= t, each once.

    block_indices int32 or int64 [B, S, Hkv, n]; what is out of range is ignored wherever it stands and
    duplicates count once -> (o [B, S, Hq, Dv], lse float32 [B, S, Hq]).
    """
    config = checks.a_config(config)
    q, k = checks.queries_and_keys(q, k)
    v = checks.values(v, k)
    layout = checks.layout_of_keys(q, k, config, cu_seqlens)
    block_indices = _distinct(checks.block_indices(block_indices, q, k.shape[2]), layout)
    scale = checks.a_scale(scale, q.shape[-1])
    _, run = backends.choose(backend, q, v)
    with torch.autocast(q.device.type, enabled=False):
        o, lse, _ = run.selected_attention(checks.packed(q, layout), k, v, block_indices, layout, scale)
    return o, lse.float()


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: NSAConfig,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The window branch: attention over the w tokens t−w+1 … t -> (o [B, S, Hq, Dv], lse float32 [B, S, Hq])."""
    config = checks.a_config(config)
    q, k = checks.queries_and_keys(q, k)
    v = checks.values(v, k)
    layout = checks.layout_of_keys(q, k, config, cu_seqlens)
    scale = checks.a_scale(scale, q.shape[-1])
    _, run = backends.choose(backend, q, v)
    with torch.autocast(q.device.type, enabled=False):
        o, lse, _ = run.window_attention(checks.packed(q, layout), k, v, layout, scale)
    return o, lse.float()


def combine(outputs: Sequence[Tensor], gates: Tensor, *, backend: str = "auto") -> Tensor:
    """Eq. 5: Σ gate · branch over (compressed, selected, window); outputs [B, S, Hq, Dv], gates [B, S, Hq, 3]."""
    if not isinstance(outputs, Sequence) or len(outputs) != 3:
        came = len(outputs) if isinstance(outputs, Sequence) else type(outputs).__name__
        raise ValueError(f"outputs must be 3 tensors (compressed, selected, window); got {came}")
    first = checks.with_data("outputs[0]", checks.tensor("outputs[0]", outputs[0], ("B", "S", "Hq", "Dv")))
    for i in (1, 2):
        checks.tensor(f"outputs[{i}]", outputs[i], first.shape, like=first)
    checks.same_dtype(**{f"outputs[{i}]": outputs[i] for i in range(3)})
    gates = checks.gates(gates, first)
    _, run = backends.choose(backend, first, first)
    with torch.autocast(first.device.type, enabled=False):
        return run.combine((outputs[0], outputs[1], outputs[2]), gates)


@overload
def nsa_attention(
    q: Tensor,
    k: Branches,
    v: Branches,
    gates: Tensor,
    config: NSAConfig,
    *,
    k_compressed: Tensor | None = ...,
    v_compressed: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    scale: float | None = ...,
    backend: str = ...,
    return_aux: Literal[False] = ...,
) -> Tensor: ...
@overload
def nsa_attention(
    q: Tensor,
    k: Branches,
    v: Branches,
    gates: Tensor,
    config: NSAConfig,
    *,
    k_compressed: Tensor | None = ...,
    v_compressed: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    scale: float | None = ...,
    backend: str = ...,
    return_aux: Literal[True],
) -> tuple[Tensor, Aux]: ...
def nsa_attention(
    q: Tensor,
    k: Branches,
    v: Branches,
    gates: Tensor,
    config: NSAConfig,
    *,
    k_compressed: Tensor | None = None,
    v_compressed: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Aux]:
    """Native Sparse Attention (arXiv 2502.11089, Eq. 5 to 12), causal.

    Args:
        q: [B, S, Hq, Dk], RoPE applied.
        k: [B, T, Hkv, Dk], one tensor for all branches or (compressed source, selected, window).
        v: [B, T, Hkv, Dv], likewise.
        gates: [B, S, Hq, 3] in the order compressed, selected, window; taken as given.
        k_compressed: [B, blocks, Hkv, Dk], in place of phi; the compressed source may then be None.
        v_compressed: [B, blocks, Hkv, Dv], likewise.
        cu_seqlens: int32 [N+1], the bounds of N packed documents (B = 1, S = T).
        scale: of the scores; 1/sqrt(Dk) unless given.
        backend: "reference", "torch", "triton", or "auto" (triton on a GPU that it supports, else torch).

    Returns o [B, S, Hq, Dv], and `Aux` with return_aux=True.
    Raises ValueError or TypeError naming the argument, what came and what is wanted.
    """
    config = checks.a_config(config)
    of_k, of_v = checks.branches("k", k), checks.branches("v", v)
    if not return_aux and cu_seqlens is None and not torch.compiler.is_compiling():
        planned = _attend_if_planned(q, of_k, of_v, gates, config, (k_compressed, v_compressed), scale, backend)
        if planned is not None:
            return planned
    (k_source, k_selected, k_window), (v_source, v_selected, v_window) = of_k, of_v
    names = ("k[1]" if isinstance(k, (tuple, list)) else "k", "v[1]" if isinstance(v, (tuple, list)) else "v")
    q, k_sel = checks.queries_and_keys(q, k_selected, k_name=names[0])
    v_sel = checks.values(v_selected, k_sel, v_name=names[1], k_name=names[0])
    k_win = k_sel if k_window is k_sel else checks.tensor("k[2]", k_window, k_sel.shape, like=q)
    v_win = v_sel if v_window is v_sel else checks.tensor("v[2]", v_window, v_sel.shape, like=q)
    gates = checks.gates(gates, q)
    layout = checks.layout_of_keys(q, k_sel, config, cu_seqlens, k_name=names[0])
    scale = checks.a_scale(scale, q.shape[-1])
    name, run = backends.choose(backend, q, v_sel)
    with _without_autocast(q.device.type):
        q = checks.packed(q, layout)
        k_cmp = _to_compress("k", k_source, k_compressed, k_sel, layout)
        v_cmp = _to_compress("v", v_source, v_compressed, v_sel, layout)
        checks.same_dtype(q=q, k_compressed=k_cmp, v_compressed=v_cmp, **{"k[2]": k_win, "v[2]": v_win})
        tensors, step = (q, k_sel, v_sel, k_win, v_win, k_cmp, v_cmp, gates), None
        if layout.num_queries < layout.num_keys:
            step = backends.decoder(name, *tensors)
        pools = step is None and k_compressed is None and v_compressed is None
        if not pools:
            k_cmp = run.compress(k_cmp, layout) if k_compressed is None else k_cmp
            v_cmp = run.compress(v_cmp, layout) if v_compressed is None else v_cmp
        if step is not None:
            views = KVView(k_cmp, v_cmp), KVView(k_sel, v_sel), KVView(k_win, v_win)
            decoded = step(q, *views, layout.num_keys, gates, config, scale)
            return (decoded.o, Aux.of(decoded, name)) if return_aux else decoded.o
        call = backends.whole_call(run)
        selected, window = (k_sel, v_sel), (k_win, v_win)
        o, seen = call(q, selected, window, (k_cmp, v_cmp), pools, gates, layout, scale, return_aux)
    if not return_aux:
        return o
    assert seen is not None
    block_indices, lses, reads = seen
    lse = dict(zip(BRANCHES, (x.float() for x in lses), strict=True))
    read = dict(zip(BRANCHES, (x.sum(dtype=torch.int64) for x in reads), strict=True))
    return o, Aux(block_indices, lse, read, name)


def _attend_if_planned(
    q: Any,
    k: tuple[Any, Any, Any],
    v: tuple[Any, Any, Any],
    gates: Any,
    config: NSAConfig,
    compressed: tuple[Any, Any],
    scale: Any,
    backend: str,
) -> Tensor | None:
    """o if a backend has a plan for this call (`backends.AttendIfPlanned`), else None. It skips the checks, a sixth of
    the host's time for a short call, and refuses nothing itself."""
    if type(q) not in _TENSORS or type(k[1]) not in _TENSORS or q.shape[1:2] != k[1].shape[1:2]:
        return None
    if q.dim() != 4 or not q.numel() or type(scale) not in (type(None), float, int):
        return None
    pools = compressed[0] is None and compressed[1] is None
    source = (k[0], v[0]) if pools else compressed
    device = q.device
    for x in (q, *k[1:], *v[1:], *source, gates):
        if type(x) not in _TENSORS or x.layout is not torch.strided or x.device != device:
            return None
    attend = backends.attend_if_planned(backend, q)
    if attend is None:
        return None
    scale = checks.a_scale(None, q.shape[3]) if scale is None else scale
    return attend(q, (k[1], v[1]), (k[2], v[2]), source, pools, gates, config, scale)


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Nothing where none is on: to leave it takes the host 3 µs."""
    on = torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else contextlib.nullcontext()


def _to_compress(name: str, source: object, given: Tensor | None, like: Tensor, layout: Layout) -> Tensor:
    """The compressed keys (values) that the caller gave, or else the source over which phi = avg is to be taken."""
    if given is not None:
        return checks.tensor(f"{name}_compressed", given, (like.shape[0], layout.num_slots, *like.shape[2:]), like=like)
    if layout.config.phi != "avg":
        raise ValueError(
            f"{name}_compressed must be given with phi={layout.config.phi!r}, whose weights the layer holds"
        )
    if source is like:
        return like
    source = checks.tensor(f"{name}[0]", source, like.shape, like=like)
    checks.same_dtype(q=like, **{f"{name}[0]": source})
    return source


def _distinct(block_indices: Tensor, layout: Layout) -> Tensor:
    """Ascending and distinct, everything out of range turned into -1 at the end."""
    if block_indices.shape[-1] == 0:  # no choice at all is one invalid choice
        return block_indices.new_full((*block_indices.shape[:3], 1), -1, dtype=torch.int32)
    last = layout.positions // layout.config.l_sel  # [S]: no block after the query's own
    inside = (block_indices >= 0) & (block_indices <= last[:, None, None])
    beyond = torch.iinfo(torch.int32).max
    ordered = torch.where(inside, block_indices, beyond).sort(-1).values
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    ordered = torch.where(again, beyond, ordered).sort(-1).values
    return torch.where(ordered == beyond, -1, ordered).int()

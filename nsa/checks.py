"""What a call must look like. Every error names the argument, what came and what is wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.geometry import Layout

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def tensor(name: str, x: object, shape: Sequence[int | str], *, like: Tensor | None = None) -> Tensor:
    """Check one floating tensor: `shape` holds sizes, or letters where any size will do."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if not _fits(x.shape, shape):
        wanted = "[" + ", ".join(str(size) for size in shape) + "]"
        raise ValueError(f"{name} must have shape {wanted}; got {list(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {x.dtype}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense (strided) tensor; got layout {x.layout}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} must be on the device of q, {like.device}; got {x.device}")
    return x


def _fits(came: Sequence[int], shape: Sequence[int | str]) -> bool:
    """A loop: `all` of a generator takes the host three times as long."""
    if len(came) != len(shape):
        return False
    for size, wanted in zip(came, shape, strict=True):  # noqa: SIM110 - see above
        if not isinstance(wanted, str) and size != wanted:
            return False
    return True


def with_data(name: str, x: Tensor) -> Tensor:
    """x, unless it is a meta tensor, of which nothing can be computed."""
    if x.device.type == "meta":
        raise ValueError(f"{name} must be on a device that holds its values; got a tensor on the device meta")
    return x


def heads_first(q: Tensor, k: Tensor) -> str:
    """What to add to the error of a call that [B, S, H, D] does not explain; "" where [B, H, S, D] does not either."""
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or q.shape[2] > k.shape[2]:
        return ""
    return (
        f"; the layout is [B, S, H, D], and {list(q.shape)} with {list(k.shape)} look like [B, H, S, D]:"
        " pass x.transpose(1, 2)"
    )


def same_dtype(**tensors: Tensor) -> None:
    (first, wanted), *rest = tensors.items()
    for name, x in rest:
        if x.dtype != wanted.dtype:
            raise TypeError(f"{name} must have the dtype of {first}, {wanted.dtype}; got {x.dtype}")


def a_config(config: object) -> NSAConfig:
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an NSAConfig; got {type(config).__name__}")
    return config


def a_scale(scale: object, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a float or None; got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}")
    return float(scale)


def queries_and_keys(q: object, k: object, *, k_name: str = "k", num_keys: int | str = "T") -> tuple[Tensor, Tensor]:
    """q [B, S, Hq, Dk] against keys [B, T, Hkv, Dk]."""
    q = with_data("q", tensor("q", q, ("B", "S", "Hq", "Dk")))
    batch, _, heads, head_dim = q.shape
    if head_dim == 0 or heads == 0:
        raise ValueError(f"q must have at least one head and one channel; got {list(q.shape)}")
    k = tensor(k_name, k, (batch, num_keys, "Hkv", head_dim), like=q)
    if k.shape[2] == 0 or heads % k.shape[2]:
        hint = heads_first(q, k)
        raise ValueError(f"the heads of {k_name} must divide the {heads} heads of q; got {k.shape[2]}{hint}")
    same_dtype(q=q, **{k_name: k})
    return q, k


def values(v: object, k: Tensor, *, v_name: str = "v", k_name: str = "k") -> Tensor:
    v = tensor(v_name, v, (*k.shape[:3], "Dv"), like=k)
    if v.shape[3] == 0:
        raise ValueError(f"{v_name} must have at least one channel; got {list(v.shape)}")
    same_dtype(**{k_name: k, v_name: v})
    return v


def block_indices(x: object, q: Tensor, num_kv_heads: int) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"block_indices must be a tensor; got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"block_indices must be int32 or int64; got {x.dtype}")
    if x.layout != torch.strided:
        raise ValueError(f"block_indices must be a dense (strided) tensor; got layout {x.layout}")
    if x.dim() != 4 or x.shape[:3] != (q.shape[0], q.shape[1], num_kv_heads):
        wanted = f"[{q.shape[0]}, {q.shape[1]}, {num_kv_heads}, n]"
        raise ValueError(f"block_indices must have shape {wanted}; got {list(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"block_indices must be on the device of q, {q.device}; got {x.device}")
    return x


def layout_of_keys(q: Tensor, k: Tensor, config: NSAConfig, cu_seqlens: object, *, k_name: str = "k") -> Layout:
    """`layout` of q [B, S, Hq, Dk] over the keys k [B, T, Hkv, Dk]."""
    if k.shape[1] < q.shape[1]:
        hint = heads_first(q, k)
        raise ValueError(f"the length of {k_name} must be at least the {q.shape[1]} queries; got {k.shape[1]}{hint}")
    return layout(q, k.shape[1], config, cu_seqlens)


def layout(q: Tensor, num_keys: object, config: NSAConfig, cu_seqlens: object) -> Layout:
    """The layout of S queries over T keys, with the documents checked as far as needs no host sync."""
    num_queries = q.shape[1]
    if num_keys is None:
        num_keys = num_queries
    if isinstance(num_keys, bool) or not isinstance(num_keys, int):
        raise TypeError(f"num_keys must be an int; got {type(num_keys).__name__}")
    if num_keys < num_queries:
        raise ValueError(f"num_keys must be at least the {num_queries} queries; got {num_keys}")
    if cu_seqlens is not None:
        cu_seqlens = _documents(cu_seqlens, q, num_keys)
    if not isinstance(cu_seqlens, Tensor) or _readable(cu_seqlens):
        return Layout(num_queries, num_keys, config, q.device, cu_seqlens)
    # Bad documents become one, and `packed` makes all rows NaN.
    valid = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_keys) & (cu_seqlens.diff() >= 0).all()
    one = torch.full_like(cu_seqlens, num_keys)
    one[:1].zero_()
    return Layout(num_queries, num_keys, config, q.device, torch.where(valid, cu_seqlens, one), valid)


def _documents(cu_seqlens: object, q: Tensor, num_keys: int) -> Tensor:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor; got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32; got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must have shape [N+1] with N >= 1; got {list(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on the device of q, {q.device}; got {cu_seqlens.device}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs one packed row, B = 1; got B = {q.shape[0]}")
    if q.shape[1] != num_keys:
        raise ValueError(f"cu_seqlens needs as many queries as keys; got {q.shape[1]} and {num_keys}")
    if _readable(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != num_keys or any(b < a for a, b in pairwise(bounds)):
            raise ValueError(f"cu_seqlens must ascend from 0 to {num_keys}; got {bounds[:8]}{'…' * (len(bounds) > 8)}")
    return cu_seqlens


def _readable(cu_seqlens: Tensor) -> bool:
    """Whether the host may read the documents: that would stall a GPU's queue, and torch.compile has no values yet."""
    return cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()


def packed(x: Tensor, layout: Layout) -> Tensor:
    """x, or NaN where documents that could not be read on the host are not documents: never a wrong number."""
    return x if layout.documents_valid is None else torch.where(layout.documents_valid, x, torch.nan)


def compressed_rows(name: str, x: Tensor, layout: Layout) -> None:
    if x.shape[1] != layout.num_slots:
        config = layout.config
        raise ValueError(
            f"{name} must hold {layout.num_slots} compressed blocks ({layout.num_keys} keys with l={config.l}, "
            f"d={config.d}); got {x.shape[1]}"
        )


def gates(x: object, q: Tensor) -> Tensor:
    """Gates [B, S, Hq, 3] of q [B, S, Hq, D]."""
    batch, queries, heads = q.shape[:3]
    if isinstance(x, Tensor) and queries != heads and x.shape == (batch, heads, queries, 3):
        raise ValueError(
            f"gates must have shape {[batch, queries, heads, 3]}; got {list(x.shape)}: the layout is [B, S, H, ...],"
            f" and either gates or the others, {list(q.shape)}, look like [B, H, S, ...]: pass x.transpose(1, 2)"
        )
    return tensor("gates", x, (batch, queries, heads, 3), like=q)


def branches(name: str, x: object) -> tuple[object, object, object]:
    """One tensor for all branches, or (compressed source, selected, window)."""
    if isinstance(x, (tuple, list)):
        if len(x) != 3:
            raise ValueError(f"{name} must be a tensor or 3 tensors (compressed, selected, window); got {len(x)}")
        return x[0], x[1], x[2]
    return x, x, x

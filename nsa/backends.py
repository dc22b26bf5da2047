"""The three implementations of the parts, and which one serves a call; the decode step, and a cache's
write, that one of them has whole."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from nsa import reference, torch_backend
from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.kv import DecodeOutput, KVView

NAMES = ("auto", "reference", "torch", "triton")
MAX_DECODE_QUERIES = 8
"""Queries of a sequence, all new, that a fused decode step takes: a speculative step."""


class Backend(Protocol):
    """The parts, on checked arguments, returning (o, lse, keys read).

    The lse is in at least float32, as it was computed: `nsa.attention` hands it out as float32. `keys_read` is int32
    [B, S, Hkv], counted where the keys are read.
    """

    def compress(self, x: Tensor, layout: Layout) -> Tensor: ...

    def compressed_attention(
        self, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def select_blocks(self, q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None) -> Tensor: ...

    def selected_attention(
        self, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def window_attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def combine(self, outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor: ...


Rows = tuple[tuple[Tensor, float], ...]
"""What a branch's backward pass takes of the queries, [B, S, Hq, ...] each, and what stands there for padding."""


class ParallelBackend(Backend, Protocol):
    """A backend whose gradients can be asked for apart from autograd, as ranks need it that gather keys anew.

    Those of a branch are (dq, dk, dv); dk and dv may be in a wider type.
    """

    def gated_rows(
        self, do: Tensor, dlse: Sequence[Tensor], outputs: Sequence[Tensor], lse: Sequence[Tensor], gates: Tensor
    ) -> tuple[list[Rows], Tensor]:
        """(the rows of each branch, the gradient of the gates) from those of o and of each lse: `combine` backward."""
        ...

    def compressed_attention_backward(
        self, rows: Sequence[Tensor], q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def selected_attention_backward(
        self, rows: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

    def window_attention_backward(
        self, rows: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def combine_into(self, o: Tensor, outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> None:
        """`combine`, without gradients, into o, which may be a part of a tensor."""
        ...

    def add_gradients(self, dq: Tensor, dq_cmp: Tensor, dq_sel: Tensor, dq_win: Tensor) -> None:
        """Those of all branches into dq, which may be a part of a tensor; any of them may be overwritten.

        In the order and with the rounding of a call on one device.
        """
        ...


class Decoder(Protocol):
    """Attention of q [B, S, Hq, Dk], the last of `lengths` tokens (int32 [B], or one number), over three branches."""

    def __call__(
        self,
        q: Tensor,
        compressed: KVView,
        selected: KVView,
        window: KVView,
        lengths: Tensor | int,
        gates: Tensor,
        config: NSAConfig,
        scale: float,
    ) -> DecodeOutput: ...


class CacheWriter(Protocol):
    """Write k [B, S, Hkv, Dk] and v [B, S, Hkv, Dv] of each set behind the tokens that a cache holds.

    `into` is where each set goes; `before` is how many tokens there are, int32 [B] or one number for all. `compressed`
    is where the means (phi = avg) go of the blocks that the new tokens complete, None where phi is another.
    """

    def __call__(
        self,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        into: Sequence[KVView],
        compressed: KVView | None,
        before: Tensor | int,
        config: NSAConfig,
    ) -> None: ...


Pair = tuple[Tensor, Tensor]
"""Keys and values."""
Observation = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]
"""(block indices, lse of each branch, keys read by each)."""


class WholeCall(Protocol):
    """All of a call by one function, differentiable.

    The keys and values of each branch; those of the compressed branch are what phi = avg is to be taken of if `pools`,
    else they are compressed. What was seen beside o may be None where it is not `observed`.
    """

    def __call__(
        self,
        q: Tensor,
        selected: Pair,
        window: Pair,
        compressed: Pair,
        pools: bool,
        gates: Tensor,
        layout: Layout,
        scale: float,
        observed: bool,
    ) -> tuple[Tensor, Observation | None]: ...


class AttendIfPlanned(Protocol):
    """o of a call of one document, as many queries as keys, that has a plan since an earlier one like it was checked
    and served; None for any other.

    Arguments as of `WholeCall`: tensors that are strided and on one device; nothing else need be checked.
    """

    def __call__(
        self, q: Tensor, selected: Pair, window: Pair, compressed: Pair, pools: bool, gates: Tensor,
        config: NSAConfig, scale: float,
    ) -> Tensor | None: ...  # fmt: skip


class Rotator(Protocol):
    """RoPE of q [B, S, Hq, D] and k [B, S, Hk, D] at integer positions [S] or [B, S], or 0, 1, ... for None, with
    `nsa.rope.frequencies`, float64 [D // 2]. Arguments are checked."""

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor | None, frequencies: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def load(name: str) -> Backend:
    """The module that implements the parts under this name.

    Triton may be missing, so its backend is imported where it is asked for: by a statement, which torch.compile can
    trace.
    """
    module: Backend
    if name == "triton":
        from nsa import triton_backend as module
    elif name == "torch":
        module = torch_backend
    elif name == "reference":
        module = reference
    else:
        raise KeyError(name)
    return module


def why_not_triton(q: Tensor, v: Tensor) -> str | None:
    """Why the triton backend cannot serve these tensors, or None if it can."""
    try:
        from nsa.triton_backend import dispatch
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return dispatch.why_not(q, v)


def choose(asked: str, q: Tensor, v: Tensor) -> tuple[str, Backend]:
    """(name, module) of the backend that serves a call. A forced one that cannot raises ValueError with the reason."""
    if asked not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}; got {asked!r}")
    if asked == "auto":
        on_gpu = q.device.type == "cuda" and torch.version.hip is None
        asked = "triton" if on_gpu and why_not_triton(q, v) is None else "torch"
    elif asked == "triton" and (reason := why_not_triton(q, v)):
        raise ValueError(f"backend 'triton' cannot serve this call: {reason}")
    return asked, load(asked)


def choose_parallel(asked: str, q: Tensor, v: Tensor) -> tuple[str, ParallelBackend]:
    """`choose` among those that serve context parallelism: all but the reference."""
    if asked == "reference":
        raise ValueError("backend must be auto, torch or triton under context parallelism; got 'reference'")
    name, run = choose(asked, q, v)
    return name, cast(ParallelBackend, run)


def decoder(backend: str, q: Tensor, *others: Tensor) -> Decoder | None:
    """The fused decode of the backend that was chosen for a call; None where it has none, or has none for this call.

    It has no backward pass, and torch.compile cannot trace it: there the parts serve.
    """
    if backend != "triton" or q.shape[1] > MAX_DECODE_QUERIES or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others)):
        return None
    from nsa import triton_backend  # as in `load`

    return triton_backend.decode_attention


def cache_writer(asked: str, k: Tensor, v: Tensor) -> CacheWriter | None:
    """The one kernel that writes new keys and values like these, of the backend that serves them where `asked` is asked
    for; None where it has none: a cache then writes by PyTorch's indexing. As `decoder`, torch.compile cannot trace it.
    """
    if choose(asked, k, v)[0] != "triton" or torch.compiler.is_compiling():
        return None
    from nsa import triton_backend  # as in `load`

    return triton_backend.write_cache


def whole_call(run: Backend) -> WholeCall:
    """The function for a whole call: the backend's own `attend` where it has one, else its parts in turn."""
    own: WholeCall | None = getattr(run, "attend", None)
    return by_parts(run) if own is None else own


def attend_if_planned(asked: str, q: Tensor) -> AttendIfPlanned | None:
    """That of the backend that is asked for; None where it has none, or is not imported yet."""
    if asked == "triton" or (asked == "auto" and q.is_cuda):
        module = sys.modules.get("nsa.triton_backend")  # faster than `load`
        return getattr(module, "attend_if_planned", None)
    return None


def rotator(run: Backend) -> Rotator | None:
    """The backend's own RoPE of queries and keys; None where it has none."""
    return getattr(run, "rotate", None)


def by_parts(run: Backend) -> WholeCall:
    """A whole call, made of a backend's parts."""

    def call(
        q: Tensor, selected: Pair, window: Pair, compressed: Pair, pools: bool, gates: Tensor, layout: Layout,
        scale: float, observed: bool,
    ) -> tuple[Tensor, Observation | None]:  # fmt: skip
        k_cmp, v_cmp = (run.compress(x, layout) for x in compressed) if pools else compressed
        o_cmp, lse_cmp, read_cmp = run.compressed_attention(q, k_cmp, v_cmp, layout, scale)
        with torch.no_grad():
            block_indices = run.select_blocks(q, k_cmp, layout, scale, lse_cmp)
        o_sel, lse_sel, read_sel = run.selected_attention(q, *selected, block_indices, layout, scale)
        o_win, lse_win, read_win = run.window_attention(q, *window, layout, scale)
        o = run.combine((o_cmp, o_sel, o_win), gates)
        return o, (block_indices, (lse_cmp, lse_sel, lse_win), (read_cmp, read_sel, read_win))

    return call

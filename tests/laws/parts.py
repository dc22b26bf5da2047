"""One backend's public parts with one device, and how a law is tried on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nsa
from nsa import backends
from nsa.config import BRANCHES
from tests.laws.cases import Case, Inputs

BRANCHES_AND_ALL = (*BRANCHES, "all")
_PARTS = ("compress", "compressed_attention", "select_blocks", "selected_attention", "window_attention", "combine")
_KERNEL_SHARE = 8
"""One in so many examples is tried on kernels: each config is compiled anew, or interpreted at 0.1 to 2 s a call."""
_INTERPRETED_ROWS = 24
"""The most rows (batch · groups · queries) of a call that is tried there."""


def why_absent(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot run on this machine, or None."""
    probe = torch.zeros(1, 1, 1, 16, device=device)
    if backend == "triton" and (reason := backends.why_not_triton(probe, probe)):
        return reason
    try:
        module = backends.load(backend)
    except ImportError as error:
        return f"it cannot be imported ({error})"
    lacking = [part for part in _PARTS if not hasattr(module, part)]
    return f"it lacks {', '.join(lacking)}" if lacking else None


@dataclass(frozen=True)
class Parts:
    """The public parts of one backend, called on the inputs of a case."""

    backend: str
    device: torch.device

    def compress(self, case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
        """Compressed keys and values [B, slots, Hkv, D]."""
        keys, values = (
            nsa.compress(source, case.config, cu_seqlens=x.cu_seqlens, backend=self.backend) for source in (x.k, x.v)
        )
        return keys, values

    def compressed(self, case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
        k_cmp, v_cmp = self.compress(case, x)
        return nsa.compressed_attention(
            x.q, k_cmp, v_cmp, case.config, case.keys, cu_seqlens=x.cu_seqlens, backend=self.backend
        )

    def select(self, case: Case, x: Inputs) -> Tensor:
        """Block indices int32 [B, S, Hkv, n]."""
        return self.select_from(case, x.q, self.compress(case, x)[0], x.cu_seqlens)

    def select_from(self, case: Case, q: Tensor, k_cmp: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return nsa.select_blocks(q, k_cmp, case.config, case.keys, cu_seqlens=cu_seqlens, backend=self.backend)

    def selected(self, case: Case, x: Inputs, block_indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if block_indices is None:
            block_indices = self.select(case, x)
        return nsa.selected_attention(
            x.q, x.k, x.v, block_indices, case.config, cu_seqlens=x.cu_seqlens, backend=self.backend
        )

    def window(self, case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
        return nsa.window_attention(x.q, x.k, x.v, case.config, cu_seqlens=x.cu_seqlens, backend=self.backend)

    def whole(self, case: Case, x: Inputs) -> tuple[Tensor, nsa.Aux]:
        return nsa.nsa_attention(
            *x.floats(), case.config, cu_seqlens=x.cu_seqlens, backend=self.backend, return_aux=True
        )

    def forward(self, case: Case, x: Inputs, branch: str) -> Tensor:
        """One branch from keys and values to its output, or all of them gated: o [B, S, Hq, Dv]."""
        if branch == "all":
            return self.whole(case, x)[0]
        run = {"compressed": self.compressed, "selected": self.selected, "window": self.window}[branch]
        return run(case, x)[0]

    def gradients(self, case: Case, x: Inputs, branch: str, upstream: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the branch with respect to q, k, v, gates; zero where the branch does not use one."""
        leaves = tuple(leaf.detach().requires_grad_() for leaf in x.floats())
        o = self.forward(case, x.with_floats(leaves), branch)
        if not o.requires_grad:  # no block at all: nothing to differentiate
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        return torch.autograd.grad(o, leaves, upstream, allow_unused=True, materialize_grads=True)

    @property
    def interpreted(self) -> bool:
        """Whether the kernels run in Triton's interpreter."""
        return self.backend == "triton" and self.device.type == "cpu"


class Law(Protocol):
    """A test of one law; `check(parts, case)` or `check(parts, case, branch)` is the law itself."""

    check: Callable[..., None]

    def __call__(self, *args: object) -> None: ...


def _try(parts: Parts, drawn: st.SearchStrategy[Case], check: Callable[..., None], *more: str) -> None:
    def law(case: Case) -> None:
        check(parts, case, *more)

    law.__name__ = "_".join((check.__name__, *more))  # Hypothesis seeds its draws from the name
    effort = settings()
    if parts.backend == "triton":
        few = max(effort.max_examples // _KERNEL_SHARE, 1)
        if parts.interpreted and more == ("all",):
            few = max(few * 2 // 3, 1)  # each branch alone is tried more often; together they take the longest
        effort = settings(max_examples=few, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
    if parts.interpreted:
        drawn = drawn.filter(lambda case: case.batch * case.num_kv_heads * case.queries <= _INTERPRETED_ROWS)
    effort(given(drawn)(law))()


def law(drawn: st.SearchStrategy[Case]) -> Callable[[Callable[[Parts, Case], None]], Law]:
    """Make a law into a test that tries it on drawn cases, with each backend."""

    def decorate(check: Callable[[Parts, Case], None]) -> Law:
        def test(parts: Parts) -> None:
            _try(parts, drawn, check)

        return _named(test, check)

    return decorate


def branch_law(drawn: st.SearchStrategy[Case]) -> Callable[[Callable[[Parts, Case, str], None]], Law]:
    """The same for a law that holds for each branch alone and for all together."""

    def decorate(check: Callable[[Parts, Case, str], None]) -> Law:
        @pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
        def test(parts: Parts, branch: str) -> None:
            _try(parts, drawn, check, branch)

        return _named(test, check)

    return decorate


def _named(test: Callable[..., None], check: Callable[..., None]) -> Law:
    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    made = cast(Law, test)
    made.check = check
    return made

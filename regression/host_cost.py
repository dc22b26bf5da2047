"""The detector of work that goes through Python token by token: what one layer costs the host, whatever S."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nsa import NativeSparseAttention
from regression.evidence import Bound, Evidence
from regression.incident import Step
from regression.operators import Operators
from regression.training import TINY

SHORT, LONG = 32, 128
"""S and 4·S, the longer one beyond the window and the selected blocks, and within one piece of the torch backend."""
FURTHER_OPS = 16
"""Operators that 4·S may cost more than S, whatever S: less than one per compressed block, let alone per token."""


def examine(step: Step) -> Evidence:
    """Operators that four times the tokens add, and host syncs, of one layer's forward and backward."""
    backends = fast_backends(step)
    worst = Bound(0, FURTHER_OPS)
    syncs, waits, notes = 0, list[str](), list[str]()
    for n, backend in enumerate(backends):
        short, long = (_counted(layer_pass(tokens, step.device, backend)) for tokens in (SHORT, LONG))
        further = long.count - short.count
        if further >= (worst.value or 0):
            worst = Bound(further, FURTHER_OPS, f"operators more at S = {LONG} than at {SHORT}, {backend}")
        syncs = max(syncs, long.host_syncs)
        notes.append(f"{backend}: {long.count:,} operators and {long.host_syncs:,} host syncs at S = {LONG}")
        if step.device == "cuda":
            waits += _waits_of_cuda(layer_pass(LONG, step.device, backend), backend)
        step(n)
    return Evidence(
        ops=worst,
        host_syncs=Bound(syncs + len(waits), 0, f"host syncs of one layer at S = {LONG}"),
        notes=(*notes, *waits),
        paths=backends,
    )


def fast_backends(step: Step) -> tuple[str, ...]:
    """Without the reference, which goes token by token on purpose, and without the interpreter, which is all host."""
    return tuple(b for b in step.backends if b != "reference" and not (b == "triton" and step.device == "cpu"))


def layer_pass(tokens: int, device: str, backend: str) -> Callable[[], None]:
    """Forward and backward of one layer over x [2, tokens, dim]."""
    sizes = (TINY.dim, TINY.n_heads, TINY.n_kv_groups, TINY.d_k, TINY.d_v)
    layer = NativeSparseAttention(*sizes, TINY.nsa, backend=backend).to(device)
    x = torch.randn(2, tokens, TINY.dim, device=device)

    def run() -> None:
        layer(x).sum().backward()

    run()  # compiles, and fills what is made once
    return run


def _counted(run: Callable[[], None]) -> Operators:
    with Operators() as operators:
        run()
    return operators


def _waits_of_cuda(run: Callable[[], None], backend: str) -> list[str]:
    """CUDA itself says whether the host waited."""
    try:
        with no_waiting():
            run()
    except RuntimeError as error:
        return [f"{backend}: {error}"]
    return []


@contextmanager
def no_waiting() -> Iterator[None]:
    """CUDA raises on a synchronisation; PyTorch warns that this mode does not yet know all of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

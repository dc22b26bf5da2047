"""What work costs the host: operators that were dispatched, times it waited for a value of the device, seconds.

`examine` is the detector of work that goes through Python token by token: one layer's cost must not grow with S.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa import NativeSparseAttention
from regression.contract import Bound, Evidence, Step
from regression.training import TINY

SHORT, LONG = 32, 128
"""S and 4·S, the longer one beyond the window and the selected blocks, and within one piece of the torch backend."""
FURTHER_OPS = 16
"""Operators that 4·S may cost more than S, whatever S: less than one per compressed block, let alone per token."""
_READ_BY_THE_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu)
"""Methods that on a GPU wait for it; on a CPU they dispatch nothing that could be seen below."""
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
"""Operators whose result the host must read, or whose size the data decides; `unique` and its kin are others."""


class Operators:
    """Counts while it is entered: forward, backward, and whatever else is dispatched in this thread."""

    def __init__(self) -> None:
        self.count = 0
        self.host_syncs = 0
        self._modes = (_FunctionMode(self), _DispatchMode(self))

    def __enter__(self) -> Operators:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*raised)


class _FunctionMode(TorchFunctionMode):
    def __init__(self, counts: Operators) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counts.host_syncs += func in _READ_BY_THE_HOST
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __init__(self, counts: Operators) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        self._counts.count += 1
        self._counts.host_syncs += by_mask or name in _WAITING or "unique" in name
        return func(*args, **(kwargs or {}))


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
    sizes = (TINY.dim, TINY.n_heads, TINY.num_kv_heads, TINY.d_k, TINY.d_v)
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


def clock_s(device: str) -> float:
    """Seconds of work: on a CPU the time that this process ran, which its neighbours change little."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()

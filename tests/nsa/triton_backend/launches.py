"""The kernels that a call starts on a device, by name: Triton's and PyTorch's, counted without a GPU.

Triton's launches are recorded and not run, so that real sizes take no time on a CPU: no choice on the host depends on
what a kernel wrote. A PyTorch operation counts once, although some (a sort, a running sum) are several kernels; views
and allocations are none. `python -m tests.nsa.triton_backend.launches` prints the list of 12/2 heads of 64 at 2048
tokens, forward and backward; TRITON_INTERPRET=1 lets it run on a CPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

import nsa
from harness.triton_interpreter import compute_in_bfloat16

_ALLOCATIONS = ("empty", "new_empty")
_NO_KERNEL = ("alias", "detach", "lift_fresh", "_unsafe_view", "_reshape_alias")


class Launches(TorchDispatchMode):
    """Lists what is launched inside a `with` block, in order: "compressed_window._forward" or "aten.copy_"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

        def launch(kernel: Any, *_: Any, **__: Any) -> None:
            self.names.append(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}")

        self._kernels = mock.patch.object(InterpretedFunction, "run", launch)

    def __enter__(self) -> Launches:
        self._kernels.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.stop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(_ALLOCATIONS) or name in _NO_KERNEL):
            self.names.append(f"aten.{name}")
        return func(*args, **(kwargs or {}))


def of_call(
    heads: int, num_kv_heads: int, dim: int, length: int, *, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> tuple[list[str], list[str]]:
    """What the forward pass launches, and the backward pass, of one call of the triton backend on [1, length, ...]."""
    shapes = (heads, dim), (num_kv_heads, dim), (num_kv_heads, dim), (heads, 3)
    q, k, v, gates = (torch.zeros(1, length, *shape, dtype=dtype, requires_grad=True) for shape in shapes)
    upstream = torch.zeros(1, length, heads, dim, dtype=dtype)
    with Launches() as forward:
        o = nsa.nsa_attention(q, k, v, gates, nsa.NSAConfig(), backend="triton", **more)
    with Launches() as backward:
        torch.autograd.grad(o, (q, k, v, gates), upstream)
    return forward.names, backward.names


def main() -> None:
    compute_in_bfloat16()
    for title, names in zip(("forward", "backward"), of_call(12, 2, 64, 2048), strict=True):
        print(f"{title}: {len(names)}")
        for name, count in Counter(names).items():
            print(f"  {count} {name}")


if __name__ == "__main__":
    main()

"""The kernels that a call starts on a device, by name: Triton's and PyTorch's, counted without a GPU.

Triton's launches are recorded and not run, so that real sizes take no time on a CPU: no choice on the host depends on
what a kernel wrote. A PyTorch operation counts once, although some (a sort, a running sum) are several kernels; views
and allocations are none. `python -m tests.nsa.triton_backend.launches` prints the list of 12/2 heads of 64 at 2048
tokens, forward and backward, with the size of the tensors that each is given or gives, once each; what a kernel reads
several times, or of which it needs a part, is not in that. TRITON_INTERPRET=1 lets it run on a CPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

import nsa
from harness import triton_interpreter

_ALLOCATIONS = ("empty", "new_empty")
_NO_KERNEL = ("alias", "detach", "lift_fresh", "_unsafe_view", "_reshape_alias")


class Launches(TorchDispatchMode):
    """Lists what is launched inside a `with` block, in order: "compressed_window._forward" or "aten.copy_"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes: Counter[str] = Counter()
        """By name, of all its launches."""

        def launch(kernel: Any, *given: Any, **_: Any) -> None:
            self._launched(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}", given)

        self._kernels = mock.patch.object(InterpretedFunction, "run", launch)

    def __enter__(self) -> Launches:
        self._kernels.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.stop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, made = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        tensors = isinstance(made, (Tensor, tuple, list))
        if tensors and not (func.is_view or name.startswith(_ALLOCATIONS) or name in _NO_KERNEL):
            self._launched(f"aten.{name}", (args, kwargs, made))
        return made

    def _launched(self, name: str, tensors: Any) -> None:
        found = {(x.data_ptr(), x.nbytes): x.nbytes for x in tree_leaves(tensors) if isinstance(x, Tensor)}
        self.names.append(name)
        self.bytes[name] += sum(found.values())


def of_call(
    heads: int, num_kv_heads: int, dim: int, length: int, *, of_each_branch: bool = False, **more: Any
) -> tuple[Launches, Launches]:
    """What the forward pass launches, and the backward pass, of one call of the triton backend on [1, length, ...].

    Keys and values are one tensor each, or a tensor `of_each_branch`.
    """

    def zeros(heads: int, channels: int) -> Tensor:
        return torch.zeros(1, length, heads, channels, dtype=torch.bfloat16, requires_grad=True)

    q, gates, upstream = zeros(heads, dim), zeros(heads, 3), zeros(heads, dim).detach()
    own = 3 if of_each_branch else 1
    k, v = ([zeros(num_kv_heads, dim) for _ in range(own)] for _ in range(2))
    with Launches() as forward:
        o = nsa.nsa_attention(q, 3 // own * k, 3 // own * v, gates, nsa.NSAConfig(), backend="triton", **more)
    with Launches() as backward:
        torch.autograd.grad(o, (q, *k, *v, gates), upstream)
    return forward, backward


def of_layer(length: int) -> tuple[Launches, Launches]:
    """What the forward pass of a layer launches, and the backward pass, on [1, length, 16], projections included."""
    layer = nsa.NativeSparseAttention(16, 4, 2, 16, 16, nsa.NSAConfig(), backend="triton")
    x = torch.zeros(1, length, 16)
    with Launches() as forward:
        o = layer(x)
    with Launches() as backward:
        torch.autograd.grad(o, [*layer.parameters()], torch.zeros_like(o))
    return forward, backward


def of_cache_write(*, paged: bool, length: int, phi: str = "avg", layers: int = 1) -> Launches:
    """What the writes of one decode step launch, in each of `layers`: a token behind `length` in two sequences.

    In pages that is also what a step computes once for all layers, for a CUDA graph.
    """
    layer = nsa.NativeSparseAttention(16, 4, 2, 16, 24, nsa.NSAConfig(phi=phi), backend="triton")
    side_by_side = [nsa.KVCache(layer, batch_size=2, max_tokens=length + 1) for _ in range(layers)]
    cache = nsa.PagedCache([layer] * layers, num_pages=20, max_tokens=length + 1)
    rows = cache.rows([cache.new(), cache.new()])
    rows.every_step_alike = True
    for one in side_by_side:
        one.commit(length)
    rows.prepare(length)
    rows.commit(length)
    rows.prepare(1)
    with torch.no_grad():
        _, k, v, _ = layer.project(torch.zeros(2, 1, 16), torch.arange(1))
        with Launches() as found:
            for one, store in zip(side_by_side, cache.stores, strict=True):
                if paged:
                    store.append(k, v, rows.new_tokens(1))
                else:
                    one.stage(k, v)
    return found


def main() -> None:
    triton_interpreter.prepare()
    for title, found in zip(("forward", "backward"), of_call(12, 2, 64, 2048), strict=True):
        print(f"{title}: {len(found.names)}, {sum(found.bytes.values()) / 2**20:.2f} MiB")
        for name, count in Counter(found.names).items():
            print(f"  {count} {name}, {found.bytes[name] / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()

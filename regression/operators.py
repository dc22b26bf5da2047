"""What work costs the host: operators that were dispatched, and times it waited for a value of the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READ_BY_THE_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu)
"""Methods that on a GPU wait for it; on a CPU they dispatch nothing that could be seen below."""
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
"""Operators whose result the host must read, or whose size the data decides; `unique` and its kin are others."""


class Operators:
    """Counts while it is entered: forward, backward, and whatever else is dispatched in this thread."""

    def __init__(self) -> None:
        self.count = 0
        self.host_syncs = 0
        self._modes = (_Methods(self), _Dispatched(self))

    def __enter__(self) -> Operators:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*raised)


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Operators) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counts.host_syncs += func in _READ_BY_THE_HOST
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
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

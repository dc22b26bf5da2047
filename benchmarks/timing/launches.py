"""How many launches a call makes: what the host must do however small the tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_CUDA: Any = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined] # how the profiler names a GPU's events


class _Operators(TorchDispatchMode):
    """Counts PyTorch's operators as they are dispatched, those of a backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def per_call(call: Callable[[], object], device: str) -> int | None:
    """What a call that has been made before puts into the GPU's queue, by CUPTI: kernels, copies, fills.

    On "cpu" PyTorch's operators stand in for them. None where CUPTI counted nothing, as where another profiler has it.
    """
    if device != "cuda":
        with _Operators() as operators:
            call()
        return operators.count
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == _CUDA for event in profiled.events() or ()) or None

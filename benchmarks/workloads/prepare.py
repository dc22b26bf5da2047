"""From a key to its work, unless the implementation is absent or the case cannot fit into memory.

The memory is an estimate, so that a case that cannot fit is not tried and says so. The oracle often takes more than
what is timed: it holds the inputs of up to four sequences in float64, and gradients.
"""

from __future__ import annotations

import psutil
import torch

from benchmarks.baselines import find
from benchmarks.cases.key import HOST, NSA, Key
from benchmarks.cases.work import Work
from benchmarks.peak_memory import MemoryNeed
from benchmarks.workloads import attention, parts, train_loop, train_step
from benchmarks.workloads.train_step import MODELS
from harness import forced
from harness.peak import MIB

_USABLE = 0.8
"""Of a device's memory, where two processes share it."""
_SEQUENCES_COMPARED = 4
_RESERVE_MIB = 1536.0
"""The device's own context, libraries, and the gaps between allocations."""

_COPIES_OF_INPUTS = 3
"""Those that are timed, the copy that alternates with them, and the fresh ones of the last check."""
_OUTPUTS = {"nsa": {False: 4.5, True: 9.5}, "dense": {False: 1.1, True: 6.5}}
"""Peak of a call in sizes of q or o, whichever is larger, by whether there is a backward pass (H200, PyTorch 2.11)."""
_HELD = {False: 1.1, True: 3.5}
"""Outputs, and gradients, that stand while the oracle works, in the same sizes; by whether there is a backward pass."""
_WIDE_COPIES = {False: 1, True: 4}
"""Of the inputs in float64: themselves, the sum of their gradients, and one row's gradients twice while added."""
_MATH_BYTES_PER_PAIR = 12
"""Scores, probabilities and mask of "sdpa-math", which keeps them all."""
_TRAINED_BYTES = 60
"""Peak of a train step per token, layer and channel (H200, PyTorch 2.11: 55)."""
_PARAMETER_BYTES = 16
"""A float32 weight, its gradient, and AdamW's two moments."""
_STANDING_BYTES = 12
"""The same between two steps, where there is no gradient."""


def memory_need(key: Key) -> MemoryNeed:
    """Peak memory of the case on its device, the oracle included."""
    inputs, tensors = _of_step(key) if key.model is not None else _of_attention(key)
    return MemoryNeed(inputs / MIB, tensors / MIB, _RESERVE_MIB)


def _of_attention(key: Key) -> tuple[float, float]:
    """(inputs, all tensors), bytes."""
    size = getattr(torch, key.dtype).itemsize
    backward = key.mode.removeprefix(HOST) in ("prefill-forward-backward", "memory")
    queries, keys = (key.batch * tokens for tokens in (key.num_queries, key.num_keys))
    per_query = queries * key.heads * max(key.head_dim_k, key.head_dim_v)
    inputs = per_query + keys * key.num_kv_heads * (key.head_dim_k + key.head_dim_v)
    compared = inputs * min(key.batch, _SEQUENCES_COMPARED) / key.batch
    oracle = size * _HELD[backward] * per_query + 8 * _WIDE_COPIES[backward] * compared
    is_dense = key.config is None
    call = size * _OUTPUTS["dense" if is_dense else "nsa"][backward] * per_query
    if key.implementation == "sdpa-math":
        call += queries * key.num_keys * key.heads * _MATH_BYTES_PER_PAIR * (1 + backward)
    return size * inputs, size * _COPIES_OF_INPUTS * inputs + max(call, oracle)


def _of_step(key: Key) -> tuple[float, float]:
    """(weights and moments, all tensors), bytes."""
    assert key.model is not None
    model = MODELS[key.model]
    hidden = model.dim * model.n_layers
    parameters = hidden * (4 * model.dim + 3 * model.hidden_dim) + model.vocab_size * model.dim
    wide = getattr(torch, key.dtype).itemsize / 2
    activations = key.batch * key.num_keys * hidden * _TRAINED_BYTES * wide
    return parameters * _STANDING_BYTES, parameters * _PARAMETER_BYTES + activations


def require_room(key: Key, device: str) -> None:
    """Raises MemoryError where the case cannot fit in what is free on the device."""
    free_mib, total_mib = memory_mib(device)
    if why := memory_need(key).lacking(total_mib, free_mib):
        raise MemoryError(f"not tried: {why}")


def fits_twice(key: Key, device: str) -> bool:
    """Whether two processes may prepare the case and ask its oracle at the same time, as far as memory goes."""
    _, total_mib = memory_mib(device)  # of what is free now, the case before still holds some
    return 2 * memory_need(key).whole_mib <= _USABLE * total_mib


def memory_mib(device: str) -> tuple[float, float]:
    """(free, total) memory of the device; within the cap of a GPU that is forced."""
    if device == "cuda":
        free, total = forced.memory_bytes()
    else:
        seen = psutil.virtual_memory()
        free, total = seen.available, seen.total
    return free / MIB, total / MIB


def prepare(key: Key, device: str) -> Work:
    """The work of any key. Raises NotPresentError, UnsupportedError or MemoryError before anything is allocated."""
    if key.implementation != NSA:
        baseline = find(key.implementation)
        baseline.require(device)
        baseline.require_served(key)
    require_room(key, device)
    if key.mode in ("train-step", "train-loop"):
        return (train_step if key.mode == "train-step" else train_loop).prepare(key, device)
    return (parts if key.mode in parts.PARTS else attention).prepare(key, device)

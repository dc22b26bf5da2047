"""The kernels that profiles and shapes need on a GPU, found without it: `nsa.triton_backend.ahead_of_time`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa.train.data import packing
from nsa.triton_backend.ahead_of_time import Launch, recorded
from nsa.warm.precompile import distinct
from nsa.workload import Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the names that `runtime.precision` of a profile has."""


def of_profile(name: str) -> Workload:
    """The training of a profile of `nsa.train`, by its name or its .yaml file; its validation needs the same kernels.

    Raises `nsa.train.profile.ProfileError`, and ValueError for a profile of the dense twin.
    """
    from nsa.train.profile import load  # it reads YAML, which nothing else here needs

    settings = load(name)
    model, rows = settings.model, settings.train
    if model.attention != "nsa":
        raise ValueError(f"--profile {name}: model.attention must be nsa; got {model.attention!r}")
    documents = -(-rows.batch_size // packing.BOUNDS) * packing.BOUNDS if settings.data.packing else None
    heads, dtype = (model.n_heads, model.num_kv_heads, model.d_k, model.d_v), DTYPES[settings.runtime.precision]
    return Workload("train", rows.batch_size, rows.seq_len, *heads, model.nsa, dtype, model.shared_kv, documents)


def launches(workloads: Sequence[Workload], architecture: int, sms: int | None = None) -> list[Launch]:
    """The kernels that these need on a GPU of compute capability 80, 86, ..., each once.

    `sms`: its multiprocessors, by `ahead_of_time.SMS` unless given.
    """
    found: list[Launch] = []
    for workload in workloads:
        with recorded(architecture, sms) as own:
            workload.call()
        found += own
    return distinct(found)

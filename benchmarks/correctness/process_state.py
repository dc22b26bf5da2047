"""Settings of the process that change figures, which the code that is measured must leave as they are.

PyTorch keeps its precision, its threads and its defaults in global state; the libraries below it read environment
variables when they are first used. Any of them, set by one implementation, slows or speeds up every other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.correctness.verify import IncorrectError

VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT",
    "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NO_CUDA_MEMORY_CACHING", "OMP_WAIT_POLICY", "LD_PRELOAD",
)  # fmt: skip
"""Environment variables that change figures; whoever starts a run may set them, code in it may not."""
_STARTED_WITH = Path("/proc/self/environ")
FULL_PRECISION: Mapping[str, object] = {
    "torch.get_float32_matmul_precision()": "highest",
    "torch.backends.cuda.matmul.allow_tf32": False,
    "torch.get_default_dtype()": torch.float32,
}
"""What a float32 figure stands for."""


_TURNS_TF32_ON = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""With "1" PyTorch starts with TF32 on."""
_TF32 = frozenset({"torch.get_float32_matmul_precision()", "torch.backends.cuda.matmul.allow_tf32"})


def read() -> dict[str, object]:
    """Every setting by its name."""
    backends = torch.backends.cuda
    return {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cuda.matmul.allow_tf32": backends.matmul.allow_tf32,
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            backends.matmul.allow_bf16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            backends.matmul.allow_fp16_reduced_precision_reduction
        ),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_autocast_enabled()": torch.is_autocast_enabled(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.backends.cuda.flash_sdp_enabled()": backends.flash_sdp_enabled(),
        "torch.backends.cuda.mem_efficient_sdp_enabled()": backends.mem_efficient_sdp_enabled(),
        "torch.backends.cuda.math_sdp_enabled()": backends.math_sdp_enabled(),
        "torch.backends.cuda.cudnn_sdp_enabled()": backends.cudnn_sdp_enabled(),
        **{name: os.environ.get(name) for name in VARIABLES},
    }


def require_unchanged(before: Mapping[str, object]) -> None:
    """Raises IncorrectError naming the settings that are not as they were, or not those of full precision."""
    now, started_with = read(), _started_with()
    wanted = {**before, **FULL_PRECISION, **started_with}
    names = [name for name in now if now[name] != wanted[name]]
    if names and _TF32.issuperset(names) and started_with.get(_TURNS_TF32_ON) == "1":
        raise IncorrectError(
            f"the environment has {_TURNS_TF32_ON}=1, which turns TF32 on: a float32 figure stands for full precision;"
            " unset it and run again"
        )
    changed = [f"{name} from {wanted[name]} to {now[name]}" for name in names]
    if changed:
        raise IncorrectError(f"the code that is measured has set {', '.join(changed)}: figures depend on it")


def _started_with() -> dict[str, str | None]:
    """The variables as the process was started with them; none where the system does not tell."""
    if not _STARTED_WITH.exists():
        return {}
    pairs = (word.partition("=") for word in os.fsdecode(_STARTED_WITH.read_bytes()).split("\0"))
    told = {name: value for name, _, value in pairs}
    return {name: told.get(name) for name in VARIABLES}

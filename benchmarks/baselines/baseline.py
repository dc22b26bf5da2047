"""What a baseline is, and how it says that it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import Key
from benchmarks.correctness.verify import IncorrectError
from nsa import NSAConfig


class UnsupportedError(Exception):
    """The baseline refuses this case; the message is its own reason."""


class NotPresentError(Exception):
    """The baseline is not on this machine; the message says what to install."""


@contextmanager
def package_refusals(name: str) -> Iterator[None]:
    """Turn a package's own checks into UnsupportedError; anything else, an error of CUDA say, stays what it is."""
    try:
        yield
    except (UnsupportedError, NotPresentError):
        raise
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{name}: {_one_line(error)}") from error
    except RuntimeError as error:
        if "support" not in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnsupportedError(f"{name}: {_one_line(error)}") from error


def there(_device: str) -> str | None:
    """Why it is not on this machine: it is a part of what is installed, on every device."""
    return None


def serves_all(_key: Key) -> str | None:
    """Why it does not serve a case: it serves every one."""
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class Baseline:
    """One implementation to compare with."""

    name: str
    """In keys and in machines.toml."""
    attend: Callable[[Problem], Tensor]
    """Causal attention of the last S of T tokens: [B, S, Hq, Dv]; its own errors where it refuses."""
    absent: Callable[[str], str | None] = there
    """Why it is not on this machine, for a device type, read after its name: "is not installed (...)"; or None."""
    refusals: Callable[[str], AbstractContextManager[None]] = package_refusals
    """Names the baseline's own refusals, given its name."""
    config: NSAConfig | None = None
    """Settings of another NSA, which has `block_indices` too; None for causal dense attention."""
    block_indices: Callable[[Problem], Tensor] | None = None
    """What that NSA selects: int32 [B, S, Hkv, n], ascending, padded with -1; None for dense attention."""

    kernels: tuple[str, ...] = ()
    """Operators of PyTorch's, of which a call runs one; () where it is not PyTorch that runs it, or not one of them."""
    not_served: Callable[[Key], str | None] = serves_all
    """Why it does not serve a case, where what it computes differs from what is asked; None where it serves it."""

    def require(self, device: str) -> None:
        """Raises NotPresentError with the reason."""
        if reason := self.absent(device):
            raise NotPresentError(f"{self.name} {reason}")

    def require_served(self, key: Key) -> None:
        """Raises UnsupportedError with the reason."""
        if reason := self.not_served(key):
            raise UnsupportedError(f"{self.name}: {reason}")


def require_kernel(baseline: Baseline, problem: Problem) -> None:
    """Raises IncorrectError where a call runs none of the operators that the baseline is named after."""
    if not baseline.kernels:
        return
    with torch.no_grad(), _Operators() as ran:
        baseline.attend(problem)
    if not set(baseline.kernels) & set(ran.names):
        raise IncorrectError(
            f"{baseline.name} ran {', '.join(ran.names)} and none of {', '.join(baseline.kernels)}: another kernel"
            " stands under its name"
        )


class _Operators(TorchDispatchMode):
    """Notes the operators that run, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function.overloadpacket).removeprefix("aten.")
        if name not in self.names:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def needs_cuda(device: str) -> str | None:
    """Why kernels for CUDA are not there."""
    return None if device == "cuda" else "exists on CUDA devices only"


def not_installed(error: Exception, package: str) -> str:
    """Why a package is not there, and how to get it."""
    return f"is not installed ({error}): python3 -m pip install {package}"

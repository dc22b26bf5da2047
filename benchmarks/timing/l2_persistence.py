"""Whether a program has set more of the GPU's L2 aside, in which lines outlive a flush: no call is cold then.

`cudaLimitPersistingL2CacheSize` reserves the part; the access windows of streams and graphs keep lines there. A driver
may set some aside by itself (11.25 MiB on an H200), where nothing is kept unless it is asked for. The limit is read
from the driver, past PyTorch.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from benchmarks.correctness.verify import IncorrectError

_LIMIT = 0x06  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE in cuda.h
_DRIVER = "libcuda.so.1"


def persisting_bytes() -> int | None:
    """Bytes of L2 that are set aside in the current context; None where the driver does not tell."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    value = ctypes.c_size_t()
    return None if driver.cuCtxGetLimit(ctypes.byref(value), _LIMIT) else int(value.value)


@cache
def bytes_at_first() -> int | None:
    """What was set aside when this was first asked: before the code that is measured has run."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the limit is a context's
    return persisting_bytes()


def require_unchanged() -> None:
    """Raises IncorrectError where another part of L2 is set aside than at first."""
    first, found = bytes_at_first(), persisting_bytes()
    if found != first:
        raise IncorrectError(
            f"{found} bytes of L2 are set aside for persisting lines (cudaLimitPersistingL2CacheSize) where it were"
            f" {first} at first, and a flush leaves these: the call was not cold"
        )

"""Whether a program has set a part of the GPU's L2 aside, in which lines outlive a flush: no call is cold then.

`cudaLimitPersistingL2CacheSize` reserves the part; without one, the access windows of streams and graphs have no
effect. The limit is read from the driver itself, past PyTorch.
"""

from __future__ import annotations

import ctypes

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


def require_none() -> None:
    """Raises IncorrectError where a part of L2 is set aside."""
    if found := persisting_bytes():
        raise IncorrectError(
            f"{found} bytes of L2 are set aside for persisting lines (cudaLimitPersistingL2CacheSize), which a flush"
            " leaves there: the call was not cold"
        )

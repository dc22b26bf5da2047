"""Kernels again with Hopper's own instructions, in Gluon: TMA brings tiles while others are multiplied.

The kernels of the folder above say what is computed; nothing but how differs here. Which calls come here:
`dispatch.py`. Gluon is an experiment of Triton's: only versions that were tried serve.
"""

from __future__ import annotations

import triton

TRIED = ("3.6.", "3.7.")
"""Versions of Triton."""
CHANNELS = 128
"""Channels of a value, and of the first tile of a key, at most: tiles have widths that are powers of two."""
CHANNELS_OF_KEYS = (64, 128, 192)
AVAILABLE = triton.__version__.startswith(TRIED)
if AVAILABLE:
    from nsa.triton_backend.hopper import (  # noqa: F401 - for the callers
        compressed_window,
        decode,
        keys_and_values,
        scores,
        selected,
        selected_keys_and_values,
        selected_kv_major,
        shared_blocks,
        shared_blocks_dq,
    )

"""Native Sparse Attention (arXiv 2502.11089), right first and measured."""

from nsa import reference
from nsa.attention import (
    Aux,
    combine,
    compress,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.cache import KVCache
from nsa.config import NSAConfig
from nsa.layer import NativeSparseAttention
from nsa.paged.allocator import OutOfPagesError
from nsa.paged.cache import PagedCache
from nsa.tuner import tune
from nsa.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "Aux",
    "KVCache",
    "NSAConfig",
    "NativeSparseAttention",
    "OutOfPagesError",
    "PagedCache",
    "Workload",
    "combine",
    "compress",
    "compressed_attention",
    "nsa_attention",
    "reference",
    "select_blocks",
    "selected_attention",
    "tune",
    "window_attention",
]

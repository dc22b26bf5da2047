"""Context parallelism: one sequence over several ranks, each with its own tokens. See docs/parallel.md."""

from nsa.parallel.attention import context_parallel, context_parallel_attention
from nsa.parallel.context import ContextParallel
from nsa.parallel.order import TokenOrder, deal_documents, from_indices, head_tail

__all__ = [
    "ContextParallel",
    "TokenOrder",
    "context_parallel",
    "context_parallel_attention",
    "deal_documents",
    "from_indices",
    "head_tail",
]

"""The `native-sparse-attention-pytorch` package (version 0.2.3 was read), whose NSA is another function than ours.

It is listed so that a run says why there is no figure of it, rather than nothing.
"""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from benchmarks.baselines.baseline import Baseline, UnsupportedError, not_installed
from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import Key

NAME = "lucidrains-nsa"
DIFFERENCES = (
    "it takes hidden states, and projects and rotates them itself, where q, k and v are given here; learned memory"
    " keys stand before the compressed ones; the query's own block is added to the chosen ones, and no first block is"
    " forced"
)


def attend(_problem: Problem) -> Tensor:
    """Refuses every case with the differences."""
    raise UnsupportedError(f"{NAME}: {DIFFERENCES}")


def absent(_device: str) -> str | None:
    """Why it is not on this machine."""
    try:
        import_module("native_sparse_attention_pytorch")
    except ImportError as error:
        return not_installed(error, "native-sparse-attention-pytorch")
    return None


def not_served(_key: Key) -> str:
    """In what it differs: no setting of it computes what is asked of NSA."""
    return DIFFERENCES


BASELINES = [Baseline(NAME, attend, absent, not_served=not_served)]

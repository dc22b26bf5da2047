"""The work of a call and its memory grow with S, not with S²; the host waits for nothing and loops over no tokens."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa import NSAConfig
from regression.detectors.host_cost import no_waiting
from tests.laws.cases import Case
from tests.laws.parts import BRANCHES_AND_ALL, Parts

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")
"""Operators whose result the host must read, or whose size the data decides."""
LENGTHS = (512, 2048)
GROWING = Case(config=NSAConfig(l=32, d=16, l_sel=64, n_sel=4, w=64), num_kv_heads=1, group=2, dk=16, dv=16)


@dataclass
class _Recorder(TorchDispatchMode):
    """Counts operators, notes those that wait, and the size of the largest tensor made."""

    num_ops: int = 0
    largest: int = 0
    waits: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.num_ops += 1
        indexed_by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(a, Tensor) and a.dtype == torch.bool for a in tree_leaves(args[1])
        )
        if indexed_by_mask or name in WAITS or name.startswith("unique"):
            self.waits.append(name)
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return made


def _recorded(parts: Parts, case: Case, branch: str) -> _Recorder:
    x = case.inputs(parts.device)
    upstream = torch.ones(1, case.queries, case.group, case.dv, device=parts.device)
    recorder = _Recorder()
    with recorder:
        parts.gradients(case, x, branch, upstream)
    return recorder


def host_waits_for_nothing(parts: Parts, branch: str) -> None:
    """No operator whose result the host must read, packed or not."""
    for case in (_long(512), replace(_long(512), documents=(200, 0, 1, 311))):
        assert _recorded(parts, case, branch).waits == []


def grows_with_length(parts: Parts, branch: str, lengths: tuple[int, int] = LENGTHS) -> None:
    """From 512 to 2048 tokens: about one more operator per token and branch at most, and no tensor that grows with S².

    Forward and backward are counted together. A loop over tokens, as in the reference, takes 80 to 170 per token.
    """
    short, long = (_recorded(parts, _long(tokens), branch) for tokens in lengths)
    ops_per_token = (long.num_ops - short.num_ops) / (lengths[1] - lengths[0])
    assert ops_per_token < (3 if branch == "all" else 1)
    assert long.largest <= 1.25 * lengths[1] / lengths[0] * short.largest


def _long(tokens: int) -> Case:
    return replace(GROWING, queries=tokens, keys=tokens)


@pytest.fixture(params=[host_waits_for_nothing, grows_with_length], ids=lambda check: check.__name__)
def growth_law(request: pytest.FixtureRequest) -> Callable[[Parts, str], None]:
    law: Callable[[Parts, str], None] = request.param
    return law


@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
def test_growth(growth_law: Callable[[Parts, str], None], branch: str) -> None:
    """On the CPU, where every operator can be watched; kernels have the same laws on a GPU."""
    growth_law(Parts("torch", torch.device("cpu")), branch)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
def test_gpu_is_never_waited_for(backend: str, branch: str) -> None:
    """CUDA raises on any synchronisation while the call runs, forward and backward, packed or not."""
    parts = Parts(backend, torch.device("cuda"))
    for case in (_long(1024), replace(_long(1024), documents=(700, 0, 1, 323))):
        x = case.inputs(parts.device)
        upstream = torch.ones(1, case.queries, case.group, case.dv, device=parts.device)
        parts.gradients(case, x, branch, upstream)  # compiles, which may wait
        with no_waiting():
            parts.gradients(case, x, branch, upstream)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
def test_peak_memory_grows_with_length(backend: str, branch: str) -> None:
    """Four times the tokens take at most about four times the memory, forward and backward."""
    parts, peaks = Parts(backend, torch.device("cuda")), []
    for tokens in (4096, 16384):
        case = _long(tokens)
        x = case.inputs(parts.device)
        upstream = torch.ones(1, case.queries, case.group, case.dv, device=parts.device)
        # the greater of two: what other tests have left may be freed during the first, which then seems to need less
        call = functools.partial(parts.gradients, case, x, branch, upstream)
        peaks.append(max(_peak_bytes(call) for _ in range(2)))
    assert peaks[1] <= 1.25 * 4 * peaks[0]


def _peak_bytes(call: Callable[[], object]) -> int:
    """Peak GPU memory of a call, beyond what was in use before it."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before

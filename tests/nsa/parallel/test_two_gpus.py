"""The same laws with the kernels over NCCL, on two GPUs: what they give beside one GPU, and the same faults found."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch

from nsa import NSAConfig
from tests.nsa.parallel import cases, faults, laws, rank_work
from tests.nsa.parallel.cases import Case, Result, on_rank, one_device
from tests.nsa.parallel.pool import Pool

RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < RANKS, reason="needs two GPUs of one host"
    ),
]
ON_GPU = Case(
    8192, heads=8, dk=64, dv=64, config=NSAConfig(), dtype=torch.bfloat16, backend="triton", device="cuda"
)  # fmt: skip
CASES = {
    "head-tail": dataclasses.replace(ON_GPU, dv=32),
    "two sequences, six heads in a group": dataclasses.replace(ON_GPU, batch=2, heads=12, seed=1),
    "sixteen heads in a group": dataclasses.replace(ON_GPU, heads=32, dk=128, dv=128, seed=2),
    "the paper's heads": dataclasses.replace(ON_GPU, heads=16, num_kv_heads=1, dk=192, dv=128, seed=3),
    "documents": dataclasses.replace(
        ON_GPU, tokens=7000, heads=32, dk=128, dv=128, cu_seqlens=(0, 0, 1, 300, 301, 3500, 7000), seed=4
    ),
    "uneven": dataclasses.replace(ON_GPU, tokens=8601, heads=2, separate=False, seed=5),
    "float32": dataclasses.replace(ON_GPU, tokens=8448, heads=4, dtype=torch.float32, seed=6),
    "fewer tokens than a block": dataclasses.replace(ON_GPU, tokens=7, seed=7),
}
"""So long that each of the four pieces takes the kernels that the whole sequence takes (`dispatch`); none is padded
where pieces are whole steps of 128 queries. Tiles of documents are short, and with 16 heads in a group that does not
matter."""


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A process for each of two GPUs."""
    started = Pool(tmp_path_factory.mktemp("ranks"), "cuda", RANKS)
    yield started
    started.close()


@functools.cache
def _one(name: str) -> Result:
    return one_device(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_as_one_gpu(gpus: Pool, name: str) -> None:
    case = CASES[name]
    got = cases.joined(case, case.dealt(RANKS), gpus.run(RANKS, on_rank, case))
    assert not laws.wrong(case, got, _one(name))


@pytest.mark.parametrize("name", ["head-tail", "documents"])
def test_gradients_repeat_bit_for_bit(gpus: Pool, name: str) -> None:
    assert all(gpus.run(RANKS, rank_work.twice, CASES[name]))


def test_nothing_is_left_unwritten(gpus: Pool) -> None:
    case = CASES["documents"]
    parts = gpus.run(RANKS, rank_work.poisoned, case)
    assert not laws.wrong(case, cases.joined(case, case.dealt(RANKS), parts), _one("documents"))


@pytest.mark.parametrize("cut", [1, 4097, 5600])
def test_no_rank_sees_what_comes_later(gpus: Pool, cut: int) -> None:
    """NaN in every later key and value; they do reach the rows behind them."""
    assert gpus.run(RANKS, rank_work.later_changed, CASES["head-tail"], cut) == [(True, True)] * RANKS


@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_laws_find(gpus: Pool, name: str) -> None:
    case = CASES["head-tail"]
    parts = gpus.run(RANKS, rank_work.faulty, name, case)
    found = laws.wrong(case, cases.joined(case, case.dealt(RANKS), parts), _one("head-tail"))
    assert faults.FAULTS[name][1] in found

"""A model of more GPUs gives back what it was made from, grows as its terms say, and says what it lacks."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.cases.key import CONTEXT_PARALLEL
from benchmarks.history.records import Record, SharedSequence
from benchmarks.parallel import model
from benchmarks.parallel.model import Model
from nsa import NSAConfig
from nsa.parallel import head_tail
from tests.benchmarks.synthetic import key, passed

QUADRATIC_MS, LINEAR_MS, EXPOSED_MS, GB, GB_PER_S = 2e-9, 5e-4, 4.0, 1.0, 200.0
CONFIG = NSAConfig()
K = 1024


def alone_ms(tokens: int) -> float:
    return QUADRATIC_MS * tokens**2 + LINEAR_MS * tokens


def measured(tokens: int, ranks: int, *, slower: float = 1.05, alone: bool = True) -> Record:
    """A record as it would be if a rank took `slower` times its part of the work, and then waited."""
    imbalance = head_tail(tokens, ranks).imbalance(CONFIG)
    own_ms = (QUADRATIC_MS * tokens**2 * (1 + imbalance) + LINEAR_MS * tokens) / ranks
    case = key(CONTEXT_PARALLEL, length=tokens, ranks=ranks, config=dataclasses.asdict(CONFIG))
    received_gb = GB * tokens / (128 * K) * (ranks - 1) / ranks
    shared = SharedSequence(alone_ms(tokens) if alone else None, EXPOSED_MS, received_gb, imbalance, GB_PER_S, tokens)
    record = passed(case, own_ms * slower + EXPOSED_MS, machine="h200")
    return dataclasses.replace(record, shared=shared)


def test_what_it_is_from_comes_back() -> None:
    records = [measured(128 * K, 2), measured(256 * K, 2)]
    found = model.fit(records, {})
    assert isinstance(found, Model)
    assert found.basis == records[1]
    assert (found.quadratic_ms, found.linear_ms) == pytest.approx((QUADRATIC_MS, LINEAR_MS))
    at = found.at(2, 256 * K)
    assert at.latency_ms == pytest.approx(records[1].latency_ms)
    assert at.share_of_ideal == pytest.approx(records[1].share_of_ideal)
    assert at.exposed_share == pytest.approx(records[1].exposed_share)


def test_eight_gpus_and_a_million_tokens() -> None:
    """Bytes grow with T (P - 1) / P and the waiting with them, the computation as one GPU's over P."""
    found = model.fit([measured(128 * K, 2), measured(256 * K, 2)], {})
    assert isinstance(found, Model)
    at, tokens = found.at(8, 1024 * K), 1024 * K
    assert at.received_gb == pytest.approx(GB * 8 * 7 / 8)
    assert at.exposed_ms == pytest.approx(EXPOSED_MS * 4 * (7 / 8) / (1 / 2))
    assert at.latency_ms == pytest.approx(1.05 * alone_ms(tokens) / 8 + at.exposed_ms, rel=1e-4)
    assert at.one_rank_ms == pytest.approx(alone_ms(tokens))


def test_of_one_gpu_s_times_at_a_length_the_fastest_counts() -> None:
    """Records of two and of four ranks have one each; which of them comes first means nothing."""
    of_four = measured(128 * K, 4)
    assert of_four.shared is not None
    slow = dataclasses.replace(of_four, shared=dataclasses.replace(of_four.shared, one_rank_ms=2 * alone_ms(128 * K)))
    records = [measured(128 * K, 2), slow, measured(256 * K, 2)]
    for several in (records, records[::-1]):
        found = model.fit(several, {})
        assert isinstance(found, Model)
        assert (found.quadratic_ms, found.linear_ms) == pytest.approx((QUADRATIC_MS, LINEAR_MS))


def test_imbalance_is_work_that_takes_time() -> None:
    """512 tokens over 8 ranks: the most loaded one sees 1.4 % more compressed keys than the mean."""
    found = model.fit([measured(128 * K, 2), measured(256 * K, 2)], {})
    assert isinstance(found, Model)
    few = dataclasses.replace(found, linear_ms=0.0)
    imbalance = head_tail(512, 8).imbalance(CONFIG)
    assert imbalance > 0.01
    at = few.at(8, 512)
    assert at.latency_ms - at.exposed_ms == pytest.approx(1.05 * (1 + imbalance) * at.one_rank_ms / 8)


def test_what_is_missing_is_said() -> None:
    assert model.fit([], {128 * K: 1.0}) == "a record of several GPUs beside one of them"
    assert model.fit([measured(256 * K, 2, alone=False)], {}) == "a record of several GPUs beside one of them"
    assert model.fit([measured(256 * K, 2)], {}) == "the time of one GPU at a second length"
    found = model.fit([measured(256 * K, 2)], {64 * K: alone_ms(64 * K)})
    assert isinstance(found, Model)
    assert found.linear_ms == pytest.approx(LINEAR_MS)


def test_no_term_is_negative() -> None:
    records = [dataclasses.replace(measured(128 * K, 2), latency_ms=30.0), measured(256 * K, 2)]
    falling = {64 * K: 1000.0}
    found = model.fit(records[1:], falling)
    assert isinstance(found, Model)
    assert found.quadratic_ms == 0.0
    assert found.linear_ms > 0

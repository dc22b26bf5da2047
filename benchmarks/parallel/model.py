"""What more ranks and longer sequences would take: a model from records of few ranks, never a record itself.

One GPU takes a·T² + b·T: compressed attention and the choice grow with the square of the length, the rest with it. A
rank of P has the P-th part, of the first term more by its imbalance; how much longer it computes than that is taken
from the longest record of several ranks. The bytes that arrive grow with T·(P - 1)/P; they come at the measured rate
of a gather, and the part of that time that is waited for is that of the same record. Not in the model: another rate at
another P, several hosts, and kernels that get faster or slower at lengths beyond those that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases.key import Key
from benchmarks.history.records import Record, SharedSequence
from nsa import NSAConfig
from nsa.parallel import head_tail


@dataclass(frozen=True)
class ModelledTime:
    """Forward and backward of one sequence, modelled and not measured."""

    ranks: int
    tokens: int
    latency_ms: float
    one_rank_ms: float
    exposed_ms: float
    received_gb: float

    @property
    def share_of_ideal(self) -> float:
        """One rank's time over the number of ranks, over their time."""
        return self.one_rank_ms / self.ranks / self.latency_ms

    @property
    def exposed_share(self) -> float:
        """The part of the time that is waited for communication."""
        return self.exposed_ms / self.latency_ms


@dataclass(frozen=True)
class Model:
    """The terms, and what they are from."""

    basis: Record
    """The longest record of several ranks that one rank was timed beside."""
    quadratic_ms: float
    """Per token squared."""
    linear_ms: float
    """Per token."""
    slower: float
    """What a rank of the basis computes over what the two terms give it."""
    exposed: float
    """Of the time that the bytes of the basis take at the rate of a gather, the part that is waited for; above 1 where
    they come slower beside the computation."""

    def at(self, ranks: int, tokens: int) -> ModelledTime:
        """The time of so many ranks in head-tail order."""
        shared = _shared(self.basis)
        whole = self.quadratic_ms * tokens**2 + self.linear_ms * tokens
        received_gb = shared.received_gb * _arriving(ranks, tokens) / _arriving(self.basis.key.ranks, self.tokens)
        exposed_ms = self.exposed * received_gb / shared.gather_gb_per_s * 1e3
        latency_ms = self.slower * self._of_rank(ranks, tokens) + exposed_ms
        return ModelledTime(ranks, tokens, latency_ms, whole, exposed_ms, received_gb)

    @property
    def tokens(self) -> int:
        """Of the basis."""
        return self.basis.key.num_keys

    def _of_rank(self, ranks: int, tokens: int) -> float:
        """ms that the most loaded rank computes by the two terms."""
        config = NSAConfig.from_mapping(self.basis.key.config or {})
        imbalance = head_tail(tokens, ranks).imbalance(config)
        return (self.quadratic_ms * tokens**2 * (1 + imbalance) + self.linear_ms * tokens) / ranks


def fit(records: Sequence[Record], alone_ms: Mapping[int, float]) -> Model | str:
    """The model of one machine and shape, or what is missing for it.

    Args:
        records: of several ranks, of one machine and of keys that differ in length and ranks alone.
        alone_ms: one rank's time by length, from records of one GPU; those of `records` come before them, and of these
            the fastest.
    """
    several = [one for one in records if one.shared is not None and one.shared.one_rank_ms and one.latency_ms]
    if not several:
        return "a record of several GPUs beside one of them"
    basis = max(several, key=lambda one: (one.key.num_keys, one.key.ranks, one.fingerprint.utc))
    beside: dict[int, float] = {}  # the fastest of each length: records of other numbers of ranks have others
    for one in several:
        one_rank_ms = _shared(one).one_rank_ms or 0.0
        beside[one.key.num_keys] = min(one_rank_ms, beside.get(one.key.num_keys, one_rank_ms))
    times = {**alone_ms, **beside}
    if len(times) < 2:
        return "the time of one GPU at a second length"
    quadratic_ms, linear_ms = _two_terms(times)
    model = Model(basis, quadratic_ms, linear_ms, 1.0, 1.0)
    shared = _shared(basis)
    own_ms = model._of_rank(basis.key.ranks, basis.key.num_keys)
    travel_ms = shared.received_gb / shared.gather_gb_per_s * 1e3
    slower = ((basis.latency_ms or 0.0) - shared.exposed_ms) / own_ms
    return Model(basis, quadratic_ms, linear_ms, slower, shared.exposed_ms / travel_ms)


def shape(key: Key) -> str:
    """What records of one model share beside machine: heads, type and inputs."""
    return f"{key.what} {key.dtype} {key.inputs}"


def _shared(one: Record) -> SharedSequence:
    assert one.shared is not None
    return one.shared


def _arriving(ranks: int, tokens: int) -> float:
    """What the bytes that arrive at a rank grow with."""
    return tokens * (ranks - 1) / ranks


def _two_terms(times: Mapping[int, float]) -> tuple[float, float]:
    """a and b of a·T² + b·T by least squares of relative errors; neither is negative."""
    rows = [(tokens**2 / ms, tokens / ms) for tokens, ms in times.items()]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = xx * yy - xy**2
    a, b = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if a < 0:
        return 0.0, y / yy
    return (a, b) if b >= 0 else (x / xx, 0.0)

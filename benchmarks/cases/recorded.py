"""Queries and keys whose selection follows what was recorded of a trained model.

A query's first channels are its topic: the sum of walks with time scales from one token to thousands, and of a part
that never changes. The keys of a selection block share one random topic; a key attracts a query by the product of both.
Neighbouring queries have nearly the same topic, and so choose many of the same blocks: how many at which distance is
how the topic's variance is divided among the time scales. Some queries have a topic of their own, and share little with
any other. Topics of keys that take part in the queries' slow walks make near blocks likelier; topics of unequal length
make some blocks more popular than others. The other channels are noise of each head and token, which the mean over a
compression block nearly removes.

The parameters are fitted to recorded curves (`benchmarks.selection.fit`) and stand in tables/recorded.json. Nothing
here knows which blocks are chosen: that is NSA's own selection from q and the compressed k.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from harness import schema

KINDS = ("recorded", "recorded-p10", "recorded-p90")
"""The median over the heads of a model, and those whose neighbouring queries choose least and most alike."""
TABLE = Path(__file__).parent / "tables" / "recorded.json"
TIME_SCALES = (1, 3, 16, 64, 512, 4096)
"""Tokens over which a walk forgets where it was; the topic has a constant part besides."""
BLOCK = 64
"""Tokens whose keys share a topic: a selection block of the paper's settings, which the tables are fitted for."""
DECODE_STEPS = 8
"""Consecutive decode steps that queries are there for."""
_LONG = 64
"""Walks of at least this time scale are those that keys take part in."""
_TOPIC_CHANNELS = 32


@dataclass(frozen=True)
class Law:
    """Parameters of the topics for sequences of about one length."""

    num_keys: int
    """The length that they are fitted at, in tokens."""
    weights: tuple[float, ...]
    """Share of a query topic's variance in each of TIME_SCALES, then the constant share; they add up to 1."""
    followed: tuple[float, ...]
    """Share of a key topic's variance that is the queries' walk, for each of TIME_SCALES from `_LONG` on."""
    spread: float
    """Standard deviation of the logarithm of a key topic's length."""
    apart: float
    """Share of the queries whose topic is their own alone."""
    target: str
    """Which recorded curves it follows, and where they are from."""

    @property
    def digest(self) -> str:
        """Eight characters that tell its parameters from any others: another fit to the same curves has other ones."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:8]

    def __post_init__(self) -> None:
        if len(self.weights) != len(TIME_SCALES) + 1 or min(self.weights) < 0 or abs(sum(self.weights) - 1) > 1e-3:
            raise ValueError(f"weights must be {len(TIME_SCALES) + 1} shares that add up to 1; got {self.weights}")
        long = sum(scale >= _LONG for scale in TIME_SCALES)
        if len(self.followed) != long or min(self.followed) < 0 or sum(self.followed) > 1:
            raise ValueError(f"followed must be {long} shares, together at most 1; got {self.followed}")
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread must be finite and at least 0; got {self.spread}")
        if not 0 <= self.apart < 1:
            raise ValueError(f"apart must be at least 0 and below 1; got {self.apart}")


@dataclass(frozen=True)
class Table:
    """What tables/recorded.json holds."""

    atlas: str | None
    """The file of results/atlas that the laws are fitted to; None where it is the study's figures."""
    recorded: tuple[Law, ...]
    recorded_p10: tuple[Law, ...]
    recorded_p90: tuple[Law, ...]

    @property
    def laws(self) -> Mapping[str, tuple[Law, ...]]:
        """Of each kind, by ascending length."""
        return dict(zip(KINDS, (self.recorded, self.recorded_p10, self.recorded_p90), strict=True))


@cache
def table() -> Table:
    """The fitted laws, and what they are fitted to."""
    return schema.build(Table, json.loads(TABLE.read_bytes()), "recorded")


def law(kind: str, num_keys: int) -> Law:
    """The law fitted at the length that is nearest by its logarithm. KeyError for another kind."""
    return min(table().laws[kind], key=lambda one: abs(math.log(one.num_keys / num_keys)))


@dataclass(frozen=True)
class Sizes:
    """What the topics of one problem depend on."""

    batch: int
    num_queries: int
    num_keys: int
    num_kv_heads: int
    head_dim: int


class Topics:
    """The topics of one problem's queries and keys, float32, the same for every head of a group."""

    def __init__(self, law: Law, sizes: Sizes, generator: torch.Generator) -> None:
        self._law, self._sizes, self._device = law, sizes, generator.device
        self.channels = min(_TOPIC_CHANNELS, max(sizes.head_dim // 2, 1))
        self._first = first = sizes.num_keys - sizes.num_queries
        self._walks = [
            _Walk(scale, 0 if scale >= _LONG else first, sizes.num_keys + DECODE_STEPS - 1, self._normal(generator))
            for scale in TIME_SCALES
        ]
        self._constant = self._normal(generator)(1)
        rows = (sizes.batch, sizes.num_queries + DECODE_STEPS - 1, sizes.num_kv_heads, 1)
        self._apart = torch.rand(*rows, generator=generator, device=self._device) < law.apart
        blocks = -(-sizes.num_keys // BLOCK)
        length = torch.randn(sizes.batch, blocks, sizes.num_kv_heads, 1, generator=generator, device=self._device)
        self._own = self._normal(generator)(blocks) * (law.spread * length - law.spread**2).exp()

    def _normal(self, generator: torch.Generator) -> _Normal:
        shape = (self._sizes.batch, self._sizes.num_kv_heads, self.channels)
        return _Normal(shape, generator)

    def of_queries(self, tokens: Tensor) -> Tensor:
        """[B, S, Hkv, channels], each channel of variance 1: of the queries at these positions, int64 [S]."""
        topic = math.sqrt(self._law.weights[-1]) * self._constant
        topic = topic.repeat(1, tokens.numel(), 1, 1)
        for walk, weight in zip(self._walks, self._law.weights[:-1], strict=True):
            walk.add_to(topic, tokens, math.sqrt(weight))
        own = self._walks[0].at(tokens)
        return torch.where(self._apart[:, tokens - self._first], own, topic)

    def of_key_blocks(self) -> Tensor:
        """[B, blocks, Hkv, channels], each channel of variance 1: one topic for every `BLOCK` keys."""
        followed = self._law.followed
        topic = math.sqrt(1 - sum(followed)) * self._own
        centres = torch.arange(topic.shape[1], device=self._device) * BLOCK + BLOCK // 2
        for walk, share in zip(self._walks[-len(followed) :], followed, strict=True):
            walk.add_to(topic, centres.clamp(max=self._sizes.num_keys - 1), math.sqrt(share))
        return topic


@dataclass(frozen=True)
class _Normal:
    """Standard normal points [B, count, Hkv, channels]."""

    shape: Sequence[int]
    generator: torch.Generator

    def __call__(self, count: int) -> Tensor:
        batch, *rest = self.shape
        return torch.randn(batch, count, *rest, generator=self.generator, device=self.generator.device)


class _Walk:
    """Every `scale` tokens a new normal point, and between them arcs a·cos + b·sin, on which the variance stays 1."""

    def __init__(self, scale: int, first: int, end: int, normal: _Normal) -> None:
        self._scale, self._first = scale, first // scale
        self._points = normal((end - 1) // scale - self._first + 2)

    def at(self, tokens: Tensor) -> Tensor:
        """[B, tokens, Hkv, channels]: the newest point at these tokens."""
        return self._points[:, tokens // self._scale - self._first]

    def add_to(self, topic: Tensor, tokens: Tensor, factor: float) -> None:
        """topic [B, tokens, Hkv, channels] += factor · the walk at these tokens."""
        before = tokens // self._scale - self._first
        angle = (tokens % self._scale)[:, None, None] * (math.pi / 2 / self._scale)
        topic.addcmul_(self._points[:, before], angle.cos(), value=factor)
        topic.addcmul_(self._points[:, before + 1], angle.sin(), value=factor)


def put_topics(q: Tensor, k: Tensor, kind: str, sizes: Sizes, generator: torch.Generator, step: int = 0) -> None:
    """Give standard normal q [B, S, Hq, Dk] and k [B, T, Hkv, Dk], which are overwritten, the topics of a kind.

    `step`: of decode steps that follow one another on the same keys, below `DECODE_STEPS`. KeyError for another kind.
    """
    topics = Topics(law(kind, sizes.num_keys), sizes, generator)
    tokens = torch.arange(sizes.num_keys - sizes.num_queries, sizes.num_keys, device=generator.device)
    put_in(q, topics.of_queries(tokens + step))
    put_in(k, topics.of_key_blocks(), BLOCK)


def put_in(x: Tensor, topic: Tensor, tokens: int = 1) -> Tensor:
    """x [B, S, H, D], of variance 1, with a topic for every `tokens` of its tokens, [B, S / tokens, Hkv, channels], in
    the first channels of each head of the group, and the rest scaled so that it keeps its variance. x is overwritten.

    The product of two topics over sqrt(D) has variance 1, whatever D.
    """
    channels, head_dim = topic.shape[-1], x.shape[-1]
    variance = math.sqrt(head_dim / channels)
    if channels < head_dim:
        x[..., channels:] *= math.sqrt((head_dim - channels * variance) / (head_dim - channels))
    values = (math.sqrt(variance) * topic).to(x.dtype)[:, torch.arange(x.shape[1], device=x.device) // tokens]
    x.unflatten(2, (topic.shape[2], -1))[..., :channels] = values[:, :, :, None]
    return x

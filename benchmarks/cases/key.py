"""Which case a measurement is of. Records with equal keys measure the same thing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

NSA = "nsa"
"""The implementation's name in a key; any other is a baseline's."""
PART = "part-"
"""What the modes that time one part of the forward pass begin with."""
CACHES = ("warm", "cold")
LAUNCHES = ("eager", "graph", "compile", "reduce-overhead")
HOST = "host-"
"""What the modes that time the host alone begin with."""
CONTEXT_PARALLEL = "context-parallel"
"""Forward and backward of one sequence over several ranks (`benchmarks.parallel`)."""


@dataclass(frozen=True)
class Key:
    """Which case: records with equal keys measure the same thing."""

    mode: str
    """"prefill-forward", "prefill-forward-backward", "decode", "part-..." of the forward, "train-step",
    "train-loop", "first-step", "memory", "host-..." of the first two, or "context-parallel"."""
    implementation: str
    """"nsa", or the baseline by name ("sdpa-flash")."""
    backend_asked: str | None
    """Backend of NSA that was asked for; None for a baseline."""
    dtype: str
    """"float32", "bfloat16" or "float16"; of a train step the compute type, the weights being float32."""
    batch: int
    num_queries: int
    """Tokens computed per sequence: S, or 1 in decode."""
    num_keys: int
    """Tokens attended to per sequence: T."""
    heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    config: Mapping[str, Any] | None
    """NSA's settings, also those of another NSA; None for dense attention."""
    model: str | None = None
    """The decoder LM of a train step; None elsewhere."""
    inputs: str = "random"
    """How the inputs are drawn: "random" is standard normal, gates uniform; "recorded": what is selected follows curves
    recorded of a trained model, "recorded-p10" and "recorded-p90" its least and most alike heads; "replayed": the very
    blocks that it chose; "local" in earlier records: an invented walk, whose neighbours choose alike."""
    cache: str = "warm"
    """"cold": the GPU's L2 is flushed before each sample and the inputs rotate; "warm": neither."""
    launch: str = "eager"
    """"eager": every kernel is launched by the host; "graph": a captured CUDA graph is replayed; "compile" and
    "reduce-overhead": the modes of `torch.compile`, where a loop of one's own has it."""
    ranks: int = 1
    """GPUs, or processes on a CPU, that share each sequence."""
    documents: tuple[int, ...] | None = None
    """Tokens of each packed document; None for one document that is the whole sequence."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {"kv_heads": "num_kv_heads"}
    SIZES = ("batch", "num_queries", "num_keys", "heads", "num_kv_heads", "head_dim_k", "head_dim_v")

    def __post_init__(self) -> None:
        for name in (*self.SIZES, "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"key.{name} must be at least 1; got {getattr(self, name)}")
        for name, known in (("cache", CACHES), ("launch", LAUNCHES)):
            if getattr(self, name) not in known:
                raise ValueError(f"key.{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        if self.documents is not None and (sum(self.documents) != self.num_keys or min(self.documents) < 1):
            raise ValueError(f"key.documents must add up to the {self.num_keys} tokens; got {self.documents}")

    @property
    def what(self) -> str:
        """The model, or the heads: 64x4x128, or 64x4x192:128 where Dk and Dv differ."""
        dims = f"{self.head_dim_k}" if self.head_dim_k == self.head_dim_v else f"{self.head_dim_k}:{self.head_dim_v}"
        return self.model or f"{self.heads}x{self.num_kv_heads}x{dims}"

    @property
    def replays(self) -> bool:
        """Whether the call itself replays CUDA graphs, whose private pools then hold what it needs."""
        return (self.mode, self.launch) in (("train-step", "graph"), ("train-loop", "reduce-overhead"))

    @cached_property
    def identity(self) -> str:
        """Every field, as one word that tells any two keys apart."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def case(self) -> str:
        """What all implementations share: decode/8x2x64/b4/s16384/float32, then a word for each thing that is not
        usual: "q16" where a prefill continues or a decode takes 16 tokens, the kind of inputs ("recorded"), "cold",
        the launch where it is not eager, "p8" for 8 ranks, "docs-30-66x2" for documents of 30, 66 and 66 tokens."""
        usual = (("inputs", "random"), ("cache", "warm"), ("launch", "eager"))
        words = [f"/{getattr(self, name)}" for name, value in usual if getattr(self, name) != value]
        if self.num_queries != (1 if self.mode == "decode" else self.num_keys):
            words.insert(0, f"/q{self.num_queries}")
        if self.ranks != 1:
            words.append(f"/p{self.ranks}")
        if self.documents is not None:
            words.append(f"/{_documents_word(self.documents)}")
        return f"{self.mode}/{self.what}/b{self.batch}/s{self.num_keys}/{self.dtype}{''.join(words)}"

    @cached_property
    def case_of_whole(self) -> str | None:
        """Of a part of the forward pass: the case of the whole one, of the same shape, length and inputs; else None."""
        return dataclasses.replace(self, mode="prefill-forward").case if self.mode.startswith(PART) else None

    @property
    def name(self) -> str:
        """One readable word, what `--cases` matches: the case and the implementation."""
        return f"{self.case}/{self.implementation}"

    @classmethod
    def from_name(cls, name: str) -> Key:
        """The key of this name, without backend and config. ValueError where a name does not say all the rest."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"{name!r} is no name of a case that gives its heads: mode/heads/b1/s64/dtype/.../who")
        parts = found.groupdict()
        words = parts["words"].split("/")[1:]
        num_keys, head_dim_k = int(parts["num_keys"]), int(parts["head_dim_k"])
        usual_queries = 1 if parts["mode"] == "decode" else num_keys
        key = cls(
            mode=parts["mode"],
            implementation=parts["implementation"],
            backend_asked=None,
            dtype=parts["dtype"],
            num_queries=next((int(word[1:]) for word in words if _QUERIES.fullmatch(word)), usual_queries),
            batch=int(parts["batch"]),
            num_keys=num_keys,
            heads=int(parts["heads"]),
            num_kv_heads=int(parts["num_kv_heads"]),
            head_dim_k=head_dim_k,
            head_dim_v=int(parts["head_dim_v"] or head_dim_k),
            config=None,
            inputs=next((word for word in words if not (_SIZES.fullmatch(word) or word in _WORDS)), "random"),
            cache="cold" if "cold" in words else "warm",
            launch=next((word for word in words if word in LAUNCHES), "eager"),
            ranks=next((int(word[1:]) for word in words if _RANKS.fullmatch(word)), 1),
            documents=next((_documents(word) for word in words if _DOCUMENTS.fullmatch(word)), None),
        )
        if key.name != name:
            raise ValueError(f"{name!r} is no name of a case; its parts make {key.name!r}")
        return key


_NAME = re.compile(
    r"(?P<mode>[a-z-]+)/(?P<heads>\d+)x(?P<num_kv_heads>\d+)x(?P<head_dim_k>\d+)(:(?P<head_dim_v>\d+))?"
    r"/b(?P<batch>\d+)/s(?P<num_keys>\d+)/(?P<dtype>\w+)(?P<words>(/[\w-]+)*)/(?P<implementation>[\w-]+)",
    re.ASCII,
)
_QUERIES = re.compile(r"q\d+", re.ASCII)
_RANKS = re.compile(r"p\d+", re.ASCII)
_DOCUMENTS = re.compile(r"docs(-\d+(x\d+)?)+", re.ASCII)
_SIZES = re.compile("|".join(one.pattern for one in (_QUERIES, _RANKS, _DOCUMENTS)), re.ASCII)
"""Words that stand for numbers."""
_WORDS = ("cold", *LAUNCHES[1:])


def _documents_word(documents: tuple[int, ...]) -> str:
    """Their lengths, equal ones that follow one another once, with their number."""
    runs = [(length, len(list(same))) for length, same in itertools.groupby(documents)]
    return "-".join(["docs", *(f"{length}x{count}" if count > 1 else f"{length}" for length, count in runs)])


def _documents(word: str) -> tuple[int, ...]:
    """The lengths that a word names."""
    runs = [(length, int(count or 1)) for length, _, count in (one.partition("x") for one in word.split("-")[1:])]
    return tuple(int(length) for length, count in runs for _ in range(count))

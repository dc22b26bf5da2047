"""Which cases there are on a machine: the shapes of suites.toml, spelt out as keys."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.baselines import BASELINES
from benchmarks.cases import replayed
from benchmarks.cases.key import HOST, NSA, Key
from benchmarks.workloads.parts import PARTS, SELECTING
from benchmarks.workloads.train_step import MODELS
from harness import schema
from nsa import NSAConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RANDOM = "random"
PREFILLS = ("prefill-forward", "prefill-forward-backward")
HOSTED = tuple(HOST + mode for mode in PREFILLS)
MODES = (*PREFILLS, "decode", *PARTS, "train-step", "train-loop", *HOSTED, "first-step", "memory")
IN_CHILDREN = MODES[-2:]
"""What is measured in processes of its own, one for each figure."""
DEFAULT_MODES = MODES[:-1]
"""Memory takes a child process per case and a couple of minutes: it runs when `--cases` names it."""


@dataclass(frozen=True)
class AttentionShape:
    """Heads at several lengths, one sequence each."""

    heads: tuple[int, ...]
    """Hq, Hkv."""
    head_dims: tuple[int, ...]
    """Dk, Dv."""
    lengths: tuple[int, ...]
    """Tokens."""
    quick: tuple[int, ...]
    """Those of `--quick`."""
    inputs: tuple[str, ...] = (RANDOM,)
    """Of parts other inputs than random are for those that select (`parts.SELECTING`)."""
    cache: str | None = None
    """None is cold on a GPU, warm on the CPU."""
    baselines: tuple[str, ...] | None = None
    """None is the suite's own."""


@dataclass(frozen=True)
class DecodeShape:
    """Heads at several [sequences, tokens cached by each]."""

    heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    quick: tuple[tuple[int, ...], ...]
    launches: tuple[str, ...] = ("eager",)
    """Other inputs than random are measured with the last of them alone."""
    inputs: tuple[str, ...] = (RANDOM,)
    cache: str | None = None
    baselines: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Training:
    """A model at several [sequences, tokens each]."""

    model: str
    steps: tuple[tuple[int, ...], ...]
    quick: tuple[tuple[int, ...], ...]
    launches: tuple[str, ...] = ("eager",)
    baselines: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Suite:
    """What one kind of machine is measured with."""

    dtype: str
    baselines: tuple[str, ...]
    recorded_baselines: tuple[str, ...]
    """Those on other inputs than random, which dense attention takes the same time for."""
    prefill: tuple[AttentionShape, ...]
    decode: tuple[DecodeShape, ...]
    parts: tuple[AttentionShape, ...]
    train_step: tuple[Training, ...]
    train_loop: tuple[Training, ...] = ()
    """Steps in a loop of one's own."""
    host: tuple[AttentionShape, ...] = ()
    """Prefills of which the host's time is measured, until everything is launched."""
    first_step: tuple[Training, ...] = ()
    """Steps of which the first of a new process is measured."""
    memory: tuple[AttentionShape, ...] = ()


@cache
def _tables() -> Mapping[str, Any]:
    with Path(__file__).with_name("suites.toml").open("rb") as file:
        return tomllib.load(file)


def names() -> list[str]:
    """Every suite of suites.toml."""
    return list(_tables())


def table(name: str) -> Mapping[str, Any]:
    """The shapes of one suite, as written in suites.toml."""
    found: Mapping[str, Any] = _tables()[name]
    return found


def planned(table: Mapping[str, Any], *, quick: bool, backend: str, on_gpu: bool) -> list[Key]:
    """Every key of a suite as suites.toml has it. Raises TypeError or ValueError naming a field that is wrong.

    Of each case the baselines come first, then NSA, so that its line can show the ratios. What `not_offered` names is
    left out.
    """
    suite = schema.build(Suite, dict(table), "suite")
    cases: dict[str, dict[str, Key]] = {}
    for key, baselines in _cases(suite, quick, "cold" if on_gpu else "warm"):
        if key.inputs == replayed.KIND and replayed.why_not(key) is not None:
            continue
        own = suite.baselines if key.inputs == RANDOM else suite.recorded_baselines
        for name in own if baselines is None else baselines:
            if name not in BASELINES:
                raise ValueError(f"baselines must be of {', '.join(BASELINES)}; got {name!r}")
            cases.setdefault(key.case, {})[name] = _of_baseline(key, name)
        cases.setdefault(key.case, {})[NSA] = dataclasses.replace(key, backend_asked=backend)
    return [key for implementations in cases.values() for key in sorted(implementations.values(), key=_nsa_last)]


def not_offered(table: Mapping[str, Any], *, on_gpu: bool) -> dict[str, str]:
    """The cases of a suite that would replay recorded choices which are not stored, and why in words."""
    suite = schema.build(Suite, dict(table), "suite")
    replays = (key for key, _ in _cases(suite, False, "cold" if on_gpu else "warm") if key.inputs == replayed.KIND)
    return {key.case: reason for key in replays if (reason := replayed.why_not(key)) is not None}


def absent_once(keys: Sequence[Key], device: str) -> list[Key]:
    """The keys without those of a baseline that is not on this machine, but for its first, which says so."""
    said: set[str] = set()
    kept = []
    for key in keys:
        absent = key.implementation in BASELINES and BASELINES[key.implementation].absent(device) is not None
        if not absent or key.implementation not in said:
            kept.append(key)
        if absent:
            said.add(key.implementation)
    return kept


def _of_baseline(key: Key, name: str) -> Key:
    config = BASELINES[name].config
    return dataclasses.replace(key, implementation=name, config=None if config is None else dataclasses.asdict(config))


def _nsa_last(key: Key) -> bool:
    return key.implementation == NSA


def _cases(suite: Suite, quick: bool, cache: str) -> Iterator[tuple[Key, tuple[str, ...] | None]]:
    """Each case as NSA's key, and its baselines; None is the suite's own."""
    for mode in PREFILLS:
        yield from _of_lengths(mode, suite, suite.prefill, quick, cache)
    yield from _of_decode(suite, quick, cache)
    for mode in PARTS:
        found = _of_lengths(mode, suite, suite.parts, quick, cache)
        yield from ((key, ()) for key, _ in found if _is_for_part(mode, key.inputs))
    for mode, trainings in (
        ("train-step", suite.train_step),
        ("train-loop", suite.train_loop),
        ("first-step", suite.first_step),
    ):
        yield from _of_training(mode, suite, trainings, quick)
    for mode in HOSTED:
        yield from _of_lengths(mode, suite, suite.host, quick, "warm")
    yield from _of_lengths("memory", suite, suite.memory, quick, cache)


def _is_for_part(mode: str, kind: str) -> bool:
    return mode in replayed.MODES if kind == replayed.KIND else kind == RANDOM or mode in SELECTING


def _of_lengths(
    mode: str, suite: Suite, shapes: Sequence[AttentionShape], quick: bool, cache: str
) -> Iterator[tuple[Key, tuple[str, ...] | None]]:
    for shape in shapes:
        for tokens in shape.quick if quick else shape.lengths:
            key = _key(mode, suite, shape, 1, tokens, tokens)
            for kind in shape.inputs:
                yield dataclasses.replace(key, inputs=kind, cache=shape.cache or cache), shape.baselines


def _of_decode(suite: Suite, quick: bool, cache: str) -> Iterator[tuple[Key, tuple[str, ...] | None]]:
    for shape in suite.decode:
        for batch, tokens in shape.quick if quick else shape.steps:
            key = _key("decode", suite, shape, batch, 1, tokens)
            for kind in shape.inputs:
                for launch in shape.launches if kind == RANDOM else shape.launches[-1:]:
                    named = dataclasses.replace(key, inputs=kind, cache=shape.cache or cache, launch=launch)
                    yield named, shape.baselines


def _of_training(
    mode: str, suite: Suite, trainings: Sequence[Training], quick: bool
) -> Iterator[tuple[Key, tuple[str, ...] | None]]:
    for training in trainings:
        model = MODELS[training.model]
        shape = AttentionShape((model.n_heads, model.num_kv_heads), (model.d_k, model.d_v), (), ())
        for batch, tokens in training.quick if quick else training.steps:
            key = _key(mode, suite, shape, batch, tokens, tokens)
            config = dataclasses.asdict(model.nsa)
            for launch in training.launches:
                named = dataclasses.replace(key, model=training.model, config=config, launch=launch)
                yield named, training.baselines


def _key(mode: str, suite: Suite, shape: AttentionShape | DecodeShape, batch: int, queries: int, keys: int) -> Key:
    (heads, num_kv_heads), (head_dim_k, head_dim_v) = shape.heads, shape.head_dims
    config = dataclasses.asdict(NSAConfig())
    return Key(mode, NSA, None, suite.dtype, batch, queries, keys, heads, num_kv_heads, head_dim_k, head_dim_v, config)

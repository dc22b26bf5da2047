"""Which cases there are on a machine: the shapes of gpus.toml, spelt out as keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.cases import NSA
from benchmarks.cases.train_step import MODELS
from benchmarks.records import Key
from nsa import NSAConfig

MODES = ("prefill-forward", "prefill-forward-backward", "decode", "train-step", "memory")
DEFAULT_MODES = MODES[:-1]
"""Memory takes a child process per case and a couple of minutes: it runs when `--cases` names it."""


def planned(suite: Mapping[str, Any], *, quick: bool, backend: str, on_gpu: bool) -> list[Key]:
    """Every key of a suite: for each case the baselines first, then NSA, so that its line can show the ratio."""
    keys = [*_prefill(suite, quick), *_decode(suite, quick), *_train_step(suite, quick), *_memory(suite, quick)]
    cache = "cold" if on_gpu else "warm"
    return [
        _contender(
            dataclasses.replace(key, cache="warm" if key.mode == "train-step" else cache), implementation, backend
        )
        for key in keys
        for implementation in [*suite["baselines"], NSA]
    ]


def _contender(key: Key, implementation: str, backend: str) -> Key:
    if implementation == NSA:
        return dataclasses.replace(key, backend_asked=backend)
    return dataclasses.replace(key, implementation=implementation, config=None)


def _shape(mode: str, suite: Mapping[str, Any], shape: Mapping[str, Any], batch: int, queries: int, keys: int) -> Key:
    heads, kv_heads = shape["heads"]
    head_dim_k, head_dim_v = shape["head_dims"]
    config = dataclasses.asdict(NSAConfig())
    return Key(mode, NSA, None, suite["dtype"], batch, queries, keys, heads, kv_heads, head_dim_k, head_dim_v, config)


def _lengths(shape: Mapping[str, Any], quick: bool, what: str = "lengths") -> list[Any]:
    return list(shape["quick" if quick else what])


def _prefill(suite: Mapping[str, Any], quick: bool) -> Iterator[Key]:
    for mode in ("prefill-forward", "prefill-forward-backward"):
        for shape in suite["prefill"]:
            for length in _lengths(shape, quick):
                yield _shape(mode, suite, shape, 1, length, length)


def _decode(suite: Mapping[str, Any], quick: bool) -> Iterator[Key]:
    for shape in suite["decode"]:
        for length in _lengths(shape, quick):
            yield _shape("decode", suite, shape, shape["cached_tokens"] // length, 1, length)


def _memory(suite: Mapping[str, Any], quick: bool) -> Iterator[Key]:
    for shape in suite["memory"]:
        for length in _lengths(shape, quick):
            yield _shape("memory", suite, shape, 1, length, length)


def _train_step(suite: Mapping[str, Any], quick: bool) -> Iterator[Key]:
    for entry in suite["train_step"]:
        model = MODELS[entry["model"]]
        shape = {"heads": (model.n_heads, model.n_kv_groups), "head_dims": (model.d_k, model.d_v)}
        for batch, length in _lengths(entry, quick, "steps"):
            key = _shape("train-step", suite, shape, batch, length, length)
            yield dataclasses.replace(key, model=entry["model"], config=dataclasses.asdict(model.nsa))

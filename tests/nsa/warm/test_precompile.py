"""What became of each kernel that is compiled ahead, and what is said of kernels that are compiled by a call."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton

from nsa.train import run
from nsa.triton_backend import ahead_of_time, compile_log
from nsa.triton_backend.compile_log import Compilation
from nsa.warm import precompile


class FakeLaunch:
    """A launch whose compilation ends as told."""

    def __init__(self, name: str, outcome: object) -> None:
        self.name, self.outcome = name, outcome
        self.launchers: list[str] = []

    def compiled(self) -> str:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        triton.knobs.compilation.listener(**event(self.name, cache_hit=bool(self.outcome)))
        return f"compiled {self.name}"

    def build_launcher(self, compiled: str) -> None:
        self.launchers.append(compiled)


def event(name: str, *, cache_hit: bool) -> dict[str, Any]:
    """What Triton tells its listener."""
    times = SimpleNamespace(ir_initialization=500_000, lowering_stages=[("ptx", 1_000_000)], store_results=0)
    source = SimpleNamespace(name=name, fn=SimpleNamespace(__module__="nsa.triton_backend.topk"))
    return {"src": source, "metadata": {}, "metadata_group": {}, "times": times, "cache_hit": cache_hit}


@pytest.fixture(autouse=True)
def knobs() -> Iterator[Any]:
    if not hasattr(getattr(triton, "knobs", None), "compilation"):
        pytest.skip("this Triton has no hook")
    before = triton.knobs.compilation.listener
    yield triton.knobs.compilation
    assert triton.knobs.compilation.listener is before


def test_one_kernel_that_fails_leaves_the_others() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/cache/abc")
    wanted: list[Any] = [
        FakeLaunch("a", False), FakeLaunch("b", ValueError("no layout\nfor this tile")), FakeLaunch("c", full),
        FakeLaunch("d", True),
    ]  # fmt: skip
    said: list[str] = []
    done = precompile.report(wanted, said.append, jobs=1)
    assert [one.name for one in done if one.error is None] == ["a", "d"]
    assert [one.was_there for one in done] == [False, False, False, True]
    assert done[1].error == "ValueError: for this tile"
    assert "no room for /cache/abc" in str(done[2].error)
    assert "TRITON_CACHE_DIR" in str(done[2].error)
    assert said[-1].startswith("1 kernels compiled, 1 were in the cache, 2 NOT compiled")
    assert said[1].startswith("[2/4] b: NOT compiled: ValueError")
    assert [one.launchers for one in wanted] == [["compiled a"], [], [], ["compiled d"]]


@pytest.mark.parametrize("each_has_its_own", [False, True])
def test_what_launches_a_kernel_is_built_where_each_signature_has_its_own(
    monkeypatch: pytest.MonkeyPatch, each_has_its_own: bool
) -> None:
    built: list[tuple[object, object]] = []
    monkeypatch.setattr(ahead_of_time, "builds_launchers", lambda: each_has_its_own)
    monkeypatch.setattr(ahead_of_time.nvidia, "CudaLauncher", lambda *given: built.append(given))
    source: Any = "the source"
    ahead_of_time.Launch("topk._topk", 90, source, {}).build_launcher(SimpleNamespace(metadata="its metadata"))
    assert built == ([("the source", "its metadata")] if each_has_its_own else [])


def test_a_process_that_is_ended_is_reported_and_its_kernel_named() -> None:
    future: Any = SimpleNamespace(result=lambda: (_ for _ in ()).throw(precompile.BrokenProcessPool()))
    assert "fewer jobs" in str(precompile._result(future, "topk._topk").error)


def test_only_what_is_compiled_is_said_and_how_to_have_it_ahead() -> None:
    said: list[str] = []
    with compile_log.reported(said.append):
        listener = triton.knobs.compilation.listener
        listener(**event("_topk", cache_hit=True))
        assert said == []
        listener(**event("_topk", cache_hit=False))
        listener(**event("_topk", cache_hit=False))
    first, second = said
    assert first.startswith("compiled nsa.triton_backend.topk._topk in 1.5 s; 1 kernels in 1.5 s so far")
    assert "python -m nsa.warm" in first
    assert second == "compiled nsa.triton_backend.topk._topk in 1.5 s; 2 kernels in 3.0 s so far"


def test_training_on_a_gpu_says_what_its_first_step_compiles(knobs: Any) -> None:
    said: list[str] = []
    with run._compilations_said(torch.device("cuda", 0), said.append):
        knobs.listener(**event("_topk", cache_hit=False))
    assert len(said) == 1
    assert "topk._topk" in said[0]
    with run._compilations_said(torch.device("cpu"), said.append):
        assert knobs.listener is None


def test_who_listened_before_still_hears(knobs: Any) -> None:
    heard: list[dict[str, Any]] = []
    before, knobs.listener = knobs.listener, lambda **one: heard.append(one)
    try:
        inside: list[Compilation] = []
        with compile_log.listening(inside.append):
            knobs.listener(**event("_topk", cache_hit=False))
        assert len(heard) == len(inside) == 1
    finally:
        knobs.listener = before

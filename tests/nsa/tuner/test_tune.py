"""`nsa.tune` with a timer that knows the answer: what it finds is kept, found again, and never used unasked."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import nsa
from nsa.triton_backend import tuning
from nsa.triton_backend.tuning import LaunchConfig
from nsa.tuner import tuned
from nsa.tuner.candidates import Trial
from nsa.tuner.search import Search
from nsa.tuner.tuned import Where

WHERE = Where("NVIDIA H200", 90, "0" * 64)
SHAPE = nsa.Workload("train", 2, 2048, 12, 2, 64, 64)
BEST = LaunchConfig(32, 64, 2, 2)
"""What the timer below finds the fastest."""


class Timer:
    """Slower the further a launch is from BEST; serves two kernels unless told."""

    def __init__(self, *kernels: str, outcome: str = "measured") -> None:
        self.kernels, self.outcome = kernels or ("scores", "compressed_window_backward_q"), outcome
        self.asked: list[tuple[str, LaunchConfig]] = []
        self.said: list[str] = []

    def fits(self, kernel: str, *_: object) -> bool:
        return kernel in self.kernels

    def trial(self, timing: Any, kernel: str, launch: LaunchConfig, table: Any) -> Trial:
        assert (timing.group, timing.dk, timing.tokens, timing.batch) == (6, 64, 2048, 2)
        self.asked.append((kernel, launch))
        off = sum(abs(math.log2(a / b)) for a, b in zip(sizes(launch), sizes(BEST), strict=True))
        if self.outcome != "measured":
            return Trial(kernel, launch, self.outcome, detail="as told")
        return Trial(kernel, launch, "measured", 1.0 + off, (0.99 + off, 1.01 + off))

    def search(self, where: Where = WHERE) -> Search:
        return Search(where, self.trial, self.fits, self.said.append)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.tuned.clear()
    yield tmp_path
    tuning.tuned.clear()


def sizes(launch: LaunchConfig) -> tuple[int, int, int, int]:
    return launch.rows, launch.keys, launch.num_warps, launch.num_stages


def test_the_fastest_launch_is_found_kept_and_in_force_for_its_heads_alone() -> None:
    timer = Timer()
    timer.search().tune([SHAPE])
    for kernel in timer.kernels:
        assert sizes(tuning.table(90).of(kernel, "slim", 6)) == sizes(BEST)
        assert tuning.table(90).of(kernel, "slim", 16) == tuning.shipped_table(90).of(kernel, "slim", 16)
        assert tuning.table(90).of(kernel, "narrow", 6) == tuning.shipped_table(90).of(kernel, "narrow", 6)
    assert len(timer.said) == 2
    assert "compressed_window_backward_q: " in timer.said[0]
    assert WHERE.file.is_file()


def test_a_later_process_measures_nothing() -> None:
    Timer().search().tune([SHAPE])
    found = tuning.table(90)
    tuning.tuned.clear()
    later = Timer()
    later.search().tune([SHAPE])
    assert later.asked == []
    assert tuning.table(90) == found != tuning.shipped_table(90)


def test_float32_is_left_to_the_tiles_that_follow_from_those_of_16_bit_types() -> None:
    timer = Timer("scores")
    timer.search().tune([dataclasses.replace(SHAPE, dtype=torch.float32)])
    assert timer.asked == []
    assert "float32 takes half the rows and keys of 16-bit types" in timer.said[0]


def test_a_prompt_needs_no_backward_pass() -> None:
    timer = Timer()
    timer.search().tune([dataclasses.replace(SHAPE, kind="prefill")])
    assert {kernel for kernel, _ in timer.asked} == {"scores"}


@pytest.mark.parametrize("outcome", ["wrong", "failed"])
def test_a_kernel_that_is_not_right_as_it_is_is_left_alone(outcome: str) -> None:
    timer = Timer("scores", outcome=outcome)
    timer.search().tune([SHAPE])
    assert len(timer.asked) == 1
    assert f"{outcome} (as told)" in timer.said[0]
    assert tuning.table(90) == tuning.shipped_table(90)


def test_nothing_that_was_found_is_used_unasked() -> None:
    Timer().search().tune([SHAPE])
    tuning.tuned.clear()  # as in a new process
    assert tuning.table(90) is tuning.shipped_table(90)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(WHERE, gpu="NVIDIA H100 80GB HBM3"),
        dataclasses.replace(WHERE, triton=f"{WHERE.triton}.other"),
        dataclasses.replace(WHERE, sources_sha256="1" * 64),
    ],
)
def test_another_gpu_triton_or_kernel_is_measured_anew(other: Where) -> None:
    Timer().search().tune([SHAPE])
    timer = Timer()
    timer.search(other).tune([SHAPE])
    assert timer.asked
    assert other.file != WHERE.file


def content(**changes: object) -> str:
    launch = dataclasses.asdict(BEST) | {"max_registers": 128, "value_stages": 2}
    told = {"version": 1, **dataclasses.asdict(WHERE), "launches": {"slim": {"scores/8": launch}}}
    return json.dumps(told | changes)


def test_what_is_well_formed_is_read() -> None:
    WHERE.file.parent.mkdir(parents=True)
    WHERE.file.write_text(content())
    said: list[str] = []
    assert tuned.read(WHERE, said.append) == {"slim": {"scores/8": LaunchConfig(32, 64, 2, 2, 128, 2)}}
    assert said == []


@pytest.mark.parametrize(
    "damaged",
    [
        "", "{", "[]", "null", content()[:-9], content(version=2), content(gpu="NVIDIA A100"), content(launches=[]),
        content(launches={"broad": {}}), content(launches={"slim": {"no_kernel": {}}}),
        content(launches={"slim": {"scores": {"rows": 64}}}),
        content(launches={"slim": {"scores": dataclasses.asdict(BEST) | {"rows": -64}}}),
        content(launches={"slim": {"scores": dataclasses.asdict(BEST) | {"rows": "64"}}}),
        content(launches={"slim": {"scores": dataclasses.asdict(BEST) | {"rows": 2**40}}}),
        content(launches={"slim": {"scores": {**dataclasses.asdict(BEST), "max_registers": 1, "more": 1}}}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_left_out_and_written_anew(damaged: str) -> None:
    WHERE.file.parent.mkdir(parents=True)
    WHERE.file.write_text(damaged)
    timer = Timer()
    timer.search().tune([SHAPE])
    assert timer.asked
    assert f"{WHERE.file} is left out" in timer.said[0]
    said: list[str] = []
    assert sizes(tuned.read(WHERE, said.append)["slim"]["scores/8"]) == sizes(BEST)
    assert said == []


def test_two_writers_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins while the first is between reading and writing."""
    write, reading, may_write = tuned.atomic_write, threading.Event(), threading.Event()

    def slow(path: Path, text: str) -> None:
        if threading.current_thread() is first:
            reading.set()
            may_write.wait()
        write(path, text)

    def add(kernel: str) -> threading.Thread:
        arguments = (WHERE, {"slim": {kernel: BEST}}, print)
        return threading.Thread(target=tuned.add, args=arguments, daemon=True)

    monkeypatch.setattr(tuned, "atomic_write", slow)
    first, second = add("scores/8"), add("selected_kv_major/8")
    first.start()
    reading.wait()
    second.start()
    second.join(0.5)  # without a lock it ends within this, and the first writes over it
    may_write.set()
    first.join()
    second.join()
    assert set(tuned.read(WHERE, print)["slim"]) == {"scores/8", "selected_kv_major/8"}


def test_what_cannot_be_kept_holds_for_the_process(cache: Path) -> None:
    (cache / "nsa").write_text("no folder")
    timer = Timer("scores")
    timer.search().tune([SHAPE])
    assert "scores/8 for this process alone" in timer.said[-1]
    assert sizes(tuning.table(90).of("scores", "slim", 6)) == sizes(BEST)


@pytest.mark.parametrize("changed", ["tile.py", "hopper/tile.py", "tables/sm90.json"])
def test_the_sources_are_those_of_every_kernel_and_table(
    changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sha256 = tuned.sources_sha256.__wrapped__
    copied = shutil.copytree(tuning.TABLES.parent, tmp_path / "triton_backend")
    before = sha256()
    monkeypatch.setattr(tuning, "TABLES", copied / "tables")
    assert sha256() == before
    (copied / changed).write_text((copied / changed).read_text() + "\n")
    assert sha256() != before


@pytest.mark.parametrize(
    ("shapes", "error", "said"),
    [
        ("12,2", TypeError, "shapes must be a sequence of nsa.Workload; got '12,2'"),
        ([], ValueError, "shapes must hold one of kind 'train' or 'prefill'"),
        ([dataclasses.replace(SHAPE, kind="decode")], ValueError, "have no tiles to choose"),
        ([SHAPE], ValueError, "needs an NVIDIA GPU; there is none here"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    shapes: Any, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=said):
        nsa.tune(shapes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "training"}, "kind must be one of train, prefill, decode; got 'training'"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"num_kv_heads": 5}, "num_kv_heads must divide num_heads; got 5 and 12"),
        ({"num_documents": 1}, "num_documents must be at least batch=2; got 1"),
    ],
)
def test_a_wrong_workload_is_refused_by_its_field(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(SHAPE, **change)

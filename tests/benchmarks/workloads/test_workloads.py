"""What a case takes at least, whether it fits, and that each part of the forward is held to the whole oracle."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import nsa
from benchmarks import runner
from benchmarks.baselines import BASELINES
from benchmarks.cases import inputs
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.cases.recorded import DECODE_STEPS
from benchmarks.commands import options
from benchmarks.correctness import all_rows
from benchmarks.correctness.verify import IncorrectError
from benchmarks.history.store import Store
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import attention, parts, prepare, roofline, train_step
from benchmarks.workloads.parts import PARTS
from harness.repository import ROOT
from nsa import NSAConfig
from nsa.model import DecoderLM
from tests.benchmarks.synthetic import CONFIG, FINGERPRINT, key

PLAN = SamplingPlan(min_samples=2, min_time_s=0.0, wall_limit_s=5.0, warmup_calls=1)
TERA = 1e12


def large(mode: str, implementation: str = "nsa", length: int = 65536, **changes: Any) -> Key:
    """64/4 heads of 128 in bfloat16."""
    sizes = {"heads": 64, "num_kv_heads": 4, "head_dim_k": 128, "head_dim_v": 128, "dtype": "bfloat16"}
    made = key(mode, implementation, length, **{**sizes, **changes})
    config = NSAConfig() if implementation == "nsa" else BASELINES[implementation].config
    return dataclasses.replace(made, config=None if config is None else dataclasses.asdict(config))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 100), (96, 96), (7, 61), (3, 64)])
def test_pairs_are_what_a_backend_reads(num_queries: int, num_keys: int) -> None:
    q, k = torch.randn(2, num_queries, 4, 16), torch.randn(2, num_keys, 2, 16)
    _, aux = nsa.nsa_attention(q, k, k, torch.rand(2, num_queries, 4, 3), CONFIG, backend="torch", return_aux=True)
    read = {branch: int(total) // (2 * 2) for branch, total in aux.keys_read.items()}  # 2 sequences, 2 key heads
    assert dataclasses.asdict(roofline.nsa_pairs(num_queries, num_keys, CONFIG)) == read


@pytest.mark.parametrize(
    ("mode", "implementation", "tera"),
    [
        ("prefill-forward", "sdpa-flash", 70.4),
        ("prefill-forward-backward", "sdpa-flash", 70.4 * 3.5),
        ("part-compressed", "nsa", 4.4),
        ("part-scores", "nsa", 2.2),
        ("part-selected", "nsa", 2.1),
        ("part-window", "nsa", 1.1),
        ("prefill-forward", "nsa", 9.8),
    ],
)
def test_operations_at_64k(mode: str, implementation: str, tera: float) -> None:
    assert roofline.of(large(mode, implementation)).flops / TERA == pytest.approx(tera, rel=0.01)


def test_a_forward_is_its_parts() -> None:
    whole = roofline.of(large("prefill-forward")).flops
    assert sum(roofline.of(large(mode)).flops for mode in PARTS) == pytest.approx(whole, rel=1e-3)


def test_bytes_are_inputs_and_outputs_once() -> None:
    q, kv = 65536 * 64 * 128, 65536 * 4 * 128
    gates = 65536 * 64 * 3
    assert roofline.of(large("prefill-forward", "sdpa-flash")).bytes_moved == 2 * (2 * q + 2 * kv)
    assert roofline.of(large("prefill-forward")).bytes_moved == 2 * (2 * q + 2 * kv + gates)
    backward = roofline.of(large("prefill-forward-backward")).bytes_moved
    assert backward == 2 * roofline.of(large("prefill-forward")).bytes_moved


def test_a_decode_step_reads_what_it_attends_to() -> None:
    dense, sparse = (roofline.of(large("decode", name, batch=32)) for name in ("sdpa-flash", "nsa"))
    row = 4 * 2 * 128 * 2  # key heads, keys and values, channels, bytes
    query = 64 * 2 * 128 * 2
    assert dense.bytes_moved == 32 * (65536 * row + query)
    assert sparse.bytes_moved == 32 * ((4095 + 1024) * row + query + 64 * 3 * 2)


def test_another_nsa_has_the_minimum_of_its_own_settings() -> None:
    ours, theirs = (roofline.of(large("prefill-forward", name)) for name in ("nsa", "fla-nsa"))
    assert theirs.flops < ours.flops  # a quarter of the compressed keys


def test_operations_of_a_train_step() -> None:
    the_key = key("train-step", "sdpa-flash", length=64, model="showcase", heads=8)
    model = DecoderLM(train_step.MODELS["showcase"].dense_twin())
    weights = 128 * (128 + 2 * 32 + 128) + 3 * 128 * 384 + 128 * 256  # q, k and v, o; the MLP; the head
    attention = roofline.of(dataclasses.replace(the_key, mode="prefill-forward-backward")).flops
    assert roofline.of_train_step(the_key, model) == 6 * weights * 64 + attention


@pytest.mark.parametrize("mode", PARTS)
def test_each_part_is_measured_behind_the_oracle(mode: str) -> None:
    record = runner.measure(key(mode, length=96, batch=2), "cpu", PLAN, FINGERPRINT, "command").record
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert record.correctness is not None
    assert [check.name for check in record.correctness.checks[:2]] == ["block_indices", "o"]
    assert record.correctness.path == "torch"
    assert (record.flops, record.bytes_moved) != (None, None)


FUNCTIONS = {
    "part-compressed": "compressed_attention",
    "part-scores": "select_blocks",
    "part-selected": "selected_attention",
    "part-window": "window_attention",
    "part-gated-sum": "combine",
}


def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its output a little off, or its blocks others."""

    def attend(*arguments: Any, **options: Any) -> Any:
        if options["backend"] == "reference":
            return right(*arguments, **options)
        found = right(*arguments, **options)
        if isinstance(found, tuple):
            return found[0] * (1 + 1e-4), found[1]
        return found * (1 + 1e-4) if found.is_floating_point() else found.roll(1, 1)

    return attend


@pytest.mark.parametrize("mode", PARTS)
def test_a_part_that_is_wrong_is_stopped(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = parts.prepare(key(mode, length=96), "cpu")
    assert work.check(0).passed
    monkeypatch.setattr(nsa, FUNCTIONS[mode], wrong(getattr(nsa, FUNCTIONS[mode])))
    with pytest.raises(IncorrectError):
        work.check(0)


@pytest.mark.parametrize("mode", PARTS)
def test_a_part_that_remembers_is_stopped(mode: str) -> None:
    work = parts.prepare(key(mode, length=96), "cpu")
    (remembered,) = (x.clone() for x in work.call())

    def cached() -> tuple[Tensor, ...]:
        return (remembered.clone(),)

    assert work.recheck is not None
    assert work.recheck(work.call, 3).passed
    with pytest.raises(IncorrectError):
        work.recheck(cached, 4)


@pytest.mark.parametrize("mode", ["prefill-forward", "part-window"])
def test_a_share_of_the_rows_is_compared_where_no_more_is_asked(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = prepare.prepare(key(mode, length=256), "cpu")
    assert work.recheck is not None
    assert work.recheck(work.call, 3).rows_compared == 256
    monkeypatch.setitem(all_rows._MOST_PAIRS, "cpu", 2e4)
    whole, share = (work.recheck(work.call, 3, of_all).rows_compared for of_all in (1.0, 0.2))
    assert whole is not None
    assert share is not None
    assert 4 * share <= whole < 256


@pytest.mark.parametrize("implementation", ["nsa", "sdpa-flash"])
@pytest.mark.parametrize("mode", ["prefill-forward-backward", "decode"])
def test_recorded_inputs_are_measured_behind_the_oracle_and_say_what_they_follow(
    mode: str, implementation: str
) -> None:
    the_key = key(mode, implementation, 200, inputs="recorded", head_dim_k=32, head_dim_v=32)
    record = runner.measure(the_key, "cpu", PLAN, FINGERPRINT, "true").record
    assert record.outcome is CaseOutcome.PASSED, record.reason
    assert record.inputs_follow == inputs.followed(the_key)


def test_decode_steps_follow_one_another_on_the_keys_of_the_first() -> None:
    the_key = key("decode", length=200, batch=2, inputs="recorded", head_dim_k=32, head_dim_v=32)
    first = attention.prepare(the_key, "cpu")
    assert first.following is not None
    works = [first, *first.following()]
    assert len(works) == DECODE_STEPS
    for step, work in enumerate(works):
        wanted = inputs.draw(the_key, "cpu", step=step)
        assert torch.equal(work.inputs["q"], wanted.q)
        assert all(work.inputs[name] is first.inputs[name] for name in ("k", "v", "k_compressed", "v_compressed"))
    last = works[-1]
    assert last.redraw is not None
    last.redraw(5)
    assert torch.equal(last.inputs["q"], inputs.draw(the_key, "cpu", 5, DECODE_STEPS - 1).q)
    assert attention.prepare(dataclasses.replace(the_key, inputs="random"), "cpu").following is None


def test_a_case_that_cannot_fit_is_not_tried_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    room = type("Memory", (), {"total": 24 * 2**30, "available": 23 * 2**30})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: room)
    monkeypatch.setattr(attention, "prepare", lambda *_: pytest.fail("tried"))
    record = runner.measure(large("prefill-forward-backward"), "cpu", PLAN, FINGERPRINT, "command").record
    assert record.outcome is CaseOutcome.OUT_OF_MEMORY
    assert record.reason is not None
    assert record.reason.startswith("MemoryError: not tried: it takes about 2")
    assert record.reason.endswith(" GiB, and the device has 24.0 GiB")
    room.total, room.available = 2**40, 20 * 2**30
    record = runner.measure(large("prefill-forward-backward"), "cpu", PLAN, FINGERPRINT, "command").record
    assert record.outcome is CaseOutcome.OUT_OF_MEMORY
    assert record.reason is not None
    assert record.reason.endswith(" GiB, and 20.0 GiB of the device's 1024.0 GiB are free")


def test_no_peak_on_record_is_above_the_estimate() -> None:
    """The call alone; the oracle's share is above it."""
    runs = options.RESULTS / "runs" / "h200"
    if not runs.is_dir():
        pytest.skip(f"no run of an H200 in {runs}")
    found = Store(options.RESULTS).records(machine="h200")
    peaks = [(record.peak_mem_mib / 1024, record.key) for record in found if record.peak_mem_mib is not None]
    assert len(peaks) > 20
    for peak_gib, the_key in peaks:
        need = prepare.memory_need(the_key)
        assert peak_gib * 1024 + need.inputs_mib < need.whole_mib, the_key.name


PEAK_OF_ORACLE = """
import dataclasses, json, sys
from benchmarks.timing import memory
from benchmarks.workloads import attention
from benchmarks.history.records import Key
key = Key(**json.loads(sys.argv[1]))
attention.prepare(dataclasses.replace(key, num_queries=128, num_keys=128), "cpu").check(0)  # loads the libraries
work = attention.prepare(key, "cpu")
print(memory.of_this_process(lambda: work.check(0)).mib)
"""


def test_the_oracle_fits_in_the_estimate() -> None:
    """Dense attention has no scratch of its own to hide the oracle's; glibc is told to give freed memory back."""
    sizes = {"heads": 16, "num_kv_heads": 1, "head_dim_k": 64, "head_dim_v": 64}
    the_key = key("prefill-forward-backward", "sdpa-flash", length=2048, **sizes)
    words = [sys.executable, "-c", PEAK_OF_ORACLE, json.dumps(dataclasses.asdict(the_key))]
    done = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    estimate_mib = prepare.memory_need(the_key).tensors_mib
    assert float(done.stdout) < estimate_mib < 150


@pytest.mark.parametrize(("share", "fits"), [(2.6, True), (2.4, False)])
def test_two_processes_at_a_time_leave_a_fifth_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, share: float, fits: bool
) -> None:
    """By the whole of the device: what is free now may be the last case's a moment later."""
    total_mib = share * prepare.memory_need(key()).whole_mib
    monkeypatch.setattr(prepare, "memory_mib", lambda _: (0.0, total_mib))
    assert prepare.fits_twice(key(), "cuda") is fits

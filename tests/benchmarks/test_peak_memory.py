"""Peak memory: what counts as a change, its level over the runs, what will not fit, and what ran out."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import peak_memory, runner, worker
from benchmarks.__main__ import main
from benchmarks.ab import paired_run
from benchmarks.ab import worker as ab_worker
from benchmarks.ab.result import CompareVerdict
from benchmarks.ab.sequential import CaseResult, PairTiming
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands import compare
from benchmarks.commands import run as run_command
from benchmarks.history import accepted, memory, run_file
from benchmarks.history.memory import MemoryTrend
from benchmarks.history.store import CaseVisit, Store
from benchmarks.peak_memory import CUDA, GRAPH, RSS, MemoryNeed, MemoryVerdict, OutOfMemory
from benchmarks.report import memory as memory_page
from benchmarks.report.first_page import comparisons, evidence
from benchmarks.report.links import Repository
from benchmarks.report.table import PLAIN
from benchmarks.runner import Measurement
from benchmarks.timing import memory as timing_memory
from benchmarks.timing import peak
from benchmarks.timing.memory import PeakMemory
from harness import repository
from tests.benchmarks.comparisons import comparison_result
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, failed, key, passed

GREW, SHRANK, SAME, FIRST = MemoryVerdict.GREW, MemoryVerdict.SHRANK, MemoryVerdict.SAME, MemoryVerdict.FIRST
CASE = key().name
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("before_mib", "now_mib", "source", "verdict"),
    [
        (1534.728, 1542.478, CUDA, SAME),  # seen on an H200: the same sources in another order
        (789.0, 790.0, CUDA, SAME),
        (0.05, 0.99, CUDA, SAME),
        (40.32, 53.7, CUDA, GREW),
        (2.04, 9.54, CUDA, GREW),
        (1000.0, 1011.0, CUDA, GREW),
        (1000.0, 989.0, CUDA, SHRANK),
        (0.0, 1.5, CUDA, GREW),
        (100.0, 103.9, RSS, SAME),
        (1000.0, 1031.0, RSS, GREW),
        (10.0, 14.5, RSS, GREW),
    ],
)
def test_what_counts_as_a_change(before_mib: float, now_mib: float, source: str, verdict: MemoryVerdict) -> None:
    assert peak_memory.judge(before_mib, now_mib, source) is verdict


def visits(*peaks_mib: float, path: str = "triton", out_of_memory: OutOfMemory | None = None) -> list[CaseVisit]:
    found = []
    for day, peak_mib in enumerate(peaks_mib, start=1):
        utc = f"2026-03-{day:02d}T00:00:00.000Z"
        where = dataclasses.replace(FINGERPRINT, utc=utc, commit=f"{day:040x}", torch="2.11" if day < 4 else "2.12")
        found.append(CaseVisit(utc, where, path, None, peak_mib, CUDA, out_of_memory))
    return found


def trend(points: Sequence[CaseVisit], accepted_mib: float | None = None) -> MemoryTrend:
    (found,) = memory.trends({CASE: points}, {} if accepted_mib is None else {CASE: accepted_mib})
    return found


def test_a_case_that_needs_more_than_it_did() -> None:
    found = trend(visits(100.0, 100.4, 100.0, 160.0, 160.0))
    assert (found.verdict, found.before_mib, found.now_mib) == (GREW, 100.0, 160.0)
    assert found.since.utc.startswith("2026-03-04")
    shown = memory_page.table([found], 400.0, Repository())
    said = {name: cell.text for name, cell in zip(shown.head, shown.rows[0], strict=True)}
    assert said["verdict"] == "memory grew"
    assert said["of the memory"] == "40.0 %"
    assert said["what else changed"] == "torch 2.11 -> 2.12"
    headline = evidence.memory([("machine-h200.html", [found])])
    assert (headline.text, headline.note) == (
        "1 case grew",
        f"most: {CASE.removesuffix('/nsa')}, 100 -> 160 MiB (+60.0%)",
    )


def test_the_headline_names_the_case_that_needs_the_most_more_not_the_largest_share() -> None:
    small = dataclasses.replace(trend(visits(0.085, 1.151)), name="decode/nsa")
    large = dataclasses.replace(trend(visits(1064.0, 2230.0)), name="prefill/nsa")
    headline = evidence.memory([("machine-h100.html", [large]), ("machine-h200.html", [small])])
    assert (headline.text, headline.note) == ("2 cases grew", "most: prefill, 1064 -> 2230 MiB (+109.6%)")
    assert headline.href == "machine-h100.html"


@pytest.mark.parametrize(
    ("peaks_mib", "accepted_mib", "verdict", "before_mib"),
    [
        ((100.0,), None, FIRST, None),
        ((100.0,), 100.0, SAME, 100.0),
        ((100.0, 100.2, 100.5), None, SAME, None),
        ((100.0, 160.0, 130.0), None, GREW, 100.0),
        ((160.0, 100.0), None, SHRANK, 160.0),
        ((160.0, 100.0, 100.0), 160.0, SHRANK, 160.0),
        ((100.0, 160.0, 100.0), None, SHRANK, 160.0),
        ((100.0, 160.0), 160.0, SAME, 160.0),
        ((100.0, 160.0, 200.0), 160.0, GREW, 160.0),
        ((1000.0, 1008.0, 1016.0, 1024.0), None, GREW, 1000.0),
    ],
    ids=[
        "one",
        "one that was accepted",
        "rounding",
        "partly",
        "less",
        "less than accepted",
        "back",
        "accepted",
        "above accepted",
        "slowly",
    ],
)
def test_levels(
    peaks_mib: Sequence[float], accepted_mib: float | None, verdict: MemoryVerdict, before_mib: float | None
) -> None:
    found = trend(visits(*peaks_mib), accepted_mib)
    assert (found.verdict, found.before_mib) == (verdict, before_mib)


@pytest.mark.parametrize(
    ("peaks_mib", "accepted_mib", "day"),
    [
        ((100.0, 160.0, 130.0), None, 2),
        ((100.0, 100.0, 160.0, 100.0, 130.0, 120.0), None, 5),
        ((160.0, 120.0, 100.0), 160.0, 2),
        ((100.0, 160.0, 200.0), 160.0, 3),
        ((200.0, 220.0), 160.0, 1),
        ((100.0, 160.0, 100.0), None, 3),
    ],
    ids=["shrank again", "after it was back", "less than accepted", "above accepted", "always", "back"],
)
def test_it_is_said_since_when_that_is_so(peaks_mib: Sequence[float], accepted_mib: float | None, day: int) -> None:
    """Not the newest level's begin: the commit with which 160 MiB became 130 made nothing grow."""
    points = visits(*peaks_mib)
    found = trend(points, accepted_mib)
    assert found.verdict in (GREW, SHRANK)
    assert found.since is points[day - 1]
    assert found.earlier is (points[day - 2] if day > 1 else None)


def test_another_path_is_another_series() -> None:
    found = trend([*visits(100.0), *visits(300.0, path="torch")])
    assert found.verdict is FIRST
    (row,) = memory_page.table([found], 400.0, Repository()).rows
    assert (row[1].text, row[1].kind) == ("first peak", PLAIN)
    headline = evidence.memory([("machine-h200.html", [found])])
    assert (headline.text, headline.kind) == ("first peaks alone", PLAIN)


def test_an_accepted_level_holds_its_peak(tmp_path: Path) -> None:
    for day in (1, 2):
        where = dataclasses.replace(FINGERPRINT, utc=f"2026-03-{day:02d}T00:00:00.000Z")
        write(tmp_path, dataclasses.replace(passed(key()), fingerprint=where, peak_mem_mib=64.0, peak_mem_source=CUDA))
    words = ["accept", "--case", "*", "--reason", "wanted", "--gpu", "cpu", "--out", str(tmp_path)]
    assert main(words) == 0
    assert [entry.peak_mem_mib for entry in accepted.read(tmp_path)[0]] == [64.0]


TORCH_CUDA = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 23.69 GiB of"
    " which 5.31 GiB is free. Including non-PyTorch memory, this process has 18.25 GiB memory in use. Of the"
)
CAPPED = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of"
    " which 117.00 GiB is free. Process 7 has 22.81 GiB memory in use. Including non-PyTorch memory, this process has"
    " 18.25 GiB memory in use. 22.35 GiB allowed; Of the allocated memory 17.00 GiB is allocated by PyTorch, with 1.00"
    " GiB allocated in private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by PyTorch but unallocated."
)
"""What PyTorch says under `set_per_process_memory_fraction`."""
TORCH_CPU = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes."
NOT_TRIED = "MemoryError: not tried: it takes about 30.0 GiB, and the device has 24.0 GiB"
NO_ROOM = "MemoryError: not tried: it takes about 30.0 GiB, and 20.0 GiB of the device's 40.0 GiB are free"


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        (TORCH_CUDA, OutOfMemory(20480.0, 5437.44, 18688.0)),
        (CAPPED, OutOfMemory(20480.0, (22.35 - 17.5) * 1024, 18688.0)),
        (CAPPED.replace("117.00", "2.00"), OutOfMemory(20480.0, 2048.0, 18688.0)),
        (TORCH_CPU, OutOfMemory(1.0, None, None)),
        (NOT_TRIED, OutOfMemory(30720.0, 24576.0, None)),
        (NO_ROOM, OutOfMemory(30720.0, 20480.0, None)),
        ("the child was killed (SIGKILL)", OutOfMemory(None, None, None)),
    ],
)
def test_what_an_allocator_lacked(reason: str, wanted: OutOfMemory) -> None:
    found = peak_memory.out_of_memory(reason)
    assert found == dataclasses.replace(wanted, free_mib=found.free_mib)
    assert found.free_mib == pytest.approx(wanted.free_mib)


def test_running_out_is_an_outcome_with_its_bytes_and_the_next_case_runs(tmp_path: Path) -> None:
    """In the guarded process that measures, as every case is."""
    keys = [key(length=64), key(length=128)]
    found = worker.run(
        keys, "cpu", runner.QUICK, FINGERPRINT, lambda _: "c", prepare=_too_large_at_64, path=[repository.ROOT]
    )
    first, second = (measured.record for measured in found)
    assert first.outcome is CaseOutcome.OUT_OF_MEMORY
    assert first.out_of_memory == OutOfMemory(20480.0, 5437.44, 18688.0)
    assert second.outcome is CaseOutcome.UNSUPPORTED
    assert second.out_of_memory is None
    run_file.append(path := run_file.create(tmp_path, FINGERPRINT), first)
    ((kept,), damaged) = run_file.split(run_file.read(path))
    assert (kept.out_of_memory, damaged) == (first.out_of_memory, [])


def _too_large_at_64(the_key: object, device: str) -> None:
    import torch

    if getattr(the_key, "num_keys", 0) == 64:
        raise torch.OutOfMemoryError(TORCH_CUDA.removeprefix("OutOfMemoryError: "))
    raise ValueError("cannot serve this call")


def test_bytes_without_the_outcome_are_refused() -> None:
    with pytest.raises(ValueError, match="out_of_memory must be None with outcome CRASHED"):
        dataclasses.replace(failed(key(), CaseOutcome.CRASHED, "x"), out_of_memory=OutOfMemory(1.0, 1.0, None))
    with pytest.raises(ValueError, match=r"out_of_memory\.asked_mib must be at least 0"):
        OutOfMemory(-1.0, None, None)


def test_what_will_not_fit_is_known_before_it_runs() -> None:
    lacked = OutOfMemory(20480.0, 5437.44, 18688.0)
    here = {"ran out": visits(1.0, out_of_memory=lacked), "other sources": visits(1.0, out_of_memory=lacked)}
    here["other sources"][0] = here["other sources"][0]._replace(
        fingerprint=dataclasses.replace(FINGERPRINT, nsa_sha256="b" * 16)
    )
    needs = {
        "large": MemoryNeed(1024.0, 29184.0, 1536.0),
        "fits": MemoryNeed(4000.0, 23000.0, 1536.0),
        "no room": MemoryNeed(1024.0, 23040.5, 1535.5),
        "on record": MemoryNeed(2048.0, 100.0, 1536.0),
        "ran out": MemoryNeed(1024.0, 9000.0, 1536.0),
        "other sources": MemoryNeed(1024.0, 9000.0, 1536.0),
    }
    peaks_mib = {"on record": 21504.0, "fits": 19000.0}
    found = memory.will_not_fit(needs, 24576.0, 23040.0, "0" * 16, here, peaks_mib)
    assert [(one.name, one.reason) for one in found] == [
        ("large", "not tried: it takes about 30.0 GiB, and the device has 24.0 GiB"),
        ("no room", "not tried: it takes about 24.0 GiB, and 22.5 GiB of the device's 24.0 GiB are free"),
        (
            "on record",
            "not tried: it took 21.0 GiB beside 2.0 GiB of inputs in a record, and 22.5 GiB of the device's 24.0 GiB"
            " are free",
        ),
        (
            "ran out",
            "not tried: on 2026-03-01 the same sources had 18.2 GiB and tried to allocate 20.0 GiB more;"
            " 22.5 GiB are free now",
        ),
    ]
    assert found[2].lacks == OutOfMemory(23552.0, 23040.0, None)
    assert found[3].lacks == OutOfMemory(20480.0, 23040.0, 18688.0)  # and so the next run knows it again
    assert not memory.will_not_fit({"ran out": needs["ran out"]}, 81920.0, 40000.0, "0" * 16, here, {})


def test_a_run_says_what_will_not_fit_and_measures_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "measure", lambda machine: None)
    monkeypatch.setattr(run_command, "build_page", lambda results: results)
    large, small = MemoryNeed(0.0, 1024e6, 0.0), MemoryNeed(0.0, 1.0, 0.0)
    monkeypatch.setattr(run_command, "memory_need", lambda one: large if one.mode == "part-scores" else small)
    monkeypatch.setattr(worker, "run", lambda keys, device, plan, where, *_, **__: [
        Measurement(dataclasses.replace(passed(the_key), fingerprint=where)) for the_key in keys
    ])  # fmt: skip
    assert main(["run", "--quick", "--gpu", "cpu", "--cases", "part-*", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.index("will not fit: part-scores/") < out.index("measurements ->")
    outcomes = json.loads(out.splitlines()[-1])["outcomes"]
    assert outcomes["OUT_OF_MEMORY"] >= 1
    assert outcomes["PASSED"] >= 3
    (lacking,) = {
        record.out_of_memory.asked_mib for record in run_file.read_all(tmp_path)[0] if record.out_of_memory is not None
    }
    assert lacking == 1024e6


def test_compare_tells_what_a_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker on a GPU, with a fake allocator; on a CPU it knows no peak."""
    asked = ab_worker.Worker()
    for device, peak_mib in (("cpu", None), ("cuda", 96.0)):
        case = object.__new__(ab_worker._Case)
        done = SimpleNamespace(recheck=lambda seed, rows_share: None)
        vars(case).update(_inputs={}, _device=device, _rotating=done, _seed=1, peak_mem_mib=None)
        vars(case).update(_work=SimpleNamespace(inputs={}, call=None, replays=False))
        monkeypatch.setattr(ab_worker.integrity, "require_intact", lambda: None)  # which sees the fake
        monkeypatch.setattr(ab_worker.memory, "of_cuda", lambda call: PeakMemory(96.0, CUDA))
        asked._case = case
        answer = asked.answer({"finish": True, "other_inputs": True})
        assert (answer["outcome"], answer["peak_mem_mib"]) == ("PASSED", peak_mib)


REPLAYED = key("train-step", launch="graph", model="tiny")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The segments of a fake one, from which a replay takes 0.25 MiB for a moment."""
    mib, segments = 2**20, [{"segment_pool_id": (0, 0), "total_size": 700 * 2**20}]
    for name, answer in (("synchronize", None), ("reset_peak_memory_stats", None), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 900 * mib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 900 * mib + mib // 4)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    return segments


def test_the_peak_of_a_replay_is_its_graphs_pool(allocator: list[dict[str, object]]) -> None:
    """What it asks the allocator for is no peak: 0.08 MiB were recorded of a step that takes 1.9 GiB."""
    step = SimpleNamespace(call=lambda: None, replays=REPLAYED.replays)
    assert timing_memory.of_work(step) is None  # type: ignore[arg-type]
    allocator += [{"segment_pool_id": (0, 1), "total_size": mib * 2**20} for mib in (1800, 20)]
    assert timing_memory.of_work(step) == PeakMemory(1820.25, GRAPH)  # type: ignore[arg-type]
    eager = SimpleNamespace(call=lambda: None, replays=False)
    assert timing_memory.of_work(eager) == PeakMemory(0.25, CUDA)  # type: ignore[arg-type]


def test_a_peak_of_a_replay_that_was_recorded_is_left_out(tmp_path: Path) -> None:
    for day, (peak_mib, source) in enumerate([(1876.0, CUDA), (0.08, CUDA), (1820.0, GRAPH)], start=1):
        where = dataclasses.replace(FINGERPRINT, utc=f"2026-03-{day:02d}T00:00:00.000Z")
        record = dataclasses.replace(passed(REPLAYED), peak_mem_mib=peak_mib, peak_mem_source=source)
        write(tmp_path, dataclasses.replace(record, fingerprint=where))
    found = Store(tmp_path).visits("cpu")[REPLAYED.name]
    assert [visit.peak_mem_mib for visit in found] == [None, None, 1820.0]
    assert all(visit.passed for visit in found)
    (level,) = memory.trends({REPLAYED.name: found})
    assert (level.verdict, level.now_mib) == (FIRST, 1820.0)


def test_no_kept_record_of_a_replay_has_another_peak_than_a_pools() -> None:
    """Records are kept as they were written; what reads them must not believe 0.08 MiB."""
    store = Store(ROOT / "results")
    peaks = [
        visit.peak_mem_mib
        for machine in store.machines()
        for name, visits in store.visits(machine).items()
        if name.startswith("train-step/125m/") and "/graph/" in name
        for visit in visits
    ]
    assert peaks
    assert all(peak_mib is None or peak_mib > 100 for peak_mib in peaks)


def test_compare_says_that_memory_grew() -> None:
    pairs = [PairTiming(1.0, 1.0, 0.0, (512.0, 640.0)), PairTiming(1.0, 1.0, 0.0)]
    assert CaseResult("case", pairs).peaks_mib == (512.0, 640.0)
    assert CaseResult("case", pairs[1:]).peaks_mib is None
    one = dataclasses.replace(comparison_result(CompareVerdict.SAME), peaks_mib=(512.0, 640.0))
    assert one.memory is GREW
    assert "memory grew 512 -> 640 MiB (+25.0%)" in compare.table([one])
    shown = comparisons.cases([one, dataclasses.replace(one, peaks_mib=None)])
    column = shown.head.index("memory")
    assert [row[column].text for row in shown.rows] == ["memory grew: 512 -> 640 MiB (+25.0%)", "–"]


@pytest.mark.parametrize(("head_mib", "code"), [(640.0, 1), (514.0, 0), (400.0, 0)])
def test_compare_fails_where_memory_grew(
    head_mib: float,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = dataclasses.replace(comparison_result(CompareVerdict.SAME), peaks_mib=(512.0, head_mib))
    monkeypatch.setattr(paired_run, "measure", lambda *_: ([one], False))
    base = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository.ROOT, capture_output=True, text=True)
    if base.returncode:
        pytest.skip("a copy without git")
    words = ["compare", "HEAD", "--gpu", "cpu", "--cases", "part-window/*", "--quick", "--out", str(tmp_path)]
    assert main(words) == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["memory_grew"] == [one.key.name] * code

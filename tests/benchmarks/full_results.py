"""A folder of results with everything that a page shows, as months of use would leave it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.ab import calibration, result
from benchmarks.ab.calibration import Calibration, CalibrationRate, CaseCalibration, ClassRules
from benchmarks.ab.moderated import NoisePrior
from benchmarks.ab.result import CompareVerdict, ComparisonResult, Rules, Side
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import accepted, run_file
from benchmarks.history.accepted import Acceptance
from benchmarks.history.records import Record
from benchmarks.history.samples import SampleSummary
from benchmarks.timing.clocks import ClockSummary
from harness import jsonl
from harness.fingerprint import Fingerprint
from harness.peak import MeasuredPeak
from tests.benchmarks.synthetic import CONFIG, FINGERPRINT, failed, key, passed

PEAK = MeasuredPeak(700.0, 50.0, 4.2, 50.0, 989.0, 4.8)
SLOWER_FROM = 7
"""The run from which NSA takes 8 % longer."""
NEW_DRIVER_FROM = 4
LENGTHS = (8192, 16384, 32768, 65536)
CONTENDERS = {"sdpa-flash": 2.0, "sdpa-cudnn": 1.9, "flash-attn-4": 1.8, "fla-nsa": 1.4, "nsa": 1.3}
"""Implementation -> exponent of its time in the length."""


def run_of(number: int, machine: str = "h200", device: str = "NVIDIA H200") -> Fingerprint:
    """The fingerprint of run `number`."""
    return dataclasses.replace(
        FINGERPRINT,
        utc=f"2026-{1 + number // 28:02d}-{1 + number % 28:02d}T03:04:05.000Z",
        machine=machine,
        device=device,
        driver="560.35.03" if number >= NEW_DRIVER_FROM else "555.42.02",
        cuda="12.8",
        triton="3.7.1",
        commit=f"{random.Random(number).getrandbits(160):040x}",
        nsa_sha256=f"{number:016x}",
        measured_peak=PEAK,
    )


def keys() -> Iterator[Key]:
    """64/4 heads of 128 in every mode, and the parts of the forward."""
    shape = {"dtype": "bfloat16", "heads": 64, "num_kv_heads": 4, "head_dim_k": 128, "head_dim_v": 128, "cache": "cold"}
    for mode in ("prefill-forward", "prefill-forward-backward", "decode"):
        for length in LENGTHS:
            batch = 2**21 // length if mode == "decode" else 1
            for implementation in CONTENDERS:
                made = key(mode, implementation, length, **shape, batch=batch)
                settings = dataclasses.asdict(CONFIG) if implementation == "fla-nsa" else made.config
                yield dataclasses.replace(made, config=settings)
    for part in ("part-compressed", "part-scores", "part-selected", "part-window"):
        for length in LENGTHS:
            yield key(part, "nsa", length, **shape)


def measured(the_key: Key, where: Fingerprint, number: int, noise: random.Random) -> Record:
    """One record of run `number`; some do not pass."""
    if the_key.implementation == "flash-attn-4" and the_key.mode == "prefill-forward-backward":
        refused = failed(the_key, CaseOutcome.UNSUPPORTED, "flash-attn-4 has no backward pass with these heads")
        return dataclasses.replace(refused, fingerprint=where)
    work = (the_key.num_keys / 8192) ** CONTENDERS[the_key.implementation]
    share = {"selected": 0.4, "scores": 0.3, "compressed": 0.2, "window": 0.1}.get(
        the_key.mode.removeprefix("part-"), 1
    )
    latency_ms = (
        2 * share * work * (2.6 if the_key.mode == "prefill-forward-backward" else 1) * noise.lognormvariate(0, 0.006)
    )
    if the_key.implementation == "nsa" and number >= SLOWER_FROM:
        latency_ms *= 1.08
    return dataclasses.replace(
        passed(the_key, latency_ms),
        fingerprint=where,
        samples=SampleSummary.of([latency_ms * noise.lognormvariate(0, 0.01) for _ in range(30)]),
        interval_ms=(latency_ms * 0.992, latency_ms * 1.009),
        end_to_end_ms=latency_ms + 0.04,
        tokens_per_s=the_key.batch * the_key.num_queries / latency_ms * 1e3,
        peak_mem_mib=the_key.num_keys / 40,
        compile_s=3.2,
        clocks=ClockSummary(1980, 1980.0, 640.0, 61, {"power_cap": 2}) if the_key.num_keys == LENGTHS[-1] else None,
        flops=work * share * 4e11,
        bytes_moved=work * share * 1e9,
    )


def write_runs(results: Path, runs: int, machine: str = "h200", device: str = "NVIDIA H200") -> int:
    """`runs` runs of one machine; how many records that is. Written at once: `append` waits for the disk each time."""
    count = 0
    for number in range(runs):
        where = run_of(number, machine, device)
        noise = random.Random(number)
        found = [measured(one, where, number, noise) for one in keys()]
        run_file.create(results, where).write_text("".join(f"{line}\n" for line in run_file.lines_of(found)))
        count += len(found)
    return count


def write_verdicts(results: Path, utc: str = "2026-03-01T00:00:00.000Z", **changes: Any) -> None:
    """One comparison with every verdict."""
    where = run_of(SLOWER_FROM)
    base = Side("main", run_of(0).commit, False, "a" * 16)
    head = Side("HEAD", where.commit, False, "b" * 16)
    rows: list[tuple[CompareVerdict, float | None, str | None]] = [
        (CompareVerdict.SAME, 0.002, None),
        (CompareVerdict.FASTER, -0.06, None),
        (CompareVerdict.SLOWER, 0.081, None),
        (CompareVerdict.UNDECIDED, 0.02, "14 pairs of processes were not enough"),
        (CompareVerdict.FAILED, None, "INCORRECT: o: error 0.1 > budget 0.002"),
    ]
    for length, (verdict, change, reason) in zip((2048, *LENGTHS), rows, strict=True):
        one = ComparisonResult(
            utc=utc, base=base, head=head, fingerprint=where, key=key(length=length), rules=Rules(), verdict=verdict,
            reason=reason, command="python -m benchmarks compare main HEAD", change=change,
            interval=None if change is None else (change - 0.01, change + 0.012),
            detectable=None if change is None else 0.013, base_ms=10.0,
            head_ms=None if change is None else 10 * (1 + change),
        )  # fmt: skip
        jsonl.append(result.path(results, utc, base, head), dataclasses.replace(one, **changes))


def write_calibration(results: Path) -> None:
    """240 comparisons of each slowdown, on as many cases as there are lengths; the last case hides one of them."""
    where = run_of(3, "cpu", "A CPU")
    cases = []
    for n, length in enumerate(LENGTHS):
        share = 240 // len(LENGTHS)
        found = (0, share // 4, share - (3 if n else 0), share)
        rates = tuple(
            CalibrationRate(level, 1.01 * level, share, slower, int(level == 0), share - slower - int(level == 0), 0)
            for level, slower in zip(calibration.LEVELS, found, strict=True)
        )
        cases.append(CaseCalibration(key(length=length).name, 20.0 + n, 0.0065, rates))
    rules = Rules(0.005, 0.024, NoisePrior(0.0065, 12.0))
    made = Calibration(
        where, (ClassRules(calibration.LONG, rules),), tuple(cases), 60, 1800.0, "python -m benchmarks calibrate"
    )
    calibration.save(results, made)


def write_accepted(results: Path) -> None:
    """One baseline moved."""
    case = key(length=LENGTHS[0]).name
    entry = Acceptance(
        "2026-02-01T00:00:00Z", "A Person <a@b.c>", "keys are checked now", "h200", "NVIDIA H200", case, 2.2, None, 2.0
    )
    jsonl.append(accepted.path(results), entry)


def write_incidents(results: Path, number: int, red: str | None = None, where: Fingerprint | None = None) -> None:
    """One run of the regression suite, that of run `number` or of `where`; the incident `red` comes out red."""
    where = where or run_of(number)
    seen = {"window-leak": "future_seen", "nan-empty-row": "nonfinite", "step5-stall": "ops", "dup-blocks": "wrong"}
    expects = {"window-leak": "LEAK", "nan-empty-row": "NONFINITE", "step5-stall": "SLOW", "dup-blocks": "WRONG"}
    folder = results / "regression" / where.machine
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for incident, aspect in seen.items():
        for part in ("faulty", "product"):
            fault = part == "faulty" or incident == red
            verdict = expects[incident] if fault else "PASSED"
            wanted = expects[incident] if part == "faulty" else "PASSED"
            entry = {
                "fingerprint": dataclasses.asdict(where), "incident": incident, "part": part, "device": "cuda",
                "injected": None, "verdict": verdict, "expects": wanted, "ok": verdict == wanted,
                "reason": None if verdict == wanted else "rows 3 to 9 changed",
                "aspects": [{"name": aspect, "verdict": verdict, "why": ""}], "evidence": {}, "pace": {},
                "command": f"python -m regression run {incident} --device cuda", "schema_version": 1,
            }  # fmt: skip
            entries.append(json.dumps(entry))
    (folder / f"{number:03d}.jsonl").write_text("\n".join(entries) + "\n")


def write_everything(results: Path) -> None:
    """A GPU with a dozen runs, a calibrated CPU, verdicts, incidents."""
    write_runs(results, 12)
    write_runs(results, 2, "cpu", "A CPU")
    write_verdicts(results)
    write_verdicts(results, "2026-02-01T00:00:00.000Z", verdict=CompareVerdict.SAME, reason=None)
    write_calibration(results)
    write_accepted(results)
    write_incidents(results, 6)
    write_incidents(results, SLOWER_FROM, red="window-leak")

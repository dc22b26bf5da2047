"""Ratios are taken within one run, on one machine, against a named baseline."""

from __future__ import annotations

from benchmarks import console
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import speedup
from tests.benchmarks.synthetic import failed, key, passed

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


def test_speed_up_is_the_baselines_time_over_ours() -> None:
    assert speedup.speed_up(passed(key(), 10.0), passed(key(implementation="sdpa-flash"), 25.0)) == 2.5


def test_no_ratio_without_two_figures() -> None:
    refused = failed(key(implementation="sdpa-flash"), CaseOutcome.UNSUPPORTED, "no")
    assert speedup.speed_up(passed(key()), refused) is None
    assert (
        speedup.speed_up(failed(key(), CaseOutcome.INCORRECT, "wrong"), passed(key(implementation="sdpa-flash")))
        is None
    )


def test_the_newest_run_counts_and_runs_do_not_mix() -> None:
    dense = key(implementation="sdpa-flash")
    runs = [
        passed(dense, 30.0, LATE),
        passed(key(), 10.0, LATE),
        passed(dense, 5.0, EARLY),
        passed(key(), 10.0, EARLY),
        passed(dense, 7.0, LATE, machine="h200"),
        passed(key(), 1.0, EARLY, machine="h200"),  # its baseline ran on another day
    ]
    found = {c.nsa.fingerprint.machine: c for c in speedup.comparisons(runs)}
    assert [record.latency_ms for record in found["cpu"].baselines] == [30.0]
    assert found["h200"].baselines == ()


def test_a_baseline_that_ran_after_nsa_counts() -> None:
    (found,) = speedup.comparisons([passed(key(), 10.0), passed(key(implementation="sdpa-flash"), 30.0)])
    assert [record.latency_ms for record in found.baselines] == [30.0]


def test_measuring_nsa_again_keeps_the_run_that_has_the_baseline() -> None:
    dense = key(implementation="sdpa-flash")
    both = [passed(dense, 30.0, EARLY), passed(key(), 10.0, EARLY)]
    (found,) = speedup.comparisons([*both, passed(key(), 9.0, LATE)])
    assert (found.nsa, found.baselines) == (both[1], (both[0],))
    (found,) = speedup.comparisons([passed(key(), 9.0, EARLY), passed(key(), 8.0, LATE)])
    assert found.nsa.latency_ms == 8.0


def test_a_newer_failure_of_nsa_alone_is_not_hidden() -> None:
    early = [passed(key(implementation="sdpa-flash"), 30.0, EARLY), passed(key(), 10.0, EARLY)]
    wrong = failed(key(), CaseOutcome.INCORRECT, "wrong")
    (found,) = speedup.comparisons([*early, wrong])
    assert (found.nsa, found.baselines) == (wrong, ())


def test_only_our_own_faults_fail_a_run() -> None:
    wrong = failed(key(), CaseOutcome.INCORRECT, "wrong")
    others = [
        passed(key(length=128)),
        failed(key(length=256), CaseOutcome.OUT_OF_MEMORY, "too large"),
        failed(key(implementation="sdpa-flash"), CaseOutcome.CRASHED, "theirs"),
    ]
    assert speedup.faults([wrong, *others]) == [wrong]


def test_lines_name_the_baseline_and_hide_no_failure() -> None:
    dense, refused = (
        passed(key(implementation="sdpa-flash"), 25.0),
        failed(key(implementation="sdpa-cudnn"), CaseOutcome.NOT_PRESENT, "no GPU"),
    )
    line = console.progress(passed(key(), 10.0), 3, 20, 12.0, [dense, refused])
    assert line.startswith("[ 3/20   12 s,   68 s left] prefill-forward/4x2x16/b1/s64/float32/nsa")
    assert line.endswith("PASSED  10 ms  2.50x as fast as sdpa-flash")
    assert console.progress(refused, 4, 20, 13.0, []).endswith("NOT_PRESENT  no GPU")
    table = console.table(speedup.comparisons([dense, refused, passed(key(), 10.0)]))
    assert "sdpa-flash 25 ms (2.50x), sdpa-cudnn NOT_PRESENT" in table

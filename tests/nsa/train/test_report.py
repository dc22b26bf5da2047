"""Go or no-go: a sound run is a go, each fault in the files is a no-go with its reason, and the page shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from nsa.train import report, run_folder
from nsa.train.run_folder import NoRunError

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

STEPS = 180
BEGIN = datetime(2026, 1, 2, tzinfo=timezone.utc)
Files = dict[str, Any]


def _sound() -> Files:
    beats = [
        {
            "utc": (BEGIN + timedelta(seconds=n)).isoformat().replace("+00:00", "Z"), "attempt": 1, "rank": 0,
            "step": n,
            "loss": 5.0 - n / 60, "tokens_per_s": 1000.0 + n % 3, "step_ms": 1000.0, "rss_mib": 500.0 + n % 2,
            "non_finite_steps": 0, "data_wait_ms": 0.1, "grad_norm": 1.0, "fallbacks": 0, "backends": {"torch": 2},
            "gate_entropy_mean_nats": 1.05, "gate_max_share_mean": 0.4,
            "gate_shares": {"compressed": 0.3, "selected": 0.3, "window": 0.4},
            "keys_read": {"selected": 10}, "keys_predicted": {"selected": 10},
            "selected_keys_mean": 5.0, "selected_keys_max": 8,
            "selection_at_maximum": 0.5, "selection_at_maximum_expected": 0.5,
        }
        for n in range(1, STEPS + 1)
    ]  # fmt: skip
    saved = {"utc": beats[-1]["utc"], "event": "saved", "step": STEPS}
    values = {"train.save_every": 60, "data.dataset": "python"}
    env = {
        "profile": "tiny", "data_source": "python", "ranks": 1, "parameters": 5, "device": "cpu", "torch": "2",
        "preflight": {"allow_toy": []}, "notes": ["a <note>"],
        "settings": {name: {"value": value, "origin": "profile"} for name, value in values.items()},
    }  # fmt: skip
    return {"beats": beats, "events": [saved], "env": env, "metrics": {"state": "done", "steps": STEPS, "loss": 2.0}}


def _write(folder: Path, files: Files) -> Path:
    lines = [*files["beats"], *files["events"]]
    (folder / "heartbeat_rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "env.json").write_text(json.dumps(files["env"]))
    (folder / "metrics.json").write_text(json.dumps(files["metrics"]))
    (folder / "attempts.jsonl").write_text('{"attempt": 1}\n')
    (folder / "val.csv").write_text("step,loss,tokens_seen\n30,4.0,100\n60,3.0,200\n")
    return folder


def _bad(folder: Path) -> list[str]:
    found = report.checks(run_folder.read_run(folder), now=BEGIN + timedelta(seconds=STEPS + 1))
    return [check.name for check in found if check.healthy is False]


def test_a_sound_run_is_a_go(tmp_path: Path) -> None:
    assert _bad(_write(tmp_path, _sound())) == []
    text = report.text(tmp_path)
    assert text.startswith("GO: tiny, step 180 of 180")
    assert "bad" not in text


def _set(where: str, name: str, value: object) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for record in files["beats"] if where == "beats" else [files[where]]:
            record[name] = value

    return change


def _falling(files: Files) -> None:
    for record in files["beats"]:
        record["tokens_per_s"] = 1000.0 - 10 * record["step"]


def _growing(files: Files) -> None:
    for record in files["beats"]:
        record["rss_mib"] = 500.0 + record["step"]


def _rising(files: Files) -> None:
    for record in files["beats"]:
        record["loss"] = 5.0 + record["step"]


def _several_ranks(files: Files) -> None:
    files["beats"][-1].update(rank_imbalance=0.7, rank_work_ms=[30.0, 100.0])


def _event(event: str, **more: object) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files["metrics"]["state"] = "running"
        files["events"].append({"utc": files["beats"][-1]["utc"], "event": event, **more})

    return change


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (_set("env", "preflight", {"allow_toy": ["runtime.precision must be bf16"]}), "preflight"),
        (_set("env", "data_source", "synthetic"), "data"),
        (_rising, "loss"),
        (_set("beats", "non_finite_steps", 1), "finite"),
        (_falling, "throughput"),
        (_growing, "memory"),
        (_set("beats", "gate_entropy_mean_nats", 0.3), "gates"),
        (_set("beats", "gate_max_share_mean", 0.95), "gates"),
        (_set("beats", "keys_read", {"selected": 9}), "selection"),
        (_set("beats", "selection_at_maximum", 0.4), "selection"),
        (_set("beats", "fallbacks", 2), "fallbacks"),
        (lambda files: files["events"].clear(), "checkpoints"),
        (_several_ranks, "ranks"),
        (_event("alarm", step=3, sentinel="memory_slope", why="x"), "alarms"),
        (_event("stalled", why="no heartbeat"), "state"),
    ],
)
def test_each_fault_is_a_no_go(fault: Callable[[Files], None], name: str, tmp_path: Path) -> None:
    files = _sound()
    fault(files)
    assert _bad(_write(tmp_path, files)) == [name]
    assert report.text(tmp_path).startswith("NO-GO")


def test_silence_of_a_run_that_is_not_done(tmp_path: Path) -> None:
    files = _sound()
    files["metrics"]["state"] = "running"
    run = run_folder.read_run(_write(tmp_path, files))
    soon, late = (report.checks(run, now=BEGIN + timedelta(seconds=STEPS + gap))[-1] for gap in (5, 600))
    assert (soon.healthy, late.healthy) == (True, False)
    assert "no heartbeat for 600.0 s" in late.reason


def test_what_is_not_known_is_not_good(tmp_path: Path) -> None:
    (tmp_path / "heartbeat_rank0.jsonl").write_text("")
    found = {check.name: check.healthy for check in report.checks(run_folder.read_run(tmp_path))}
    assert not any(healthy is True for name, healthy in found.items() if name not in ("alarms", "checkpoints"))


def test_the_last_life_counts(tmp_path: Path) -> None:
    files = _sound()
    files["beats"].append({**files["beats"][29], "attempt": 2, "loss": 0.5})
    run = run_folder.read_run(_write(tmp_path, files))
    assert len(run.steps) == STEPS
    assert run.steps[29]["loss"] == 0.5


def test_the_page_says_it_all_and_escapes(tmp_path: Path) -> None:
    page = report.write_page(_write(tmp_path, _sound())).read_text()
    assert "<h1>GO: tiny, step 180 of 180</h1>" in page
    assert page.count("<svg") == 7
    assert "a &lt;note&gt;" in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_no_run_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match=str(tmp_path)):
        report.text(tmp_path)

"""What the workflows promise: nothing unpinned, no hidden exit code, no fork on a GPU machine, one run per GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.history import samples
from harness import machines
from harness.repository import ROOT

yaml = pytest.importorskip("yaml")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return loaded(request.param)


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_actions_are_pinned_by_commit(workflow: dict[str, Any]) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action


def test_a_pipe_cannot_hide_an_exit_code(workflow: dict[str, Any]) -> None:
    assert workflow["defaults"]["run"]["shell"] == "bash -euo pipefail {0}"
    assert not [step for step in steps(workflow) if "shell" in step]


def test_nothing_of_an_event_is_pasted_into_a_shell(workflow: dict[str, Any]) -> None:
    assert not [step["run"] for step in steps(workflow) if "${{" in step.get("run", "")]


def test_the_token_may_read_unless_a_job_says_more(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow[True]  # YAML 1.1 reads the key `on` as true


def test_a_gpu_is_for_one_run_of_this_repository_at_a_time() -> None:
    job = loaded(ROOT / ".github" / "workflows" / "gpu.yml")["jobs"]["suites"]
    assert job["concurrency"] == {"group": "gpu-${{ matrix.gpu }}", "cancel-in-progress": False}
    assert "head.repo.full_name == github.repository" in job["if"]
    assert "self-hosted" in job["runs-on"]


def test_the_gpus_that_are_measured_by_default_have_an_image() -> None:
    inputs = loaded(ROOT / ".github" / "workflows" / "gpu.yml")[True]["workflow_dispatch"]["inputs"]
    assert set(json.loads(inputs["gpus"]["default"])) <= set(machines.image_families())


def test_the_shards_of_the_mutants_are_the_whole_set_and_are_judged_together() -> None:
    jobs = loaded(ROOT / ".github" / "workflows" / "mutants.yml")["jobs"]
    shards = jobs["shards"]["strategy"]["matrix"]["shard"]
    assert shards == [f"{number}/{len(shards)}" for number in range(1, len(shards) + 1)]
    assert any("judge" in step.get("run", "") for step in jobs["judge"]["steps"])
    assert (jobs["judge"]["needs"], jobs["judge"]["if"]) == ("shards", "always()")


def test_the_branch_of_the_results_has_one_writer_at_a_time() -> None:
    writers = [
        job
        for path in WORKFLOWS
        for job in loaded(path)["jobs"].values()
        if job.get("permissions", {}).get("contents") == "write"
    ]
    assert len(writers) == 2
    assert all(job["concurrency"] == {"group": "publish", "cancel-in-progress": False} for job in writers)


def test_raw_samples_are_kept_as_long_as_who_asks_for_them_is_told() -> None:
    kept = {
        path.stem: {
            step["with"].get("retention-days") for step in steps(loaded(path)) if "results" in str(step.get("with"))
        }
        for path in WORKFLOWS
        if path.stem in ("checks", "gpu")
    }
    assert kept["checks"] == {samples.RETENTION_DAYS}
    assert samples.RETENTION_DAYS in kept["gpu"]

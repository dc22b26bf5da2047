"""What the workflows promise: nothing unpinned, no hidden exit code, no fork on a GPU machine, one run per GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.history import samples
from harness import machines
from tests.containers.fake_github import WORKFLOWS, loaded, triggers


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return loaded(request.param.stem)


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
    assert "pull_request_target" not in triggers(workflow)


def test_a_gpu_is_for_one_run_of_this_repository_at_a_time() -> None:
    job = loaded("gpu")["jobs"]["suites"]
    assert job["concurrency"]["group"] == "gpu-${{ matrix.gpu }}"
    assert "head.repo.full_name == github.repository" in job["if"]
    assert "self-hosted" in job["runs-on"]


def test_the_gpus_that_are_measured_by_default_have_an_image() -> None:
    for name in ("gpu", "images"):
        inputs = triggers(loaded(name))["workflow_dispatch"]["inputs"]
        assert set(json.loads(inputs["gpus"]["default"])) <= set(machines.image_families())


def test_the_shards_of_the_mutants_are_the_whole_set_and_are_judged_together() -> None:
    jobs = loaded("mutants")["jobs"]
    shards = jobs["shards"]["strategy"]["matrix"]["shard"]
    assert shards == [f"{number}/{len(shards)}" for number in range(1, len(shards) + 1)]
    assert any("judge" in step.get("run", "") for step in jobs["judge"]["steps"])
    assert (jobs["judge"]["needs"], jobs["judge"]["if"]) == ("shards", "always()")


def jobs_with_a_queue() -> Iterator[dict[str, Any]]:
    for path in WORKFLOWS:
        yield from (job for job in loaded(path.stem)["jobs"].values() if "concurrency" in job)


def test_no_job_is_dropped_while_it_waits_for_its_turn() -> None:
    """Without `queue: max` GitHub keeps one waiting job per group, and cancels it for the next."""
    queues = [job["concurrency"] for job in jobs_with_a_queue()]
    assert len(queues) == 6
    assert all((one["cancel-in-progress"], one["queue"]) == (False, "max") for one in queues)


def test_the_branch_of_the_results_has_one_writer_at_a_time() -> None:
    writers = [
        job
        for path in WORKFLOWS
        for job in loaded(path.stem)["jobs"].values()
        if job.get("permissions", {}).get("contents") == "write"
    ]
    assert len(writers) == 2
    assert all(job["concurrency"]["group"] == "publish" for job in writers)


def test_what_posts_the_comment_runs_nothing_of_the_pull_request() -> None:
    job = loaded("gpu")["jobs"]["comment"]
    assert job["permissions"] == {"pull-requests": "write"}
    assert [step["uses"].split("@")[0] for step in job["steps"] if "uses" in step] == ["actions/download-artifact"]
    others = (job for path in WORKFLOWS for job in loaded(path.stem)["jobs"].values())
    assert sum("pull-requests" in other.get("permissions", {}) for other in others) == 1


def test_raw_samples_are_kept_as_long_as_who_asks_for_them_is_told() -> None:
    kept = {
        name: {
            step["with"]["path"]: step["with"]["retention-days"]
            for step in steps(loaded(name))
            if step.get("uses", "").startswith("actions/upload-artifact@")
        }
        for name in ("checks", "gpu")
    }
    assert kept["checks"] == {"results/pipeline": samples.RETENTION_DAYS}
    assert kept["gpu"]["fresh"] == samples.RETENTION_DAYS

"""Each step of the workflows as it is written, against a bare repository: nothing is lost, and no fork gets a token."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks.history import accepted, mutants
from containers import __main__ as containers
from harness import jsonl
from tests.benchmarks.stored import everything, write
from tests.benchmarks.synthetic import FINGERPRINT, key, passed
from tests.containers import fake_github
from tests.containers.fake_github import Runner, evaluate, event, loaded, names, pull_request, rendered, runner

__all__ = ["runner"]  # the fixture
PUSH = event("push")
LOG = "pipeline/tests.log"


def measured(results: Path, day: int, latency_ms: float = 10.0) -> Path:
    """A run of that day, as a bench leaves it."""
    return write(results, passed(key(), latency_ms, f"2026-03-{day:02d}T00:00:00.000Z"))


def artefact(at: Runner, gpu: str, day: int) -> None:
    """What a job has uploaded."""
    measured(at.checkout / "artefacts" / f"records-{gpu}", day)


def publish(at: Runner) -> Any:
    """Joins the artefacts and pushes the branch."""
    return at.run_step("gpu", "publish", "Join this run's records", PUSH)


def history(at: Runner, *days: int) -> None:
    """Runs of these days on the branch, as earlier jobs have kept them."""
    for day in days:
        measured(at.home / "history", day)
    done = at.run(f".ci/results update Earlier cp -r {shlex.quote(str(at.home / 'history'))}/. joined/results/")
    assert done.returncode == 0, done.stderr


def test_the_first_run_makes_the_branch_and_the_pages(runner: Runner) -> None:
    runner.program("nox", fake_github.nox(pages=True))
    artefact(runner, "a100", 1)
    measured(runner.checkout / "results", 2)  # a record that this commit brings along
    done = publish(runner)
    assert done.returncode == 0, done.stderr
    kept = runner.branch()
    runs = [name for name in kept if "/runs/" in name]
    assert [Path(name).name[:8] for name in runs] == ["20260301", "20260302"]
    assert "results/baselines/published.toml" in kept
    assert not [name for name in kept if "report" in name]  # built anew from the records
    assert (runner.checkout / "joined/results/report/index.html").is_file()
    assert runner.git("log", "-1", "--format=%an: %s", "results", folder=runner.origin) == (
        "github-actions: Records of run 1"
    )


def test_a_writer_that_comes_second_begins_again_and_nothing_is_lost(runner: Runner) -> None:
    """The other one pushes between this one's checkout of the branch and its push; so it is on the first run too."""
    other = runner.clone("other")
    artefact(runner, "a100", 1)
    artefact(other, "h100", 2)
    join = f"cd {shlex.quote(str(other.checkout))} && .ci/results update Other .ci/results join artefacts"
    runner.program("nox", fake_github.nox(meanwhile=join))
    done = publish(runner)
    assert done.returncode == 0, done.stderr
    assert "attempt 1 of 6: origin took no push" in done.stderr
    runs = [name for name in runner.branch() if "/runs/" in name]
    assert [Path(name).name[:8] for name in runs] == ["20260301", "20260302"]
    assert len(everything(runner.checkout / "joined/results")) == 2


def test_an_origin_that_takes_no_push_is_an_error_that_says_so(runner: Runner) -> None:
    hook = runner.origin / "hooks" / "pre-receive"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    runner.program("sleep", "#!/bin/sh\n")
    command = "echo line >> joined/results/file"
    done = runner.run(f".ci/results update Text bash -c {shlex.quote(command)}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "nothing was pushed to the branch results after 6 attempts"


def test_main_is_red_while_a_case_is_slower_than_it_was_and_nobody_has_accepted_that(runner: Runner) -> None:
    results = runner.checkout / "joined/results"
    for day in range(1, 13):
        measured(results, day, 10.0 if day < 7 else 11.0)
    name = "Is a case slower"
    done = runner.run_step("gpu", "publish", name, PUSH)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].startswith("SLOWER cpu: ")
    assert accept(runner, "joined/results", "keys are checked now").returncode == 0
    done = runner.run_step("gpu", "publish", name, PUSH)
    assert done.returncode == 0, done.stdout


def test_what_a_merge_refuses_makes_the_step_red_and_the_rest_is_kept(runner: Runner) -> None:
    artefact(runner, "a100", 1)
    damaged = runner.checkout / "artefacts/records-a100/verdicts/torn.jsonl"
    damaged.parent.mkdir()
    damaged.write_text('{"utc": "2026-')
    done = publish(runner)
    assert done.returncode == 1
    assert "torn.jsonl" in done.stderr
    assert [name for name in runner.branch() if "/runs/" in name]
    last = loaded("gpu")["jobs"]["publish"]["steps"]
    after = {one.get("name"): one.get("if") for one in last}
    assert evaluate(after["Was anything refused?"], {"steps": {"join": {"outcome": "failure"}}})


def test_a_run_that_was_red_before_its_bench_adds_nothing(runner: Runner) -> None:
    history(runner, 1)
    before = set(runner.branch())
    log = runner.checkout / "artefacts/records-a100" / LOG
    log.parent.mkdir(parents=True)
    log.touch()
    measured(runner.checkout / "results", 1)  # this commit brings a run along that the branch has already
    done = publish(runner)
    assert done.returncode == 0, done.stderr
    assert set(runner.branch()) - before == {"results/baselines/published.toml"}


def test_the_mutants_of_a_night_are_kept_beside_the_runs(runner: Runner) -> None:
    history(runner, 1)
    night = runner.checkout / "artefacts/results/mutants"
    night.mkdir(parents=True)
    jsonl.append(
        night / "20260302T000000Z-0123456789.jsonl", mutants.Header(FINGERPRINT, "python -m tests.mutants", {})
    )
    done = runner.run_step("mutants", "keep", "Join this night's records", PUSH)
    assert done.returncode == 0, done.stderr
    kept = list(runner.branch())
    assert "results/mutants/20260302T000000Z-0123456789.jsonl" in kept
    assert [name for name in kept if "/runs/" in name]


def test_the_first_run_has_no_history_and_says_so(runner: Runner) -> None:
    done = runner.run_step("gpu", "suites", "Records of all earlier runs", PUSH)
    assert (done.returncode, done.stdout) == (
        0,
        "origin has no branch results yet: results/ holds the records of this commit only\n",
    )


def test_a_run_sees_all_earlier_records_and_uploads_its_own_only(runner: Runner) -> None:
    history(runner, 1)
    later = runner.clone("later")
    done = later.run_step("gpu", "suites", "Records of all earlier runs", pull_request("synchronize", "gpu"))
    assert (done.returncode, done.stdout[:30]) == (0, "results/ holds the records of ")
    results = later.checkout / "results"
    measured(results, 2)
    for name in (LOG, "report/index.html", "runs/cpu/20260302T000000.000Z-0123456789.raw.jsonl.gz"):
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).touch()
    assert len(everything(results)) == 2
    done = later.run_step("gpu", "suites", "What this run has written", PUSH)
    assert done.returncode == 0, done.stderr
    assert names(later.checkout / "fresh") == [
        LOG,
        "runs/cpu/20260302T000000.000Z-0123456789.jsonl",
        "runs/cpu/20260302T000000.000Z-0123456789.raw.jsonl.gz",
    ]


def test_a_run_that_has_written_nothing_uploads_nothing(runner: Runner) -> None:
    runner.run_step("gpu", "suites", "Records of all earlier runs", PUSH)
    done = runner.run_step("gpu", "suites", "What this run has written", PUSH)
    assert (done.returncode, names(runner.checkout / "fresh")) == (0, [])


def accept(at: Runner, results: str, reason: str) -> Any:
    words = ["--gpu", "cpu", "--case", key().name, "--reason", reason, "--out", results]
    return at.run(shlex.join(["python", "-m", "benchmarks", "accept", *words]))


def test_a_level_is_accepted_on_the_branch_as_the_documentation_says(runner: Runner) -> None:
    """By its maintainer; CI's next run sees it, also where its commit brings an acceptance of its own along."""
    history(runner, 1, 2, 3, 4)
    case, reason = key().name, "keys are checked now"
    command = (
        f'.ci/results update "Accept {case} on cpu" python -m benchmarks accept'
        f' --gpu cpu --case "{case}" --reason "{reason}" --out joined/results'
    )
    documented = (fake_github.ROOT / "docs" / "containers.md").read_text()
    general = command.replace(case, "CASE").replace("cpu", "GPU").replace(reason, "REASON")
    assert general in documented.replace("\\\n    ", "")
    done = runner.run(command)
    assert done.returncode == 0, done.stderr
    found, damaged = accepted.read(runner.checkout / "joined/results")
    assert ([one.reason for one in found], damaged) == ([reason], [])
    assert found[0].who == "A Maintainer <a@example.org>"
    assert runner.git("log", "-1", "--format=%an: %s", "results", folder=runner.origin) == (
        f"A Maintainer: Accept {case} on cpu"
    )

    later = runner.clone("later")
    own = later.checkout / "results/baselines/accepted.jsonl"
    jsonl.append(own, dataclasses.replace(found[0], reason="of this commit"))
    own.write_text(own.read_text().rstrip("\n"))  # an editor has left out the line's end
    assert later.run(".ci/results fetch").returncode == 0
    assert [one.reason for one in accepted.read(later.checkout / "results")[0]] == ["of this commit", reason]


def test_an_acceptance_that_is_refused_pushes_nothing(runner: Runner) -> None:
    history(runner, 1)
    before = runner.git("rev-parse", "results", folder=runner.origin)
    done = runner.run(
        ".ci/results update Text python -m benchmarks accept --gpu cpu --case none --reason x --out joined/results"
    )
    assert done.returncode == 2
    assert "no case of NSA that cpu has measured is named 'none'" in done.stderr
    assert runner.git("rev-parse", "results", folder=runner.origin) == before


@pytest.mark.parametrize(
    ("contexts", "base"),
    [(PUSH, "last-measured"), (pull_request("labeled"), "HEAD^1")],
    ids=["push", "pull request"],
)
def test_the_chain_is_asked_for_what_the_event_needs(runner: Runner, contexts: dict[str, Any], base: str) -> None:
    runner.program("nox", '#!/bin/sh\nprintf "%s\\n" "$*"\n')
    done = runner.run_step("gpu", "suites", "Image, preflight", contexts)
    session, _, words = done.stdout.strip().partition(" -- ")
    assert session == "-s pipeline"
    arguments = containers.parser().parse_args(["pipeline", *words.split()])
    assert (arguments.family, arguments.base, arguments.engine) == ("a100", base, "docker")
    assert arguments.registry == "ghcr.io/owner/name"  # a registry's names are lower case


@pytest.mark.parametrize(
    ("contexts", "budget"),
    [
        (event("schedule"), "45m"),
        ({**event("schedule"), "vars": {"NSA_NIGHTLY_BUDGET": "1h30m"}}, "1h30m"),
        (PUSH, None),
        (event("workflow_dispatch"), None),
        (pull_request("labeled"), None),
    ],
    ids=["night", "a maintainer's night", "push", "by hand", "pull request"],
)
def test_a_night_has_a_budget_and_every_other_run_measures_all(
    runner: Runner, contexts: dict[str, Any], budget: str | None
) -> None:
    runner.program("nox", '#!/bin/sh\nprintf "%s\\n" "$*"\n')
    done = runner.run_step("gpu", "suites", "Image, preflight", contexts)
    assert done.returncode == 0, done.stderr
    words = done.stdout.strip().partition(" -- ")[2].split()
    assert containers.parser().parse_args(["pipeline", *words]).budget == budget


def test_a_night_rotates_by_the_records_of_the_nights_before() -> None:
    """What a night has measured is kept for the next one, which looks at it before it chooses."""
    names = [one.get("name", "") for one in loaded("gpu")["jobs"]["suites"]["steps"]]
    assert names.index("Records of all earlier runs") < names.index(
        "Image, preflight, tests, regress, bench, compare, report, comment"
    )
    night = event("schedule", ref="refs/heads/main")
    assert runs("gpu", "suites", night)
    assert runs("gpu", "publish", night)


def test_the_checks_upload_the_folder_that_their_bench_writes() -> None:
    session, _, rest = fake_github.step("checks", "checks", "Benches")["run"].partition(" -- ")
    assert session == "nox -s bench"
    arguments = bench.parser().parse_args(["run", *rest.partition(" 2>&1 ")[0].split()])
    uploaded = fake_github.step("checks", "checks", "Records and pages")["with"]["path"]
    assert arguments.out.is_relative_to(uploaded)


def test_what_a_killed_job_left_is_ended(runner: Runner) -> None:
    asked = runner.home / "asked"
    runner.program("docker", f'#!/bin/sh\necho "$@" >> {asked}\n[ "$1" = stop ] || echo one two\n')
    assert runner.run_step("gpu", "suites", "End what a killed job left", PUSH).returncode == 0
    assert asked.read_text().splitlines()[-1] == "stop one two"


def comment(at: Runner) -> list[dict[str, Any]]:
    """Runs both steps; every comment of the pull request afterwards."""
    for name in ("Write the comment", "Post it"):
        done = at.run_step("gpu", "comment", name, pull_request("synchronize", "gpu"))
        assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads((at.programs / "comments.json").read_text())
    return found


needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="gh brings jq; its stand-in needs the program")


def summaries(at: Runner, **texts: str) -> None:
    for gpu, text in texts.items():
        path = at.checkout / "summaries" / f"summary-{gpu}" / "summary.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@needs_jq
def test_a_pull_request_has_one_comment_which_is_kept_up_to_date(runner: Runner) -> None:
    strangers = [
        {"id": 1, "user": {"login": "somebody"}, "body": "<!-- nsa: speed of this pull request --> mine"},
        {"id": 2, "user": {"login": "github-actions[bot]"}, "body": "of another workflow"},
    ]
    (runner.programs / "comments.json").write_text(json.dumps(strangers))
    summaries(runner, a100="## RED: compare\n", h100="## GREEN\n")
    first = comment(runner)
    assert first[:2] == strangers
    assert first[2]["path"] == f"repos/{fake_github.REPOSITORY}/issues/7/comments"
    assert first[2]["body"].splitlines()[1:] == [
        "Commit 0123456789, [run and artefacts](https://github.com/owner/Name/actions/runs/1)",
        "",
        "# a100",
        "## RED: compare",
        "",
        "# h100",
        "## GREEN",
    ]
    summaries(runner, a100="## GREEN\n")
    second = comment(runner)
    assert [one["id"] for one in second] == [1, 2, 102]
    assert "RED" not in second[2]["body"]


@needs_jq
def test_a_comment_says_that_no_suite_came_to_its_summary(runner: Runner) -> None:
    assert comment(runner)[0]["body"].splitlines()[-1] == "No suite has ended with a summary."


def runs(workflow: str, job: str, contexts: dict[str, Any], suites: str = "success") -> bool:
    """Whether the job of this event runs, after the suites have ended so."""
    condition = loaded(workflow)["jobs"][job].get("if", "always()")
    return bool(evaluate(condition, {**contexts, "needs": {"suites": {"result": suites}}}, failed=suites != "success"))


FORK = pull_request("synchronize", "gpu", head="stranger/Name")


def test_a_fork_reaches_no_gpu_and_no_token(runner: Runner) -> None:
    assert not runs("gpu", "suites", FORK)
    for name in fake_github.WORKFLOWS:
        for job, found in loaded(name.stem)["jobs"].items():
            if "write" in found.get("permissions", {}).values() and "pull_request" in fake_github.triggers(
                loaded(name.stem)
            ):
                assert not runs(name.stem, job, FORK, suites="skipped"), job


@pytest.mark.parametrize(
    ("contexts", "wanted"),
    [
        (pull_request("labeled", "gpu", added="gpu"), True),
        (pull_request("labeled", "gpu", "docs", added="docs"), False),
        (pull_request("synchronize", "gpu"), True),
        (pull_request("synchronize"), False),
        (PUSH, True),
        (event("schedule"), True),
        ({**PUSH, "vars": {}}, False),
    ],
    ids=["labelled", "another label", "new push", "unlabelled", "merged", "nightly", "no runner"],
)
def test_the_suites_run_where_a_maintainer_wants_them(contexts: dict[str, Any], wanted: bool) -> None:
    assert runs("gpu", "suites", contexts) is wanted


@pytest.mark.parametrize("suites", ["success", "failure"])
def test_a_pull_request_gets_a_comment_and_main_gets_its_records(suites: str) -> None:
    labelled = pull_request("synchronize", "gpu")
    assert [runs("gpu", job, labelled, suites) for job in ("comment", "publish")] == [True, False]
    assert [runs("gpu", job, PUSH, suites) for job in ("comment", "publish")] == [False, True]


def group(workflow: str, contexts: dict[str, Any]) -> tuple[str, bool]:
    """The group that a run of this event belongs to, and whether it ends the one before."""
    concurrency = loaded(workflow)["concurrency"]
    cancel = rendered(str(concurrency["cancel-in-progress"]), contexts)
    return rendered(concurrency["group"], contexts), cancel == "True"


@pytest.mark.parametrize("workflow", ["checks", "gpu"])
def test_only_a_newer_push_of_the_same_pull_request_ends_a_run(workflow: str) -> None:
    first, second = (event("push", run_id=number) for number in (1, 2))
    assert group(workflow, first)[0] != group(workflow, second)[0]
    pushed = pull_request("synchronize", "gpu")
    later = {**pushed, "github": {**pushed["github"], "run_id": 2}}
    assert group(workflow, pushed) == group(workflow, later)
    assert group(workflow, pushed)[1]


def test_a_label_ends_no_run() -> None:
    running, labelled = pull_request("synchronize", "gpu"), pull_request("labeled", "gpu", "docs", added="docs")
    assert group("gpu", running)[0] != group("gpu", labelled)[0]


def test_the_packages_are_published_under_the_repositorys_own_name(runner: Runner) -> None:
    asked = runner.home / "asked"
    runner.program("docker", f'#!/bin/sh\necho "$@" >> {asked}\n[ "$1" = login ] && cat >> {asked} || true\n')
    runner.program("python3", f'#!/bin/sh\necho "$@" >> {asked}\n')
    for name in ("Log in", "Publish"):
        done = runner.run_step("images", "packages", name, PUSH)
        assert done.returncode == 0, done.stderr
    login, token, published = asked.read_text().splitlines()
    assert (login, token) == ("login ghcr.io --username someone --password-stdin", "secret")
    arguments = containers.parser().parse_args(published.split()[2:])
    assert (arguments.command, arguments.family) == ("publish", "a100")
    assert arguments.registry == "ghcr.io/owner/name"

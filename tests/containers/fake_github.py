"""GitHub for a machine that has none: its expressions, its events, and a bare repository in place of its server."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.repository import ROOT

yaml = pytest.importorskip("yaml")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
REPOSITORY = "owner/Name"

_TOKEN = re.compile(r"\s*('(?:[^']|'')*'|&&|\|\||[!=]=|[!(),]|[\w.*-]+)")
_WORDS = {"&&": "and", "||": "or", "!": "not"}


def loaded(name: str) -> dict[str, Any]:
    """A workflow by its file's name without the ending."""
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return found


def triggers(workflow: Mapping[Any, Any]) -> dict[str, Any]:
    """What starts it: YAML 1.1 reads the key `on` as true."""
    found: dict[str, Any] = workflow[True]
    return found


def step(workflow: str, job: str, name: str) -> dict[str, Any]:
    """The one step whose name begins so."""
    (found,) = [one for one in loaded(workflow)["jobs"][job]["steps"] if one.get("name", "").startswith(name)]
    result: dict[str, Any] = found
    return result


def evaluate(expression: str, contexts: Mapping[str, Any], *, failed: bool = False) -> Any:
    """An expression of a workflow, with what these contexts hold; an unknown name is empty, as it is there."""

    def look_up(name: str) -> Any:
        values: list[Any] = [contexts]
        for part in name.split("."):
            if part == "*":
                values = [inner for value in values for inner in value or ()]
            else:
                values = [value.get(part) if isinstance(value, Mapping) else None for value in values]
        return values if "*" in name else values[0]

    functions: dict[str, Callable[..., Any]] = {
        "always": lambda: True,
        "cancelled": lambda: False,
        "contains": lambda held, wanted: wanted in (held or ()),
        "format": lambda text, *values: text.format(*values),
        "fromJSON": json.loads,
    }
    words, asks_status = [], False
    for found in _TOKEN.finditer(expression.removeprefix("${{").removesuffix("}}")):
        word = found[1]
        if word in functions:
            asks_status |= word in ("always", "cancelled")
            words.append(f"functions[{word!r}]")
        elif re.match(r"[a-zA-Z]", word):
            words.append(f"look_up({word!r})")
        else:
            words.append(_WORDS.get(word, word))
    value = eval(" ".join(words), {"functions": functions, "look_up": look_up})
    return value if asks_status or not failed else False


def rendered(text: str, contexts: Mapping[str, Any]) -> str:
    """A value of a workflow with its expressions in place."""
    return re.sub(r"\$\{\{.*?\}\}", lambda found: str(evaluate(found[0], contexts)), text)


def event(name: str, **github: Any) -> dict[str, Any]:
    """The contexts of a run; `github` are values of its own."""
    ref = "refs/pull/7/merge" if name == "pull_request" else "refs/heads/main"
    common = {"event_name": name, "repository": REPOSITORY, "ref": ref, "run_id": 1, "token": "secret", "event": {}}
    return {"github": {**common, **github}, "inputs": {}, "vars": {"NSA_GPUS": '["a100"]'}, "matrix": {"gpu": "a100"}}


def pull_request(action: str, *labels: str, added: str | None = None, head: str = REPOSITORY) -> dict[str, Any]:
    """The contexts of an event of pull request 7 with these labels, from a branch of `head`."""
    number = {
        "number": 7,
        "head": {"repo": {"full_name": head}, "sha": "0123456789abcdef"},
        "labels": [{"name": label} for label in labels],
    }
    return event("pull_request", event={"action": action, "label": {"name": added}, "pull_request": number})


@dataclass(frozen=True)
class Runner:
    """A checkout of a bare repository, and a PATH whose first programs stand in for others."""

    origin: Path
    checkout: Path
    programs: Path
    home: Path

    def git(self, *words: str, folder: Path | None = None) -> str:
        """What git prints in the checkout."""
        command = ["git", "-C", str(folder or self.checkout), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=self.environment()
        ).stdout.strip()

    def environment(self, **more: str) -> dict[str, str]:
        """What a step sees: nothing of the caller's git, and stand-ins before all other programs."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "NSA_", "GITHUB_"))},
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),  # matplotlib's fonts
            "GIT_CONFIG_NOSYSTEM": "1",
            **more,
        }

    def run(self, block: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A step's script as the workflow's shell runs it."""
        shell = loaded("gpu")["defaults"]["run"]["shell"].replace("{0}", "-c").split()
        return subprocess.run(
            [*shell, block], cwd=self.checkout, capture_output=True, text=True, env=self.environment(**environment)
        )

    def run_step(
        self, workflow: str, job: str, name: str, contexts: Mapping[str, Any], **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A step of a workflow, with its own and its job's variables."""
        found = step(workflow, job, name)
        declared = {**loaded(workflow)["jobs"][job].get("env", {}), **found.get("env", {})}
        github = {
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTOR": "someone",
            "GITHUB_REPOSITORY": REPOSITORY,
            "GITHUB_RUN_ID": "1",
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_STEP_SUMMARY": str(self.home / "summary"),
        }
        values = {key: rendered(str(value), contexts) for key, value in declared.items()}
        return self.run(found["run"], **{**github, **values, **environment})

    def program(self, name: str, script: str) -> None:
        """A stand-in for a program."""
        path = self.programs / name
        path.write_text(script)
        path.chmod(0o755)

    def clone(self, name: str) -> Runner:
        """Another machine's checkout of the same repository."""
        checkout = self.checkout.with_name(name)
        subprocess.run(["git", "clone", "--quiet", str(self.origin), str(checkout)], check=True, env=self.environment())
        return Runner(self.origin, checkout, self.programs, self.home)

    def branch(self) -> dict[str, str]:
        """Every file of the branch `results` as origin has it."""
        names = self.git("ls-tree", "-r", "--name-only", "results", folder=self.origin).splitlines()
        return {name: self.git("show", f"results:{name}", folder=self.origin) for name in names}


def nox(*, pages: bool = False, meanwhile: str = "true") -> str:
    """`nox -s merge -- ...` without an environment of its own: 1 for every failure, as nox has it.

    Without `pages` it builds none, which takes seconds. Its first call runs `meanwhile` before its own work: what
    another machine does at that time.
    """
    return f"""#!{sys.executable}
import pathlib, subprocess, sys
called = pathlib.Path(sys.argv[0]).with_name("called")
if not called.exists():
    called.touch()
    subprocess.run(["bash", "-euc", {meanwhile!r}], check=True)
from benchmarks import __main__ as bench
from benchmarks.commands import merge
if not {pages}:
    merge.build_page = lambda results: None
sys.exit(bench.main([sys.argv[2], *sys.argv[sys.argv.index("--") + 1:]]) and 1)
"""


GH = f"""#!{sys.executable}
import json, pathlib, subprocess, sys
comments = pathlib.Path(sys.argv[0]).with_name("comments.json")
known = json.loads(comments.read_text()) if comments.exists() else []
words = sys.argv[2:]
value = lambda option: words[words.index(option) + 1] if option in words else None
(path,) = [word for word in words if word.startswith("repos/")]
if value("--method") is None:
    asked = subprocess.run(["jq", "-r", value("--jq")], input=json.dumps(known), text=True, capture_output=True)
    sys.stdout.write(asked.stdout)
    sys.exit(asked.returncode)
field, _, file = value("--field").partition("=@")
body = pathlib.Path(file).read_text()
if value("--method") == "POST":
    known.append({{"id": 100 + len(known), "user": {{"login": "github-actions[bot]"}}, field: body, "path": path}})
else:
    (one,) = [one for one in known if path.endswith(f"/issues/comments/{{one['id']}}")]
    one[field] = body
comments.write_text(json.dumps(known))
"""
"""`gh api` of a pull request's comments, which lie in comments.json beside it."""

GH_ISSUES = f"""#!{sys.executable}
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[0]).parent
file, asked = folder / "issues.json", folder / "asked"
known = json.loads(file.read_text()) if file.exists() else []
words = sys.argv[2:]
(path,) = [word for word in words if word.startswith("repos/")]
method = words[words.index("--method") + 1] if "--method" in words else "GET"
assert os.environ["GH_TOKEN"] == "secret"
asked.open("a").write(f"{{method}} {{path}}\\n")
if method == "GET":
    for one in known:
        print(json.dumps([one]))
    sys.exit()
sent = json.load(sys.stdin)
if (folder / "refused").exists() and (folder / "refused").read_text() in sent["title"]:
    sys.exit("gh: Validation Failed (HTTP 422)")
if method == "POST":
    user, number = {{"login": "github-actions[bot]"}}, len(known) + 1
    known.append({{"number": number, "user": user, "state": "open", "path": path, **sent}})
    print(json.dumps(known[-1]))
else:
    (one,) = [one for one in known if path.endswith(f"/issues/{{one['number']}}")]
    one.update(sent)
file.write_text(json.dumps(known))
"""
"""`gh api` of a repository's issues, which lie in issues.json beside it; a list comes in pages of one issue."""


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A first commit with what the steps need, pushed to main; no branch `results` yet."""
    made = Runner(tmp_path / "origin.git", tmp_path / "checkout", tmp_path / "programs", tmp_path / "home")
    for folder in (made.programs, made.home):
        folder.mkdir()
    (made.home / ".gitconfig").write_text("[user]\n\tname = A Maintainer\n\temail = a@example.org\n")
    made.program("nox", nox())
    made.program("gh", GH)
    subprocess.run(
        ["git", "init", "--quiet", "--bare", "-b", "main", str(made.origin)], check=True, env=made.environment()
    )
    made.clone("checkout")
    for name in (".ci/results", ".ci/alerts.py", ".gitignore", "results/baselines/published.toml"):
        (made.checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, made.checkout / name)
    made.git("checkout", "--quiet", "-b", "main")
    made.git("add", ".")
    made.git("commit", "--quiet", "--message", "first")
    made.git("push", "--quiet", "origin", "main")
    return made


def names(folder: Path, pattern: str = "*") -> list[str]:
    """Every file below a folder whose path is like `pattern`."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if fnmatch.fnmatch(name, pattern))

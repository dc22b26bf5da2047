"""One issue per alert: opened once, kept up to date, closed when the alert ends. Nothing is installed for it.

    python3 -m benchmarks alerts --out joined/results --file alerts.json
    python3 .ci/alerts.py alerts.json

It asks `gh`, with GH_TOKEN, for the issues of GITHUB_REPOSITORY that the workflows' account opened under the label
`LABEL`; the first line of each says which alert it is of. A second call with the same alerts changes nothing. An alert
that has ended without an issue gets none. The exit code is 1 where an issue could not be written; the others are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

LABEL = "slower"
AUTHOR = "github-actions[bot]"
_MARK = re.compile(r"<!-- nsa alert: ([a-z0-9-]+-[0-9A-Za-z.]+) -->")


def main(path: Path) -> int:
    """Bring the issues up to the alerts of a file."""
    repository = os.environ["GITHUB_REPOSITORY"]
    known = existing(repository)
    failed = 0
    for wanted in json.loads(path.read_text()):
        found = known.get(wanted["id"])
        try:
            said = write(repository, wanted, found)
        except subprocess.CalledProcessError as error:
            failed, said = 1, f"not written: {(error.stderr or '').strip()}"
        if said:
            print(f"{wanted['id']}: {said}")
    return failed


def existing(repository: str) -> dict[str, dict[str, Any]]:
    """The issue of each alert, the oldest where there are several."""
    said = gh("--paginate", f"repos/{repository}/issues?state=all&labels={LABEL}&per_page=100")
    found: dict[str, dict[str, Any]] = {}
    for issue in sorted(_items(said), key=lambda one: -one["number"]):
        mark = _MARK.match(issue.get("body") or "")
        if mark and issue["user"]["login"] == AUTHOR and "pull_request" not in issue:
            found[mark[1]] = issue
    return found


def _items(text: str) -> list[dict[str, Any]]:
    """gh prints the pages of a list one after the other, or as one list."""
    items, decoder, text = [], json.JSONDecoder(), text.strip()
    while text:
        page, end = decoder.raw_decode(text)
        items += page
        text = text[end:].strip()
    return items


def write(repository: str, wanted: dict[str, Any], found: dict[str, Any] | None) -> str:
    """Make the issue what it should be; what was done, "" for nothing."""
    issues, state = f"repos/{repository}/issues", "open" if wanted["open"] else "closed"
    text = {"title": wanted["title"], "body": wanted["body"]}
    if found is None:
        if not wanted["open"]:
            return ""
        made = json.loads(gh("--method", "POST", issues, "--input", "-", send={**text, "labels": [LABEL]}))
        return f"issue {made['number']} opened"
    same = (found["title"], (found["body"] or "").replace("\r\n", "\n").strip()) == (
        text["title"],
        text["body"].strip(),
    )
    if same and found["state"] == state:
        return ""
    gh("--silent", "--method", "PATCH", f"{issues}/{found['number']}", "--input", "-", send={**text, "state": state})
    done = "updated" if found["state"] == state else "closed" if state == "closed" else "opened again"
    return f"issue {found['number']} {done}"


def gh(*words: str, send: dict[str, Any] | None = None) -> str:
    """What `gh api` prints. Raises CalledProcessError."""
    text = None if send is None else json.dumps(send)
    return subprocess.run(["gh", "api", *words], input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

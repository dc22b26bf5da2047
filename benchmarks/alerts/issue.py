"""An alert as an issue of the repository's site, in Markdown: what a person needs to act on it, and its history.

Texts of records and of git go into code spans, so that they mention nobody and hold no markup.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.history.alerts import Alert, AlertCase, AlertState
from benchmarks.report.links import Link, Repository
from benchmarks.report.table import percent

MARK = "<!-- nsa alert: {} -->"
"""The first line of an issue says which alert it is of."""
_SHOWN_CASES, _SHOWN_COMMITS = 30, 20
_UNSAFE = re.compile(r"[`|\n\r\t ]+")
_ENDS = {
    AlertState.FIXED: "Fixed: ",
    AlertState.ACCEPTED: "Accepted: ",
    AlertState.NOT_REPRODUCED: "Not reproduced: ",
}


@dataclass(frozen=True)
class Issue:
    """What the issue of one alert is to be."""

    id: str
    """The alert's."""
    open: bool
    title: str
    body: str


def of(alert: Alert, repository: Repository) -> Issue:
    """The issue of an alert as it is now."""
    cases = alert.cases
    worst, count = cases[0], len(cases)
    where = f"{count} cases" if count > 1 else worst.case
    title = f"Slower on {alert.machine}: {where}, {percent(worst.change)} at worst ({_cause(alert)})"
    parts = [
        MARK.format(alert.id),
        f"{_ENDS.get(alert.state, '')}**{alert.state.value}**: {_code(alert.why)}",
        f"Cause: {_commits(alert, repository)}. Owner: {_code(alert.owner)}. Since {alert.opened[:10]}.",
        "\n".join(["| case | time, change | 95 % interval |", "|---|---|---|", *map(_row, cases[:_SHOWN_CASES])]),
    ]
    if count > _SHOWN_CASES:
        parts.append(f"and {count - _SHOWN_CASES} more cases")
    if commands := [command for command in alert.commands if not re.search(r"[`\n]", command)]:
        parts.append("To repeat it:\n\n```bash\n" + "\n".join(commands) + "\n```")
    history = [f"- {event.utc[:16]} {event.state.value}: {_code(event.why)}" for event in alert.history]
    parts.append("\n".join(history))
    return Issue(alert.id, alert.is_open, _UNSAFE.sub(" ", title), "\n\n".join(parts) + "\n")


def _cause(alert: Alert) -> str:
    if not alert.suspects:
        return "no commit"
    first, last = alert.suspects[0][:10], alert.suspects[-1][:10]
    return last if first == last else f"{first}..{last}"


def _commits(alert: Alert, repository: Repository) -> str:
    if not alert.suspects:
        return "no commit changes `nsa/` between the runs"
    named = ", ".join(_link(repository.commit(commit)) for commit in alert.suspects[-_SHOWN_COMMITS:])
    return named if len(alert.suspects) == 1 else f"one of {len(alert.suspects)} commits: {named}"


def _link(link: Link) -> str:
    return f"[`{link.text}`]({link.href})" if link.href else f"`{link.text}`"


def _row(case: AlertCase) -> str:
    interval = "–" if case.interval is None else " to ".join(map(percent, case.interval))
    return f"| {_code(case.case)} | {percent(case.change)} | {interval} |"


def _code(text: str) -> str:
    """A code span of one line; what would end it, or a cell of a table, is taken out."""
    return f"`{_UNSAFE.sub(' ', text).strip() or '–'}`"

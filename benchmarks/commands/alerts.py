"""`alerts`: one alert per cause of a slowdown, with its state, its owner and what repeats it (results/alerts/).

`update` brings the alerts up to the records: opens new ones, closes those whose level is back or accepted. `confirm`
does that too, then measures the new alerts of this machine again (`compare`, the last fast commit beside the suspect)
and finds the commit where several are suspect. A slowdown that does not come again is not_reproduced.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.ab import checkout, device_code, paired_run, result
from benchmarks.ab.device_code import DeviceCode
from benchmarks.ab.paired_run import CaseRules
from benchmarks.ab.result import ComparisonResult
from benchmarks.alerts import confirm, issue
from benchmarks.alerts.update import update
from benchmarks.cases.key import Key
from benchmarks.commands import accept, compare, options
from benchmarks.history import alerts
from benchmarks.history.alerts import Alert, AlertEvent
from benchmarks.report import links
from harness import fingerprint, jsonl, machines
from harness.machines import Machine
from nsa.io import atomic_write

SUMMARY = "one alert per cause of a slowdown: update them from the records, confirm them, find the commit"
MOST_ALERTS = 4
"""That one call confirms, the newest first: a cause takes minutes of the machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is to be done, and with which alert."""
    parser.add_argument("action", nargs="?", choices=("update", "confirm"), default="update", help="(default: update)")
    parser.add_argument("--alert", metavar="ID", help="confirm this open alert only, also one that is confirmed")
    parser.add_argument("--file", type=Path, metavar="FILE", help="write the issue of every alert there, as JSON")
    parser.add_argument("--repository-url", metavar="URL", help="where the issues show commits (default: git's origin)")
    options.add_gpu(parser)
    compare.add_pairs(parser)
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Update, confirm if asked to, print the open alerts; the last line of stdout is JSON."""
    results: Path = arguments.out
    if arguments.alert is not None and arguments.action != "confirm":
        raise ValueError("--alert goes with `alerts confirm`")
    options.check_writable(alerts.folder(results))
    added = update(results, accept.utc_now())
    if arguments.action == "confirm":
        added += _confirm(arguments, results)
    stored, damaged = alerts.read(results)
    for alert in stored:
        if alert.is_open:
            print(_line(alert))
    for line in damaged:
        print(f"not read: {line}")
    if arguments.file is not None:
        repository = links.Repository(arguments.repository_url or links.of_checkout())
        issues = [dataclasses.asdict(issue.of(alert, repository)) for alert in stored]
        atomic_write(arguments.file, json.dumps(issues, indent=1))
    summary = {
        "states": dict(Counter(alert.state.value for alert in stored)),
        "open": [alert.id for alert in stored if alert.is_open],
        "events": [f"{event.alert}: {event.state.value}" for event in added],
    }
    print(json.dumps(summary))
    return 0


def _confirm(arguments: argparse.Namespace, results: Path) -> list[AlertEvent]:
    """The events that came of measuring alerts again."""
    machine = machines.machine(arguments.gpu, machines.visible_gpu())
    waiting = _chosen(alerts.read(results)[0], machine, arguments.alert)
    if not waiting:
        return []
    options.check_writable(results / "verdicts")
    again = _Remeasure(machine, results, compare.rules_for(results, machine, arguments.pairs))
    if len(waiting) > MOST_ALERTS:
        print(f"{len(waiting) - MOST_ALERTS} more alerts wait for the next call: this one confirms {MOST_ALERTS}")
    return [event for alert in waiting[:MOST_ALERTS] for event in _events(alert, again, results)]


def _chosen(stored: Sequence[Alert], machine: Machine, named: str | None) -> list[Alert]:
    """The alerts to measure here, those that have waited longest first. ValueError where the one named is none."""
    device = fingerprint.device_name(machine)
    here = [alert for alert in stored if alert.is_open and alert.machine == machine.id]
    here = [alert for alert in here if any(case.device == device for case in alert.cases)]
    if named is None:
        new = [alert for alert in here if alert.state is alerts.AlertState.NEW]
        return sorted(new, key=lambda alert: alert.history[-1].utc)
    if not (found := [alert for alert in here if alert.id == named]):
        known = ", ".join(alert.id for alert in here) or "none"
        raise ValueError(f"--alert must name an open alert of {machine.id} on {device}; got {named!r}, open: {known}")
    return found


def _events(alert: Alert, again: _Remeasure, results: Path) -> Iterator[AlertEvent]:
    """Measure one alert, write what came of it as it comes."""
    print(f"{alert.id}: {', '.join(case.case for case in alert.cases[:3])}", flush=True)
    event = alert.history[-1]
    try:
        event, shown = confirm.confirm(alert, again.compare, accept.utc_now)
        if _append(results, event):
            yield event
        if shown is not None and len(alert.suspects) > 1:
            event = confirm.find_commit(alert, shown, again.compare, again.compile, accept.utc_now)
            if _append(results, event):
                yield event
    except ValueError as error:  # a commit that git does not have here
        now = alert.after(accept.utc_now())
        event = dataclasses.replace(event, utc=now, cases=(), why=f"not decided: {error}")
        if _append(results, event):
            yield event


def _append(results: Path, event: AlertEvent) -> bool:
    """What was said already is not said again."""
    print(f"{event.alert}: {event.state.value}: {event.why}", flush=True)
    return alerts.append(results, event, lambda now: now is None or (now.state, now.why) != (event.state, event.why))


class _Remeasure:
    """`compare` and the compiler, for the cases of alerts on this machine."""

    def __init__(self, machine: Machine, results: Path, rules: CaseRules) -> None:
        self._machine, self._results, self._rules = machine, results, rules
        self._keys = {key.name: key for key in options.nsa_cases(machine, ["*"])}
        self._compiled: dict[tuple[str, str], DeviceCode] = {}
        self.compile = self._compile if machine.device == "cuda" else None

    def compare(self, good: str, other: str, names: Sequence[str]) -> list[ComparisonResult]:
        """What `compare` says of these cases, kept as its results are; cases that today's suite lacks are left out."""
        keys = [self._keys[name] for name in names if name in self._keys]
        if not keys:
            return []
        with checkout.sources([good, other]) as (base, head):
            print(f"{good[:10]} against {other[:10]}", flush=True)
            found, interrupted = paired_run.measure(self._machine, keys, base, head, self._rules)
        path = result.path(self._results, found[0].utc, base.side, head.side)
        for one in found:
            jsonl.append(path, one)
        print(compare.table(found), flush=True)
        if interrupted:
            raise KeyboardInterrupt
        return found

    def _compile(self, commit: str, key: Key) -> DeviceCode:
        known = commit, key.identity  # a key itself has no hash
        if known not in self._compiled:
            with checkout.sources([commit]) as (side,):
                self._compiled[known] = device_code.of(side, key, device_code.visible_gpu())
        return self._compiled[known]


def _line(alert: Alert) -> str:
    """One alert, and below it the commands that repeat it."""
    count, suspects = len(alert.cases), alert.suspects
    cause = "no commit" if not suspects else suspects[-1][:10] if len(suspects) == 1 else f"{len(suspects)} commits"
    cases = f"{count} case{'s' * (count > 1)}, {alert.cases[0].change:+.1%} at worst"
    words = [f"{alert.state.value:<10} {alert.id:<24} {cases}", f"cause: {cause}", f"owner: {alert.owner}"]
    return "\n".join(["  ".join(words), *(f"  {command}" for command in alert.commands)])

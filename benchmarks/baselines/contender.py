"""Contenders: implementations of attention that installed packages offer to the benches by an entry point.

A package names a `Baseline` in its metadata, under the group `nsa.contenders`:

    [project.entry-points."nsa.contenders"]
    my-nsa = "my_package.contender:CONTENDER"

What is installed is read without importing anything (`installed`). `load` imports a package, so that only processes
that may hang or die do it: `benchmarks.contenders` starts one to ask what a contender is, and each contender is
measured in a process of its own.
"""

from __future__ import annotations

import dataclasses
import re
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint, entry_points

from benchmarks.baselines.baseline import Baseline, package_refusals

GROUP = "nsa.contenders"
_NAME = re.compile(r"(?!q\d+$|cold$|graph$)[a-z][a-z0-9-]*", re.ASCII)


class ContenderError(Exception):
    """A contender cannot be measured at all; the message names it and says why."""


def installed() -> dict[str, list[EntryPoint]]:
    """The entry points of the group by name, in order of names; more than one where two packages offer one name."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry not in (same := found.setdefault(entry.name, [])):  # one package may be found twice on sys.path
            same.append(entry)
    return found


def only_entry(name: str) -> EntryPoint:
    """The one entry point of this name. Raises ContenderError where there is none, or more than one."""
    entries = installed().get(name, [])
    if not entries:
        raise ContenderError(f"contender {name}: no installed package offers it (entry points {GROUP!r})")
    if len(entries) > 1:
        offers = " and ".join(f"{entry.value} of {entry.dist.name if entry.dist else '?'}" for entry in entries)
        raise ContenderError(f"contender {name}: {offers} have this name; uninstall one, or rename it")
    if not _NAME.fullmatch(name):
        raise ContenderError(
            f"contender {name}: a name must be of a-z, 0-9 and '-', begin with a letter, and not be a word of a case's"
            " name (cold, graph, q16)"
        )
    return entries[0]


def load(name: str) -> Baseline:
    """Import a contender. Raises ContenderError where that fails, or where it is not what it must be."""
    entry = only_entry(name)
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:
        raise ContenderError(f"contender {name}: {entry.value} cannot be imported: {_message(error)}") from error
    if not isinstance(found, Baseline):
        raise ContenderError(
            f"contender {name}: {entry.value} must be a benchmarks.baselines.Baseline; got {type(found).__name__}"
        )
    if found.name != name:
        raise ContenderError(f"contender {name}: {entry.value} calls itself {found.name!r}; give both one name")
    if (found.config is None) != (found.block_indices is None):
        raise ContenderError(
            f"contender {name}: config and block_indices must both be given (an NSA) or neither (dense attention):"
            " the oracle follows the blocks that were chosen, since rounding decides near-ties"
        )
    if found.refusals is package_refusals:  # its author says what it refuses: any other error is a fault
        found = dataclasses.replace(found, refusals=_no_refusals)
    return found


def _no_refusals(_name: str) -> AbstractContextManager[None]:
    return nullcontext()


def _message(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]

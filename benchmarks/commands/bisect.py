"""`bisect`: the first commit that made a case slower. GOOD is compared with BAD, then with commits between them.

Only commits that change nsa/ are asked, along the first parents. Exit code 0 where the commit was found, 1 where
several are left because some gave no answer, 2 where BAD is not slower than GOOD.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.ab import bisect, checkout, paired_run, result
from benchmarks.ab.result import CompareVerdict
from benchmarks.commands import compare, options
from harness import jsonl, machines

SUMMARY = "find the first commit that made a case slower"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The range and the case."""
    parser.add_argument("good", metavar="GOOD", help="a commit that is fast")
    parser.add_argument("bad", metavar="BAD", help="a later commit that is slow")
    parser.add_argument("--case", required=True, metavar="NAME", help="one case's name, as compare prints it")
    options.add_gpu(parser)
    compare.add_pairs(parser)
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """Ask commit by commit; the last line of stdout is JSON."""
    machine = machines.machine(arguments.gpu, machines.visible_gpu())
    keys = options.nsa_cases(machine, [arguments.case])
    if len(keys) != 1:
        raise ValueError(f"--case must name one case of NSA; {arguments.case!r} names {len(keys)}")
    rules = compare.rules_for(arguments.out, machine, arguments.pairs)
    options.check_writable(arguments.out / "verdicts")
    good, bad = checkout.resolve(arguments.good), checkout.resolve(arguments.bad)
    commits = checkout.first_parents(good, bad)

    def ask(commit: str) -> CompareVerdict:
        with checkout.sources([good, commit]) as (base, head):
            print(f"{good[:10]} against {commit[:10]}", flush=True)
            (found,), interrupted = paired_run.measure(machine, keys, base, head, rules)
            if interrupted:
                raise KeyboardInterrupt
        jsonl.append(result.path(arguments.out, found.utc, base.side, head.side), found)
        print(compare.table([found]), flush=True)
        return found.verdict

    if not commits:
        raise ValueError(f"no commit from {arguments.good} to {arguments.bad} changes nsa/ along the first parents")
    if (verdict := ask(bad)) is not CompareVerdict.SLOWER:
        raise ValueError(f"BAD must be SLOWER than GOOD on {arguments.case}; {arguments.bad} is {verdict.value}")
    suspects = bisect.first_slow(commits, ask)
    print(json.dumps({"suspects": suspects.commits, "asked": {c: v.value for c, v in suspects.verdicts.items()}}))
    return 0 if len(suspects.commits) == 1 else 1

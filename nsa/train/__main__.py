"""`python -m nsa.train run | status | preflight | compare`; see `--help` of each.

Exit codes: 0 done, 1 an error, 2 refused or a wrong argument, 3 stopped by an alarm, 4 another rank was lost,
86 stalled (the watchdog's), 143 saved and ended after SIGTERM (130 after SIGINT).
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from nsa.io import cannot_write
from nsa.train import distributed, memory_estimate, preflight, profile, run
from nsa.train.checkpoint import DamagedCheckpointError
from nsa.train.data import loader
from nsa.train.data.loader import NoFirstBatchError, Shard
from nsa.train.distributed import LostRankError
from nsa.train.monitoring.health import StoppedError
from nsa.train.settings import DATASETS, DEVICES, PARALLEL, PRECISIONS, Settings

REFUSED, ALARMED, LOST = 2, 3, 4
_SHORT = {
    "steps": "train.steps",
    "out_dir": "train.out_dir",
    "seed": "train.seed",
    "device": "runtime.device",
    "precision": "runtime.precision",
    "parallel": "runtime.parallel",
    "path": "data.path",
    "dataset": "data.dataset",
    "loader_timeout": "data.loader_timeout_s",
    "fwe_report_docs": "data.report_docs",
}
"""Options that are settings."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        return code
    except (LostRankError, StoppedError) as error:
        print(error, file=sys.stderr)
        return LOST if isinstance(error, LostRankError) else ALARMED
    except (ValueError, NoFirstBatchError, DamagedCheckpointError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    except OSError as error:
        if (message := cannot_write(error, "--out-dir (compare: --out)")) is None:
            raise
        print(message, file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    settings, read = _settings(options)
    outcome = run.run(settings, read, run.Options(options.resume, options.allow_toy), os.environ)
    if os.environ.get("RANK", "0") == "0":
        from nsa.train import report

        page = report.write_page(Path(settings.out_dir))
        print(f"{outcome.reason} after step {outcome.step}; {page}")
    return 0 if outcome.signal is None else 128 + outcome.signal


def _preflight(options: argparse.Namespace) -> int:
    """Everything that a run would be refused for, its data included; starts nothing."""
    settings, read = _settings(options)
    print(profile.table(settings))
    for note in (*settings.notes, *read.notes):
        print(f"note: {note}")
    trouble = None
    try:
        loader.Loader(settings, Shard()).close()
    except (ValueError, OSError, RuntimeError) as error:
        trouble = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    asked = preflight.plan_before_start(settings, data_trouble=trouble)
    print(f"{memory_estimate.num_parameters(settings):,} parameters, {settings.tokens_per_step:,} tokens per step")
    print(f"estimated peak {asked.peak_mem_mib:,.0f} MiB; checkpoints {asked.checkpoints_mib:,.0f} MiB")
    decision = preflight.check(asked, allow_toy=options.allow_toy)
    for refusal in decision.overridden:
        print(f"overridden by --allow-toy: {refusal}")
    print(f"{settings.profile} may start: {asked.length}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from nsa.train import report  # its pictures take a while to import

    print(report.text(options.folder))
    print(report.write_page(options.folder))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from nsa.train import compare

    print(compare.write(options.folders, options.out))
    return 0


def _settings(options: argparse.Namespace) -> tuple[Settings, profile.Environment]:
    read = profile.read_environment(os.environ)
    overrides: dict[str, Any] = {}
    for assignment in options.set:
        dotted, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set must be like train.lr=1e-4; got {assignment!r}")
        overrides[dotted] = yaml.safe_load(value)
    for option, dotted in _SHORT.items():
        if getattr(options, option) is not None:
            overrides[dotted] = getattr(options, option)
    if options.synthetic_on_fail:
        overrides["data.synthetic_on_fail"] = True
    if options.path is not None:
        overrides.setdefault("data.dataset", "files")
    return profile.load(options.profile, environment=read.values, overrides=overrides), read


class _Parser(argparse.ArgumentParser):
    """No option but by its whole name, and the nearest one in the error; the suites' own is `harness.arguments`, which
    this package does not import."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f' (did you mean {near[0]}?)' if near else ''}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m nsa.train", description=__doc__)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("run", help="train")
    _setting_options(training)
    training.add_argument("--resume", action="store_true", help="go on from the newest intact checkpoint")
    training.set_defaults(command=_run)
    checking = commands.add_parser("preflight", help="say what a run would be refused for")
    checking.add_argument("profile", metavar="PROFILE")
    _setting_options(checking, profile_as_option=False)
    checking.set_defaults(command=_preflight)
    showing = commands.add_parser("status", help="how a run stands, and its page")
    showing.add_argument("folder", type=Path, metavar="DIR")
    showing.set_defaults(command=_status)
    comparing = commands.add_parser("compare", help="runs side by side; the first is the baseline")
    comparing.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    comparing.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="of the .json and .svg, without suffix"
    )
    comparing.set_defaults(command=_compare)
    return parser


def _setting_options(parser: argparse.ArgumentParser, *, profile_as_option: bool = True) -> None:
    if profile_as_option:
        names = ", ".join(profile.names())
        parser.add_argument("--profile", required=True, metavar="NAME|FILE", help=f"{names}, or a .yaml file")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps")
    parser.add_argument("--seed", type=int, metavar="N", help="of the weights and of the order of the data")
    parser.add_argument("--out-dir", metavar="DIR", help="where everything is written (default: artifacts/PROFILE)")
    parser.add_argument("--device", help=f"one of {', '.join(DEVICES)}")
    parser.add_argument("--precision", help=f"one of {', '.join(PRECISIONS)}")
    parser.add_argument("--parallel", choices=PARALLEL, help="how several GPUs share the work")
    parser.add_argument("--dataset", choices=DATASETS, help="where the text comes from")
    parser.add_argument("--path", help="a file or folder of text, JSONL or Parquet")
    parser.add_argument("--loader-timeout", type=float, metavar="SECONDS", help="how long to wait for the first batch")
    parser.add_argument("--fwe-report-docs", type=int, metavar="N", help="say how far the loader is every N documents")
    parser.add_argument(
        "--synthetic-on-fail",
        action="store_true",
        help="train on random tokens if no batch comes within --loader-timeout",
    )
    parser.add_argument(
        "--allow-toy",
        action="store_true",
        help="start although preflight would refuse it as a waste; what cannot work is still refused",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting: train.lr=1e-4")


if __name__ == "__main__":
    exit_code = main()
    if distributed.world_size(os.environ) > 1 or threading.active_count() > 1:
        distributed.exit_with_threads(exit_code)
    sys.exit(exit_code)

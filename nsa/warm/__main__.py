"""`python -m nsa.warm`: compile ahead, into Triton's cache, the kernels that training, prompts and decoding need.

    python -m nsa.warm --profile h200_125m
    python -m nsa.warm --heads 64,4,128,128 --train 1x8192 --decode 32x65536 --architecture 9.0

With --architecture it needs no GPU. The cache is Triton's own, TRITON_CACHE_DIR or ~/.triton/cache: a process that
finds a kernel there compiles nothing. It serves one version of Triton and of these sources; after an upgrade run it
again.

Exit codes: 0 done, 1 a kernel could not be compiled or kept, 2 a wrong argument.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from nsa.config import NSAConfig
from nsa.workload import KINDS, Workload

try:
    from nsa.triton_backend import dispatch
    from nsa.warm import precompile
    from nsa.warm.workloads import DTYPES, launches, of_profile
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    sys.exit("python -m nsa.warm: Triton is not installed, and nothing can be compiled: pip install triton")

_FAILED, _REFUSED = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what the arguments name."""
    options = _parser().parse_args(arguments)
    try:
        architecture, sms = _gpu(options)
        wanted = _wanted(options)
        print(f"for compute capability {architecture / 10:.1f} ({sms or 'the usual number of'} multiprocessors):")
        for workload in wanted:
            print(f"  {workload}", flush=True)
        done = precompile.report(launches(wanted, architecture, sms), _say, options.jobs)
    except ValueError as error:
        print(f"python -m nsa.warm: {error}", file=sys.stderr)
        return _REFUSED
    if options.architecture is None:
        precompile.build_launcher(_say)
    return _FAILED if any(one.error is not None for one in done) else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _gpu(options: argparse.Namespace) -> tuple[int, int | None]:
    """(compute capability as in 90, multiprocessors): those of the GPU that is here unless they are given."""
    if dispatch.interpreted():
        raise ValueError("TRITON_INTERPRET must not be 1, since the interpreter compiles nothing")
    if options.sms is not None and options.sms < 1:
        raise ValueError(f"--sms must be at least 1; got {options.sms}")
    if options.architecture is not None:
        return _architecture(options.architecture), options.sms
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here: give --architecture (9.0 for an H100 or H200, 8.0 for an A100)")
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    return _architecture(f"{seen.major}.{seen.minor}"), options.sms or seen.multi_processor_count


def _architecture(given: str) -> int:
    """90 from "9.0" or "90"."""
    found = re.fullmatch(r"(\d{1,2})\.?(\d)", given, re.ASCII)
    if found is None or (int(found[1]), int(found[2])) < dispatch.MIN_CAPABILITY:
        raise ValueError(f"--architecture must be a compute capability of at least 8.0; got {given!r}")
    return 10 * int(found[1]) + int(found[2])


def _wanted(options: argparse.Namespace) -> list[Workload]:
    asked = [(kind, shape) for kind in KINDS for shape in getattr(options, kind)]
    if asked and options.heads is None:
        raise ValueError(f"--{asked[0][0]} needs --heads HQ,HKV,DK,DV")
    if options.heads is not None and not asked:
        raise ValueError("--heads needs --train, --prefill or --decode BxT")
    if not asked and not options.profile:
        raise ValueError("nothing is named: give --profile, or --heads with --train, --prefill or --decode")
    found = [of_profile(name) for name in options.profile]
    for kind, shape in asked:
        batch, tokens = _numbers(f"--{kind}", shape, "x", 2)
        num_heads, num_kv_heads, dk, dv = _numbers("--heads", options.heads, ",", 4)
        sizes = (num_heads, num_kv_heads, dk, dv)
        found.append(Workload(kind, batch, tokens, *sizes, NSAConfig(), DTYPES[options.dtype]))
    return found


def _numbers(option: str, given: str, separator: str, count: int) -> list[int]:
    parts = given.split(separator)
    if len(parts) != count or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"{option} must be {count} numbers with {separator!r} between them; got {given!r}")
    return [int(part) for part in parts]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa.warm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    repeated: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--profile", metavar="NAME|FILE", help="a training profile of nsa.train", **repeated)
    parser.add_argument(
        "--heads",
        metavar="HQ,HKV,DK,DV",
        help="query heads, key heads, channels of keys and of values of the shapes named",
    )
    parser.add_argument("--train", metavar="BxT", help="forward and backward of B sequences of T tokens", **repeated)
    parser.add_argument("--prefill", metavar="BxT", help="forward alone", **repeated)
    parser.add_argument(
        "--decode",
        metavar="BxT",
        help="one more token for each of B sequences that have T - 1, in a cache of T",
        **repeated,
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the shapes (default: bf16)")
    parser.add_argument("--architecture", metavar="9.0", help="compute capability (default: that of the GPU here)")
    parser.add_argument(
        "--sms",
        type=int,
        metavar="N",
        help="its multiprocessors (default: those of the GPU here, else the usual number), which decoding depends on",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one for each core)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

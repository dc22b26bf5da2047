"""`tune`: look for faster tiles of the kernels on this GPU, and write the architecture's table and how it was found.

Each candidate is compiled first and dropped where it does not fit the GPU's shared memory, then held to the result of
the table's own launch, then timed. Without a GPU, `--dry-run --architecture 89` lists the candidates that fit.
The table is `nsa/triton_backend/tables/sm<architecture>.json`; every trial is a line in `results/tuning/`.
"""

from __future__ import annotations

import argparse

from benchmarks.cases import inputs
from benchmarks.commands import options

SUMMARY = "find faster tiles of the kernels on this GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For which heads, length and kernels."""
    parser.add_argument(
        "--heads", default="64,4,128,128", metavar="HQ,HKV,DK,DV", help="heads and their channels (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="length to time (%(default)s)")
    parser.add_argument(
        "--inputs",
        choices=inputs.KINDS,
        default="random",
        help="random ones share the fewest blocks; recorded ones as many as a trained model's (%(default)s)",
    )
    parser.add_argument("--kernels", metavar="A,B", help="names in the table (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates that fit; needs no GPU")
    parser.add_argument("--architecture", type=int, help="compute capability, such as 89 (default: this GPU's)")
    options.add_out(parser)


def main(arguments: argparse.Namespace) -> int:
    """ValueError where there is no Triton, or no GPU for what needs one."""
    try:
        from benchmarks.tuning import run
    except ImportError as error:
        raise ValueError(f"tune needs Triton, which cannot be imported ({error})") from error
    return run.run(arguments)

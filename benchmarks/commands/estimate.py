"""`estimate`: times of GPUs that nobody has measured, from disassembled kernels and a calibration on Hopper's records.

With --compile every kernel is compiled and counted again, which takes some ten minutes of a processor and no GPU, and
needs the table's architectures alone; without it the counts of results/estimates/kernels.json are used.
"""

from __future__ import annotations

import argparse

from tqdm import tqdm

from benchmarks.commands import options

SUMMARY = "estimate, without a GPU, how fast the kernels are on GPUs that nobody has measured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--out, --compile."""
    options.add_out(parser)
    parser.add_argument("--compile", action="store_true", help="compile and count the kernels again")


def main(arguments: argparse.Namespace) -> int:
    """Write results/estimates/. Raises ValueError where there is nothing to estimate from."""
    try:
        import triton

        from benchmarks.estimates import estimates, kernel_table, kernels, stored
    except ImportError as error:
        raise ValueError(f"estimate needs Triton, which cannot be imported ({error})") from error

    options.check_writable(arguments.out / "estimates")
    if arguments.compile:
        found = kernels.compiled(kernels.ARCHITECTURES, kernels.HEADS)
        listed = tuple(tqdm(found, "kernels", unit="kernel", dynamic_ncols=True, disable=None))
        kernel_table.write(arguments.out, kernel_table.KernelTable(triton.__version__, listed))
    elif not kernel_table.path(arguments.out).exists():
        raise ValueError(f"--out: {kernel_table.path(arguments.out)} is missing; `estimate --compile` writes it")
    made = estimates.make(arguments.out, kernel_table.read(arguments.out))
    print(stored.write(arguments.out, made))
    return 0

"""The command line of the benches.

    python -m benchmarks run            recognise the machine, measure its suite, write records, build the page
    python -m benchmarks run --quick    the same on fewer shapes with fewer samples
    python -m benchmarks report         build the page again from the records
    python -m benchmarks results        write the tables of docs/results.md from the records
    python -m benchmarks compare BASE   is the working tree slower than BASE? (compare BASE HEAD: two commits)
    python -m benchmarks comment        the newest comparison as Markdown, for a pull request
    python -m benchmarks bisect GOOD BAD --case NAME    which commit made it slower?
    python -m benchmarks alerts         one alert per cause of a slowdown; `alerts confirm` measures new ones again
    python -m benchmarks calibrate      how often compare is right on this machine; sets its thresholds
    python -m benchmarks backtest --gpu NAME    are its calls right? replayed from the pairs that calibrate recorded
    python -m benchmarks merge FOLDER...    join the results of several runners
    python -m benchmarks first-contact  a machine without history: checks, laws, incidents, quick suite, calibration
    python -m benchmarks bundle verify FILE     what first-contact packed elsewhere; `bundle merge` takes its records
    python -m benchmarks samples RUN    every sample of a run, where they still are
    python -m benchmarks convert        bring records of earlier versions into today's form
    python -m benchmarks accept --case NAME --reason TEXT    take the level that a case has now as its baseline;
                                        --first instead of --case: of all cases that have none yet
    python -m benchmarks export FOLDER  cases and records as flashinfer-bench reads them
    python -m benchmarks import FOLDER  bring records back from what `export` wrote
    python -m benchmarks atlas          what a trained model selects; whether it answers as well as a dense one
    python -m benchmarks estimate       how fast the kernels may be on GPUs that nobody has measured
    python -m benchmarks tune           find faster tiles of the kernels on this GPU; writes its table
    python -m benchmarks fit-inputs     fit the inputs `recorded` to an atlas of what a trained model selects

Exit code: 0 where all is well; 1 where the command's answer is no, or incomplete: NSA is wrong on a case (run,
compare), slower or needs more memory (compare), something was refused, missed or left open (each command's --help says
what); 2 for a wrong argument, another machine, or a run in which no case of NSA got a figure; 130 where the command was
interrupted, which keeps what it finished. A baseline that is wrong or broken fails no run; the last line of `run`,
which is JSON, names it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from benchmarks import broken_sources

with broken_sources.named():
    from benchmarks.commands import (
        accept,
        alerts,
        atlas,
        backtest,
        bisect,
        bundle,
        calibrate,
        comment,
        compare,
        convert,
        estimate,
        export,
        first_contact,
        fit_inputs,
        import_,
        merge,
        report,
        results,
        run,
        samples,
        tune,
    )
    from harness import environment, machines
    from harness.arguments import Parser
    from harness.interrupt import INTERRUPTED
    from nsa.io import cannot_write

COMMANDS = {
    "run": run,
    "report": report,
    "results": results,
    "compare": compare,
    "comment": comment,
    "bisect": bisect,
    "calibrate": calibrate,
    "backtest": backtest,
    "accept": accept,
    "alerts": alerts,
    "atlas": atlas,
    "merge": merge,
    "first-contact": first_contact,
    "bundle": bundle,
    "samples": samples,
    "convert": convert,
    "export": export,
    "import": import_,
    "tune": tune,
    "estimate": estimate,
    "fit-inputs": fit_inputs,
}


def parser() -> argparse.ArgumentParser:
    """The arguments, each with its default."""
    top = Parser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.SUMMARY, description=module.__doc__))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    arguments = parser().parse_args(argv)
    try:
        environment.check()
        return COMMANDS[arguments.command].main(arguments)
    except (machines.WrongMachineError, ValueError) as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # what reads our output has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        message = cannot_write(error, "--out") or f"{error.filename}: {error.strerror}"
        print(f"python -m benchmarks: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m benchmarks: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled job also ends its children and folders
    sys.exit(main())

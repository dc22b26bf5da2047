"""`python -m nsa.integrations.transformers convert SOURCE TARGET`: a dense Llama checkpoint as NSA.

Exit codes: 0 done, 1 a folder that cannot be read or written, 2 refused or a wrong argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from nsa.config import NSAConfig
from nsa.integrations.transformers.conversion import convert
from nsa.io import cannot_write


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    letters = {field.name: getattr(options, field.name) for field in fields(NSAConfig)}
    try:
        print(convert(options.source, options.target, NSAConfig(**letters), shared_kv=options.shared_kv))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(cannot_write(error, "TARGET") or error, file=sys.stderr)
        return 1
    print(f"{options.target}: AutoModelForCausalLM loads it after `import nsa.integrations.transformers`")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nsa.integrations.transformers", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    converting = commands.add_parser("convert", help="a dense Llama checkpoint as NSA", allow_abbrev=False)
    converting.add_argument("source", type=Path, metavar="SOURCE", help="a folder with config.json and safetensors")
    converting.add_argument("target", type=Path, metavar="TARGET", help="a folder that is not there yet")
    for field in fields(NSAConfig):
        converting.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, metavar="N"
        )
    converting.add_argument("--shared-kv", action="store_true", help="keep keys and values once for all branches")
    return parser


if __name__ == "__main__":
    sys.exit(main())

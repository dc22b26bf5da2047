"""`python -m nsa.integrations.transformers convert SOURCE TARGET`: a dense Llama checkpoint as NSA.

Exit codes: 0 done, 1 a folder that cannot be read or written, 2 refused or a wrong argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from nsa.config import PHIS, NSAConfig
from nsa.integrations.transformers.configuration import ATTENTION_FIELDS
from nsa.integrations.transformers.conversion import convert
from nsa.io import cannot_write

_MOST = 2**31 - 1
"""The largest size of a block or a window that is taken."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    settings = {field.name: getattr(options, field.name) for field in fields(NSAConfig)}
    try:
        print(convert(options.source, options.target, NSAConfig(**settings), shared_kv=options.shared_kv))
    except ValueError as error:
        print(_one_line(error), file=sys.stderr)
        return 2
    except OSError as error:
        print(cannot_write(error, "TARGET") or _one_line(error), file=sys.stderr)
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
        option, name = f"--{field.name.replace('_', '-')}", f"{ATTENTION_FIELDS[field.name]} (default: {field.default})"
        if field.name == "phi":
            converting.add_argument(option, choices=PHIS, default=field.default, help=name)
        else:
            converting.add_argument(option, type=_size, default=field.default, metavar="N", help=name)
    converting.add_argument("--shared-kv", action="store_true", help="keep keys and values once for all branches")
    return parser


def _size(text: str) -> int:
    """An int that a tensor's size can be; argparse names the option."""
    if (size := int(text)) > _MOST:
        raise argparse.ArgumentTypeError(f"must be at most {_MOST}; got {text}")
    return size


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())

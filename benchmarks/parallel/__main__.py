"""Attention over several GPUs, or CPU processes, beside one of them.

    torchrun --nproc_per_node=2 -m benchmarks.parallel --tokens 262144 --heads 64 4 --head-dims 128 128

Prints one line of JSON; `--out FILE` adds it to a file. Exit code 1 where the ranks do not give what one does.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh

from benchmarks.correctness.verify import IncorrectError
from benchmarks.parallel.measure import Shape, measure
from harness.arguments import Parser
from nsa.io import append_line, to_json
from nsa.train import distributed


def parser() -> argparse.ArgumentParser:
    """The arguments, each with its default."""
    found = Parser(prog="python -m benchmarks.parallel", description=__doc__)
    found.add_argument("--tokens", type=int, required=True, help="of the sequence")
    found.add_argument("--heads", type=int, nargs=2, default=[64, 4], metavar=("HQ", "HKV"))
    found.add_argument("--head-dims", type=int, nargs=2, default=[128, 128], metavar=("DK", "DV"))
    found.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    found.add_argument("--documents", type=int, nargs="+", help="tokens of each packed document")
    found.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--samples", type=int, default=10)
    found.add_argument("--no-alone", action="store_true", help="the sequence does not fit on one rank")
    found.add_argument("--check-tokens", type=int, help="compare at this length, where one rank cannot do all")
    found.add_argument("--out", type=Path, help="a file of JSON lines")
    return found


def main() -> int:
    asked = parser().parse_args()
    documents = None if asked.documents is None else tuple(asked.documents)
    if documents is not None and sum(documents) != asked.tokens:
        parser().error(f"--documents must add up to the {asked.tokens} tokens; got {sum(documents)}")
    (heads, num_kv_heads), (head_dim_k, head_dim_v) = asked.heads, asked.head_dims
    shape = Shape(asked.tokens, heads, num_kv_heads, head_dim_k, head_dim_v, asked.dtype, documents)
    with distributed.process_group(os.environ, asked.device == "cuda") as own:
        if not own.several:
            parser().error("start it with torchrun and at least 2 ranks")
        mesh = init_device_mesh(asked.device, (own.ranks,), mesh_dim_names=("context",))
        try:
            measured = measure(
                mesh, shape, backend=asked.backend, samples=asked.samples, alone=not asked.no_alone,
                check_tokens=asked.check_tokens,
            )  # fmt: skip
        except IncorrectError as error:
            print(f"rank {own.rank}: {error}", file=sys.stderr)
            return 1
        if own.first:
            line = to_json(dataclasses.asdict(measured))
            print(line)
            if asked.out is not None:
                append_line(asked.out, line)
    return 0


if __name__ == "__main__":
    distributed.exit_with_threads(main())

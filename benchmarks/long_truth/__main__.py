"""Long sequences against float64, on one GPU or, under torchrun, on several that share each sequence.

    python -m benchmarks.long_truth --sizes                        which tensors cross 2^31 elements; runs nothing
    python -m benchmarks.long_truth --tokens 131072 262144 524288
    torchrun --nproc_per_node=2 -m benchmarks.long_truth --tokens 524288
    python -m benchmarks.long_truth --device cpu --tokens 4096 --shapes 4x2x32

Sampled rows of the output, of the choice of blocks, of dq and of dgates, and every row of dk and dv; the blocks chosen
hold at least 99.9 % of the scores that the float64 choice holds; rotary positions and bounds of packed documents past
2^24. Prints progress and a table, and writes a summary below results/laws. Exit code 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import inputs
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import OracleCheck
from benchmarks.long_truth import check, compression, positions, sizes
from benchmarks.long_truth.check import LongTruth, Say
from harness import environment, fingerprint, machines
from harness.arguments import Parser
from harness.fingerprint import Fingerprint
from nsa import NSAConfig
from nsa.io import atomic_write
from nsa.parallel import ContextParallel
from nsa.train import distributed

_Found = TypeVar("_Found")
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)(?::(\d+))?", re.ASCII)
_PACKED_SHAPE = "2x1x16"
"""Of the packed documents: small, since 2^24 tokens are many."""
_SHORT_DOCUMENT = 129
"""Tokens of a packed document on a CPU, where 2^24 tokens take hours: the bound to pass is lowered too."""


def parser() -> argparse.ArgumentParser:
    """The arguments, each with its default."""
    found = Parser(
        prog="python -m benchmarks.long_truth", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    found.add_argument("--tokens", type=int, nargs="+", default=[131072, 262144, 524288])
    found.add_argument("--shapes", nargs="+", default=["64x4x128"], metavar="HQxHKVxDK[:DV]")
    found.add_argument("--inputs", choices=inputs.KINDS, default="random")
    found.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    found.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--forward", action="store_true", help="no gradients, for lengths that only then fit")
    found.add_argument("--pairs", type=float, help="(query, key) pairs to compare: more rows take longer")
    found.add_argument("--seed", type=int, default=1, help="of inputs, rows and the gradient of the output")
    found.add_argument("--no-positions", action="store_true", help="leave out rotary positions and packed documents")
    found.add_argument("--compression", action="store_true", help="compressed keys past 2^31 elements too: 70 GiB")
    found.add_argument("--sizes", action="store_true", help="print which tensors cross 2^31 elements, and run nothing")
    found.add_argument(
        "--out",
        type=Path,
        help=f"folder whose laws/ gets the summary (default: {environment.read().results}; on a CPU none)",
    )
    return found


def case(asked: argparse.Namespace, shape: str, tokens: int) -> Key:
    """The key of a shape ("64x4x192:128") and a length. Raises ValueError for what is no shape."""
    found = _SHAPE.fullmatch(shape)
    if found is None:
        raise ValueError(f"--shapes must be like 64x4x128 or 64x4x192:128; got {shape!r}")
    heads, num_kv_heads, head_dim_k = (int(x) for x in found.groups()[:3])
    if heads % num_kv_heads:
        raise ValueError(f"--shapes: the query heads must be a multiple of the key/value heads; got {shape!r}")
    mode = "prefill-forward" if asked.forward else "prefill-forward-backward"
    return Key(
        mode, NSA, asked.backend, asked.dtype, 1, tokens, tokens, heads, num_kv_heads, head_dim_k,
        int(found[4] or head_dim_k), dataclasses.asdict(NSAConfig()), inputs=asked.inputs,
    )  # fmt: skip


def main() -> int:
    asked = parser().parse_args()
    try:
        keys = [case(asked, shape, tokens) for shape in asked.shapes for tokens in asked.tokens]
    except ValueError as error:
        parser().error(str(error))
    if asked.sizes:
        print(sizes.table(keys, backward=not asked.forward))
        return 0
    with distributed.process_group(os.environ, asked.device == "cuda") as own:
        context = None
        if own.several:
            context = ContextParallel(init_device_mesh(asked.device, (own.ranks,), mesh_dim_names=("context",)))
        say: Say = _line if own.first else _silent
        summary = run(asked, keys, context, say)
        if own.first:
            _write(asked, summary)
        return 1 if summary["failed"] else 0


def run(
    asked: argparse.Namespace, keys: Sequence[Key], context: ContextParallel | None = None, say: Say = print
) -> dict[str, Any]:
    """Check every case; the summary, as results/laws has them: a test is a check of a tensor."""
    machine = machines.machine(machines.CPU if asked.device == "cpu" else None, machines.visible_gpu())
    identity = fingerprint.take(machine.id, machine.device)
    ranks = 1 if context is None else context.ranks
    summary = _Summary(ranks, say)
    begin = time.perf_counter()
    for key in keys:
        summary.add(key.case, partial(_checked, key, asked, context, say))
    if not asked.no_positions:
        summary.add_checks("rotary positions", lambda: [positions.rotary(torch.device(asked.device))])
        length, past = _packed_size(asked.device)
        of_documents, compared = positions.packed(case(asked, _PACKED_SHAPE, 1), length, past)
        summary.add(
            f"{_PACKED_SHAPE}, documents past token {past:,}",
            partial(_checked, of_documents, asked, context, say, compared),
        )
    if asked.compression:
        dtype = getattr(torch, asked.dtype)
        summary.add_checks("compression", lambda: compression.check(torch.device(asked.device), dtype))
    return summary.content(identity, asked, round(time.perf_counter() - begin, 1))


def _packed_size(device: str) -> tuple[int, int]:
    """Tokens of a document, and the token that the last ones lie behind."""
    if device == "cpu":
        return _SHORT_DOCUMENT, 16 * _SHORT_DOCUMENT
    return positions.DOCUMENT_TOKENS, positions.FLOAT32_EXACT


def _checked(
    key: Key, asked: argparse.Namespace, context: ContextParallel | None, say: Say,
    compared: Sequence[tuple[int, int]] | None = None,
) -> LongTruth:  # fmt: skip
    device = torch.device(asked.device)
    return check.check(
        key, device, backward=not asked.forward, compared=compared, seed=asked.seed, most_pairs=asked.pairs,
        context=context, say=say,
    )  # fmt: skip


class _Summary:
    """What passed and failed so far."""

    def __init__(self, ranks: int, say: Say) -> None:
        self._ranks, self._say = ranks, say
        self._counts: dict[str, Counter[str]] = {}
        """Of each case."""
        self._failures: list[str] = []
        self._not_run: dict[str, str] = {}
        self._cases: list[dict[str, Any]] = []

    def count(self, case: str, check: str, *, passed: bool) -> None:
        """One check, as a test in a file that is the case."""
        self._counts.setdefault(case, Counter())["passed" if passed else "failed"] += 1
        if not passed:
            self._failures.append(f"{case}::{check}")

    def add(self, name: str, measure: Callable[[], LongTruth]) -> None:
        """One case."""
        found = self._tried(name, measure)
        if found is None:
            return
        for one in found.checks:
            self.count(name, one.name, passed=one.passed)
        self._say(_table(name, found))
        told = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "checks"}
        checks = {one.name: [one.error, one.budget] for one in found.checks}
        self._cases.append({**told, "name": name, "checks": checks})

    def add_checks(self, name: str, measure: Callable[[], Sequence[OracleCheck]]) -> None:
        """Checks that are no case."""
        for one in self._tried(name, measure) or ():
            self.count(name, one.name, passed=one.passed)
            self._say(f"{one.name}: {_error(one)} of {one.budget:.3g} allowed")

    def _tried(self, name: str, measure: Callable[[], _Found]) -> _Found | None:
        """What it gives. Alone this process goes on after an error, and skips what does not fit; with others it ends,
        since they would wait for it."""
        try:
            return measure()
        except Exception as error:
            if self._ranks > 1:
                raise
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if isinstance(error, torch.OutOfMemoryError):
                self._not_run[name] = why
            else:
                self.count(name, why, passed=False)
            self._say(f"{name}: {why}")
            return None

    def content(self, identity: Fingerprint, asked: argparse.Namespace, seconds: float) -> dict[str, Any]:
        """The summary as it is written."""
        return {
            "utc": identity.utc,
            "seconds": seconds,
            "passed": sum(counts["passed"] for counts in self._counts.values()),
            "failed": len(self._failures),
            "skipped": len(self._not_run),
            "failures": self._failures,
            "skipped_because": self._not_run,
            "files": {case: dict(counts) for case, counts in self._counts.items()},
            "ranks": self._ranks,
            "command": _command(self._ranks),
            "seed": asked.seed,
            "fingerprint": dataclasses.asdict(identity),
            "cases": self._cases,
        }


def _command(ranks: int) -> str:
    start = ["python"] if ranks == 1 else ["torchrun", f"--nproc_per_node={ranks}"]
    arguments = sys.argv[1:]
    if "--out" in arguments:  # a folder of this machine
        place = arguments.index("--out")
        del arguments[place : place + 2]
    return shlex.join([*start, "-m", "benchmarks.long_truth", *arguments])


def _table(name: str, found: LongTruth) -> str:
    peak = "" if found.peak_gib is None else f", peak {found.peak_gib:.1f} GiB"
    lines = [
        f"{name} by {found.path}: {found.rows} rows; call {found.call_s:.1f} s, float64 {found.truth_s:.1f} s{peak}",
        f"  past 2^31 elements: {', '.join(found.crossed) or 'no tensor'}; least mass {found.mass:.6f}",
    ]
    for one in found.checks:
        lines.append(f"  {'ok   ' if one.passed else 'WRONG'} {one.name:<42} {_error(one):>10} of {one.budget:.3g}")
    return "\n".join(lines)


def _error(one: OracleCheck) -> str:
    return "not finite" if one.error is None else f"{one.error:.3g}"


def _write(asked: argparse.Namespace, summary: dict[str, Any]) -> None:
    """The summary below laws/, and the last line, which says where."""
    folder = asked.out or (environment.read().results if asked.device == "cuda" else None)
    path = None
    if folder is not None:
        identity = summary["fingerprint"]
        day, moment = summary["utc"][:10].replace("-", ""), summary["utc"][11:19].replace(":", "")
        commit = (identity["commit"] or "0" * 10)[:10]
        suffix = "" if summary["ranks"] == 1 else f"-{summary['ranks']}-ranks"
        path = Path(folder) / "laws" / f"{identity['machine']}-{day}-{commit}-long-truth{suffix}-{moment}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(summary, indent=1) + "\n")
    told = {name: summary[name] for name in ("passed", "failed", "skipped", "failures", "seconds")}
    print(json.dumps({**told, "summary": None if path is None else str(path)}))


def _line(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    pass


if __name__ == "__main__":
    distributed.exit_with_threads(main())

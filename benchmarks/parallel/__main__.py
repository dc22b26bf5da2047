"""Attention over several GPUs, or CPU processes, beside one of them: records like those of `python -m benchmarks run`.

    torchrun --nproc_per_node=2 -m benchmarks.parallel --tokens 131072 262144 --heads 64 4 --head-dims 128 128

Rank 0 prints a line per case and, last, one of JSON that names the file of the records. Exit code 1 where the ranks do
not give what one does, or that one not what float64 does: the record then says so, and has no figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections import Counter
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.cases import inputs
from benchmarks.cases.key import CONTEXT_PARALLEL, NSA, Key
from benchmarks.correctness.verify import IncorrectError
from benchmarks.history import run_file
from benchmarks.history.records import Record
from benchmarks.history.samples import RawSamples
from benchmarks.parallel import record
from benchmarks.parallel.measure import measure
from harness import environment, fingerprint, machines
from harness.arguments import Parser
from nsa import NSAConfig
from nsa.train import distributed


def parser() -> argparse.ArgumentParser:
    """The arguments, each with its default."""
    found = Parser(prog="python -m benchmarks.parallel", description=__doc__)
    found.add_argument("--tokens", type=int, nargs="+", required=True, help="of each sequence")
    found.add_argument("--heads", type=int, nargs=2, default=[64, 4], metavar=("HQ", "HKV"))
    found.add_argument("--head-dims", type=int, nargs=2, default=[128, 128], metavar=("DK", "DV"))
    found.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    found.add_argument("--inputs", choices=inputs.KINDS, nargs="+", default=["random"])
    found.add_argument("--documents", type=int, nargs="+", help="tokens of each packed document of the one length")
    found.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--samples", type=int, default=10)
    found.add_argument("--seed", type=int, default=1, help="of the rows that are compared")
    found.add_argument("--no-alone", action="store_true", help="the sequence does not fit on one rank")
    found.add_argument("--check-tokens", type=int, help="compare at this length, where one rank cannot do all")
    results = environment.read().results
    found.add_argument("--out", type=Path, default=results, metavar="DIR", help=f"(default: {results})")
    return found


def cases(asked: argparse.Namespace, ranks: int) -> list[Key]:
    """The case of each length and kind of inputs. Raises ValueError for documents that do not fit, too few samples and
    a length of the comparison that is longer than a case."""
    if asked.samples < 1:
        raise ValueError(f"--samples must be at least 1; got {asked.samples}")
    if asked.check_tokens is not None and not 1 <= asked.check_tokens <= min(asked.tokens):
        raise ValueError(f"--check-tokens must be from 1 to {min(asked.tokens)}; got {asked.check_tokens}")
    documents = None if asked.documents is None else tuple(asked.documents)
    if documents is not None and (len(asked.tokens) > 1 or asked.inputs != ["random"]):
        raise ValueError("--documents needs one length and random inputs: recorded ones are of one document")
    (heads, num_kv_heads), (head_dim_k, head_dim_v) = asked.heads, asked.head_dims
    return [
        Key(
            CONTEXT_PARALLEL, NSA, asked.backend, asked.dtype, 1, tokens, tokens, heads, num_kv_heads, head_dim_k,
            head_dim_v, dataclasses.asdict(NSAConfig()), inputs=kind, ranks=ranks, documents=documents,
        )
        for tokens in asked.tokens
        for kind in asked.inputs
    ]  # fmt: skip


def main() -> int:
    asked = parser().parse_args()
    with distributed.process_group(os.environ, asked.device == "cuda") as own:
        if not own.several:
            parser().error("start it with torchrun and at least 2 ranks")
        try:
            keys = cases(asked, own.ranks)
        except ValueError as error:
            parser().error(str(error))
        mesh = init_device_mesh(asked.device, (own.ranks,), mesh_dim_names=("context",))
        written = _Written(asked.out, asked.device) if own.first else None
        begin, outcomes = time.perf_counter(), Counter[str]()
        for key in keys:
            outcome = _measured(mesh, key, asked, written)
            outcomes[outcome] += 1
        if written is not None:
            seconds = round(time.perf_counter() - begin, 1)
            print(json.dumps({"outcomes": dict(outcomes), "seconds": seconds, "records": str(written.path)}))
        return 1 if outcomes["INCORRECT"] else 0


class _Written:
    """The file of the run, which rank 0 writes."""

    def __init__(self, results: Path, device: str) -> None:
        machine = machines.machine(machines.CPU if device == "cpu" else None, machines.visible_gpu())
        self.fingerprint = fingerprint.take(machine.id, machine.device)
        self.path = run_file.create(results, self.fingerprint)

    def add(self, one: Record, samples_ms: tuple[float, ...]) -> None:
        run_file.append(self.path, one)
        if samples_ms:
            run_file.append_samples(self.path, RawSamples(one.key.name, samples_ms))
        print(f"{one.key.name:<76} {one.outcome.value}  {_figures(one)}", flush=True)


def _measured(mesh: DeviceMesh, key: Key, asked: argparse.Namespace, written: _Written | None) -> str:
    """Measure one case on every rank; the outcome, the same on all. Rank 0, which has `written`, keeps it."""
    alone, begin = not asked.no_alone, time.perf_counter()
    again = record.command(
        key, asked.device, asked.samples, asked.seed, alone=alone, check_tokens=asked.check_tokens
    )  # fmt: skip
    try:
        found = measure(
            mesh, key, samples=asked.samples, alone=alone, check_tokens=asked.check_tokens, seed=asked.seed
        )  # fmt: skip
    except IncorrectError as error:  # on every rank: all compare the same numbers
        if written is not None:
            written.add(record.incorrect(key, error, written.fingerprint, again), ())
        return "INCORRECT"
    if written is not None:
        case_s = time.perf_counter() - begin
        written.add(record.passed(key, found, written.fingerprint, again, case_s), found.samples_ms)
    return "PASSED"


def _figures(one: Record) -> str:
    if one.shared is None or one.latency_ms is None:
        return one.reason or ""
    ideal = "one rank not timed" if one.share_of_ideal is None else f"{one.share_of_ideal:.1%} of ideal"
    forward = "not timed" if one.shared.forward_ms is None else f"{one.shared.forward_ms:.4g} ms"
    exposed = f"{one.shared.exposed_ms:.3g} ms exposed ({one.exposed_share:.1%})"
    return (
        f"{one.latency_ms:.4g} ms, forward alone {forward}, {ideal}, {exposed}, {one.shared.received_gb:.3g} GB in, "
        f"imbalance {one.shared.imbalance:.2%}"
    )


if __name__ == "__main__":
    distributed.exit_with_threads(main())

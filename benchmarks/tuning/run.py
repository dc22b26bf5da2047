"""`python -m benchmarks tune`, kernel after kernel: candidates, trials, the record of them, the table."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.cases import inputs
from benchmarks.cases.key import NSA, Key
from benchmarks.timing import gpu_watch, latency
from harness import fingerprint, jsonl, machines
from harness.fingerprint import Fingerprint
from nsa.io import atomic_write
from nsa.triton_backend import tuning
from nsa.triton_backend.architecture import of
from nsa.triton_backend.tuning import LaunchConfig
from nsa.tuner import candidates
from nsa.tuner.candidates import Trial
from nsa.tuner.trials import Timed, Timer, Workload, fits

DTYPE = torch.bfloat16
PLAN = latency.SamplingPlan(min_samples=20, min_time_s=0.2, wall_limit_s=5.0, end_to_end=False)


@dataclass(frozen=True)
class TrialRecord:
    """One line of results/tuning/: a candidate, for which shape, and where."""

    trial: Trial
    group: int
    head_dim_k: int
    head_dim_v: int
    kv_heads: int
    tokens: int
    fingerprint: Fingerprint
    inputs: str = "random"
    """How they were drawn; in earlier lines all are random."""


def run(arguments: argparse.Namespace) -> int:
    """Tune kernel after kernel; each starts from what the ones before it chose."""
    architecture = _architecture(arguments)
    table = tuning.table(architecture)
    heads, kv_heads, dk, dv = _heads(arguments.heads)
    group = heads // kv_heads
    width, times = tuning.width(dk, dv, DTYPE)
    if times > 1:
        raise ValueError(f"--heads: rows of {dk} and {dv} channels are wider than any table; got {arguments.heads!r}")
    workload = Workload(architecture, width, group, dk, dv, kv_heads, arguments.tokens)
    chosen: dict[str, LaunchConfig] = {}
    kernels = _kernels(arguments.kernels, table)
    for kernel in kernels if arguments.kernels is not None else ():  # before hours are spent on others
        if not fits(kernel, table.of(kernel, width, group), table, workload):
            raise ValueError(f"--kernels: {kernel} does not serve --heads {arguments.heads} here")
    if not arguments.dry_run:
        gpu_watch.begin(machines.machine(None, machines.visible_gpu()))
    for kernel in kernels:
        current = table.of(kernel, width, group)
        found = candidates.candidates(current)
        fitting = [tuned for tuned in found if fits(kernel, tuned, table, workload)]
        print(f"{kernel}: {len(fitting)} of {len(found)} candidates fit", flush=True)
        if not fitting:  # a kernel of `hopper/` serves few heads
            continue
        if arguments.dry_run:
            print("\n".join(f"  {tuned}" for tuned in fitting))
            continue
        if workload.given is None:
            workload = dataclasses.replace(workload, given=drawn(workload, arguments.inputs))
        trials = list(_tried(kernel, fitting, table, workload, arguments.inputs, arguments.out))
        best = candidates.best(trials)
        print(f"  {_ms(trials[0])} -> {_ms(best)} ms: {best.tuned}", flush=True)
        chosen[table.name(kernel, width, group)] = best.tuned
        table = candidates.changed(table, width, chosen, table.how)
    if chosen:
        identity = fingerprint.take(f"sm{architecture}", "cuda")
        asked = f"--heads {arguments.heads} --tokens {arguments.tokens} --inputs {arguments.inputs}"
        how = (
            f"Measured by `python -m benchmarks tune {asked}` on a {identity.device} (torch {identity.torch}, Triton"
            f" {identity.triton}, commit {identity.commit}): {', '.join(chosen)} ({width}). Before:"
            f" {tuning.table(architecture).how}"
        )
        print(_write(architecture, candidates.text(candidates.changed(table, width, chosen, how))))
    return 0


def _architecture(arguments: argparse.Namespace) -> int:
    if arguments.architecture is not None and arguments.dry_run:
        return int(arguments.architecture)
    if not torch.cuda.is_available():
        raise ValueError("tune needs an NVIDIA GPU; --dry-run --architecture 89 lists the candidates without one")
    here = of(torch.device("cuda", torch.cuda.current_device()))
    if arguments.architecture not in (None, here):
        raise ValueError(f"--architecture: this GPU is {here}; got {arguments.architecture}")
    return here


def _heads(given: str) -> tuple[int, int, int, int]:
    sizes = [int(size) if size.isdecimal() else 0 for size in given.split(",")]
    if len(sizes) != 4 or min(sizes) < 1 or sizes[0] % sizes[1]:
        raise ValueError(f"--heads must be four positive numbers HQ,HKV,DK,DV, HQ a multiple of HKV; got {given!r}")
    return sizes[0], sizes[1], sizes[2], sizes[3]


def _kernels(given: str | None, table: tuning.Table) -> Sequence[str]:
    chosen = list(table.narrow) if given is None else given.split(",")
    if unknown := [name for name in chosen if name not in table.narrow]:
        raise ValueError(f"--kernels: no kernel {unknown[0]!r}; known: {', '.join(table.narrow)}")
    return chosen


def _ms(trial: Trial) -> str:
    return "unknown" if trial.latency_ms is None else f"{trial.latency_ms:.3f}"


def _tried(
    kernel: str, candidates: Sequence[LaunchConfig], table: tuning.Table, workload: Workload, kind: str, results: Path
) -> Iterator[Trial]:
    """Each candidate's trial, which is on the disk before the next one begins."""
    file = results / "tuning" / f"sm{workload.architecture}.jsonl"
    where = fingerprint.take(f"sm{workload.architecture}", workload.device)
    shape = (workload.group, workload.dk, workload.dv, workload.kv_heads, workload.tokens)
    for tuned in tqdm(candidates, kernel, unit="candidate", leave=False, dynamic_ncols=True, disable=None):
        trial = workload.trial(kernel, tuned, table, timer(workload.device))
        jsonl.append(file, TrialRecord(trial, *shape, where, kind))
        yield trial


def drawn(workload: Workload, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of this kind, one of `benchmarks.cases.inputs.KINDS`."""
    tokens, dtype = (workload.tokens, workload.tokens), str(workload.dtype).removeprefix("torch.")
    sizes = (1, *tokens, workload.group * workload.kv_heads, workload.kv_heads, workload.dk, workload.dv)
    key = Key("prefill-forward-backward", NSA, "triton", dtype, *sizes, config=None, inputs=kind)
    problem = inputs.draw(key, workload.device)
    return problem.q, problem.k, problem.v


def timer(device: str) -> Timer:
    """The benches' own clock; cold on a GPU."""

    def timed(call: Callable[[], object]) -> Timed:
        taken = latency.measure(call, device, "cold" if device == "cuda" else "warm", PLAN)
        return Timed(taken.latency_ms, taken.interval_ms)

    return timed


def _write(architecture: int, text: str) -> Path:
    """Replace the table in one step, on the disk when this returns."""
    file = tuning.TABLES / f"sm{architecture}.json"
    atomic_write(file, text.encode())
    return file

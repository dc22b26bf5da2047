"""What a version of nsa/ runs on the device for a case, as one hash: equal hashes are the same work, unmeasured.

No GPU is needed: children on the CPU record what the cases launch (`nsa.triton_backend.ahead_of_time`) and compile it
for the machine's architecture. `device_code_worker` says what the hash is over. What is compiled stays in Triton's
cache, where the processes that measure the case find it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from benchmarks.ab.checkout import Sources
from benchmarks.cases.key import Key
from benchmarks.workloads import suite
from harness.isolate import Child
from harness.peak import MIB

MODES_WITHOUT = ("train-step", "train-loop", "first-step", *suite.HOSTED, "memory")
"""What the host and the optimiser do between the kernels counts there too."""
_WORKER = "benchmarks.ab.device_code_worker"
_DEADLINE_S = 600.0
"""Of one child: 25 kernels of a case take a second or two each where Triton's cache has none."""
_CHILD_MIB = 9 * 1024
"""What a child may take: decode steps have their caches filled."""


@dataclass(frozen=True)
class DeviceCode:
    """What came of one version and one case."""

    sha256: str | None
    """None where it is not known."""
    why: str | None = None
    """Why it is not known."""

    def same(self, other: DeviceCode) -> bool:
        """Whether both are known and equal."""
        return self.sha256 is not None and self.sha256 == other.sha256


def of(sources: Sources, key: Key, architecture: int) -> DeviceCode:
    """The device code of this version for a case, compiled for compute capability 80, 90, ..."""
    return of_cases([sources], [key], architecture)[0][0]


def of_cases(sides: Sequence[Sources], keys: Sequence[Key], architecture: int) -> list[list[DeviceCode]]:
    """Of each version the device code of every case, in order, by as many children as there are cores and memory for.

    Cases that launch alike are recorded once.
    """
    recorded = {one.identity: one for one in map(_launched_as, keys) if one.mode not in MODES_WITHOUT}
    parts = _parts(list(recorded.values()), _children(len(sides)))
    found: list[dict[str, DeviceCode]] = [{} for _ in sides]
    with ThreadPoolExecutor(max(1, len(parts) * len(sides))) as pool:
        asked = [
            (codes, pool.submit(_recorded, side, part, architecture))
            for part in parts
            for side, codes in zip(sides, found, strict=True)
        ]
        for codes, child in asked:
            codes.update(child.result())
    return [[_of_key(codes, key) for key in keys] for codes in found]


def _parts(keys: Sequence[Key], children: int) -> list[list[Key]]:
    """For so many children, or fewer: cases of the same heads share kernels to be compiled, so that they are together;
    decode steps, whose caches take most of the time, are dealt out."""
    steps = [key for key in keys if key.mode == "decode"]
    others = sorted((key for key in keys if key.mode != "decode"), key=lambda key: (key.what, key.dtype, key.mode))
    size = -(-len(others) // children)
    parts = [others[i * size : (i + 1) * size] + steps[i::children] for i in range(children)]
    return [part for part in parts if part]


def _launched_as(key: Key) -> Key:
    """The case that launches the same: caches, graphs and the values of the inputs change nothing of it."""
    inputs = key.inputs if key.inputs == "replayed" else "random"
    return dataclasses.replace(key, cache="warm", launch="eager", inputs=inputs)


def _of_key(codes: dict[str, DeviceCode], key: Key) -> DeviceCode:
    if key.mode in MODES_WITHOUT:
        return DeviceCode(None, f"{key.mode} is not decided by its kernels alone")
    return codes[_launched_as(key).identity]


def _children(sides: int) -> int:
    """How many work on each side at a time."""
    fit = psutil.virtual_memory().available // (_CHILD_MIB * MIB)
    return max(1, min(len(os.sched_getaffinity(0)), fit) // sides)


def _recorded(sources: Sources, keys: Sequence[Key], architecture: int) -> dict[str, DeviceCode]:
    """By the identity of the key, what one child finds out."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(sources.folder), str(sources.benches)]),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
    }
    task = {"keys": [dataclasses.asdict(key) for key in keys], "architecture": architecture}
    with Child(_WORKER, task, environment, cwd=sources.folder, stdout=subprocess.PIPE) as child:
        try:
            answers = [json.loads(line) for line in child.communicate(_DEADLINE_S).decode().splitlines()]
            code, log = child.wait(), child.log_tail().strip().splitlines()
            why = log[-1] if code == 1 and log else f"the child ended with code {code}"
        except subprocess.TimeoutExpired:
            answers, why = [], f"its kernels were not compiled within {_DEADLINE_S:.0f} s"
    found = [DeviceCode(**answer) for answer in answers]
    found += [DeviceCode(None, why)] * (len(keys) - len(found))
    return {key.identity: code for key, code in zip(keys, found, strict=True)}

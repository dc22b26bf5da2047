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
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import psutil
import torch

from benchmarks.ab.checkout import Sources
from benchmarks.cases.key import Key
from benchmarks.workloads import suite
from harness.isolate import Child
from harness.peak import MIB

MODES_WITHOUT = ("train-step", "train-loop", "first-step", *suite.HOSTED, "memory")
"""What the host and the optimiser do between the kernels counts there too."""
_WORKER = "benchmarks.ab.device_code_worker"
DEADLINE_S = 600.0
"""For all cases: 25 kernels of a case take a second or two each where Triton's cache has none."""
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


Gpu = Mapping[str, int]
"""Properties of the GPU that kernels are compiled for, as PyTorch names them: all that the choice of kernels and grids
depends on."""
_PROPERTIES = (
    "major", "minor", "multi_processor_count", "L2_cache_size", "memory_clock_rate", "memory_bus_width"
)  # fmt: skip


def visible_gpu() -> Gpu:
    """The one that PyTorch would use; 0 for what it does not tell."""
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {name: int(getattr(seen, name, 0) or 0) for name in _PROPERTIES}


def of(sources: Sources, key: Key, gpu: Gpu) -> DeviceCode:
    """The device code of this version for a case."""
    return of_cases([sources], [key], gpu)[0][0]


def of_cases(
    sides: Sequence[Sources], keys: Sequence[Key], gpu: Gpu, deadline_s: float = DEADLINE_S
) -> list[list[DeviceCode]]:
    """Of each version the device code of every case, in order, by as many children as there are cores and memory for.

    Cases that launch alike are recorded once. What is not known after `deadline_s` stays so.
    """
    end = time.monotonic() + deadline_s
    recorded = {one.identity: one for one in map(_launched_as, keys) if one.mode not in MODES_WITHOUT}
    parts = _parts(list(recorded.values()), _children(len(sides)))
    found: list[dict[str, DeviceCode]] = [{} for _ in sides]
    # an exception ends the children first, then the threads that wait for them
    with ThreadPoolExecutor(max(1, len(parts) * len(sides))) as pool, ExitStack() as children:
        asked = [
            (codes, part, pool.submit(_answers, children.enter_context(_child(side, part, gpu)), len(part), end))
            for part in parts
            for side, codes in zip(sides, found, strict=True)
        ]
        for codes, part, answers in asked:
            codes.update(zip((key.identity for key in part), answers.result(), strict=True))
    return [[_of_key(codes, key) for key in keys] for codes in found]


def _parts(keys: Sequence[Key], children: int) -> list[list[Key]]:
    """The cases of each child. Cases with the same heads share kernels, so one child gets as many of them as it can;
    decode steps, which take the longest because their caches are filled, are spread evenly."""
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


def _child(sources: Sources, keys: Sequence[Key], gpu: Gpu) -> Child:
    """Records these cases of one version."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(sources.folder), str(sources.benches)]),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
    }
    task = {"keys": [dataclasses.asdict(key) for key in keys], "gpu": dict(gpu)}
    return Child(_WORKER, task, environment, cwd=sources.folder, stdout=subprocess.PIPE)


def _answers(child: Child, cases: int, end: float) -> list[DeviceCode]:
    """What it says of so many cases until this moment of the monotonic clock; of the others, why it says nothing."""
    try:
        said, code = child.communicate(max(0.1, end - time.monotonic())), child.wait()
        log = child.log_tail().strip().splitlines()
        why = log[-1] if code == 1 and log else f"the child ended with code {code}"
    except subprocess.TimeoutExpired as error:
        said, why = error.output or b"", "its kernels were not compiled in time"
    found = list[DeviceCode]()
    for line in said.decode(errors="replace").splitlines():
        with suppress(ValueError, TypeError):  # the end of a line that was cut off, or what a library printed
            found.append(DeviceCode(**json.loads(line)))
    return found + [DeviceCode(None, why)] * (cases - len(found))

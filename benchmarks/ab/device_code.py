"""What a version of nsa/ runs on the device for a case, as one hash: equal hashes are the same work, unmeasured.

No GPU is needed: a child on the CPU records what the case launches (`nsa.triton_backend.ahead_of_time`) and compiles it
for the machine's architecture. `device_code_worker` says what the hash is over.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from dataclasses import dataclass

from benchmarks.ab.checkout import Sources
from benchmarks.cases.key import Key
from benchmarks.workloads import suite
from harness.isolate import Child

MODES_WITHOUT = ("train-step", "train-loop", "first-step", *suite.HOSTED, "memory")
"""What the host and the optimiser do between the kernels counts there too."""
_WORKER = "benchmarks.ab.device_code_worker"
_DEADLINE_S = 600.0
"""Of one case: up to 25 kernels of some seconds each where Triton's cache has none."""


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
    if key.mode in MODES_WITHOUT:
        return DeviceCode(None, f"{key.mode} is not decided by its kernels alone")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(sources.folder), str(sources.benches)]),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
    }
    task = {"key": dataclasses.asdict(key), "architecture": architecture}
    with Child(_WORKER, task, environment, cwd=sources.folder, stdout=subprocess.PIPE) as child:
        try:
            printed = child.communicate(_DEADLINE_S).decode().strip()
        except subprocess.TimeoutExpired:
            return DeviceCode(None, f"its kernels were not compiled within {_DEADLINE_S:.0f} s")
        if child.wait():
            log = child.log_tail().strip().splitlines()
            return DeviceCode(None, log[-1] if log else "the child ended without a word")
    return DeviceCode(json.loads(printed.splitlines()[-1])["sha256"])

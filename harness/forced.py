"""A newer GPU in the place of an older one: the kernels of an older architecture, and no more memory than it has.

`--force-arch sm86 --memory-gb 24` (or NSA_FORCE_ARCH and NSA_MEMORY_GB) has an H200 run what an RTX 3090 would. That
shows that results are right and that cases fit, and nothing about speed: such a machine has a name of its own,
"h200-forced-sm86-24gb", under which no time is recorded. The kernels are `nsa.triton_backend.architecture`'s, in every
process that inherits the variable; each process that measures calls `cap_memory`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from harness import environment, machines
from harness.machines import Gpu, Machine

ARCHITECTURES = ("sm80", "sm86", "sm89")
"""What the Triton backend can be forced to (`nsa.triton_backend.architecture.FORCEABLE`)."""
_ARCHITECTURE, _MEMORY = "NSA_FORCE_ARCH", "NSA_MEMORY_GB"
_NAME = re.compile(r"(?P<machine>[a-z0-9-]+?)-forced-(?P<architecture>sm\d+)(-(?P<memory_gb>\d+)gb)?", re.ASCII)
_GB = 10**9
MOST_GB = 9999


@dataclass(frozen=True)
class Forced:
    """What a GPU is made to do."""

    architecture: str
    """Whose kernels run: "sm86"."""
    memory_gb: int | None = None
    """What each process may allocate, GB; None is all that the GPU has."""

    @property
    def suffix(self) -> str:
        """How the names of records end: "-forced-sm86-24gb"."""
        return f"-forced-{self.architecture}" + (f"-{self.memory_gb}gb" if self.memory_gb else "")

    @property
    def options(self) -> list[str]:
        """What asks for it on a command line."""
        return ["--force-arch", self.architecture, *(["--memory-gb", str(self.memory_gb)] if self.memory_gb else [])]


def read(variables: Mapping[str, str] = os.environ) -> Forced | None:
    """What the variables ask for; None in an ordinary process. Raises ValueError naming the one that is wrong."""
    found = environment.read(variables)
    if found.force_arch is None:
        if found.memory_gb is not None:
            raise ValueError(f"{_MEMORY} caps the memory of a GPU that is forced; set {_ARCHITECTURE} too, or unset it")
        return None
    if found.force_arch not in ARCHITECTURES:
        raise ValueError(f"{_ARCHITECTURE} must be {', '.join(ARCHITECTURES)}, or not set; got {found.force_arch!r}")
    if found.memory_gb is None:
        return Forced(found.force_arch)
    if not re.fullmatch(r"[1-9]\d{0,3}", found.memory_gb, re.ASCII):
        raise ValueError(f"{_MEMORY} must be whole GB, such as 24; got {found.memory_gb!r}")
    return Forced(found.force_arch, int(found.memory_gb))


def enter(
    force_arch: str | None, memory_gb: int | None, variables: MutableMapping[str, str] = os.environ
) -> Forced | None:
    """What the options ask for, or where there are none the variables, in which every child finds it. ValueError."""
    if memory_gb is not None and not 1 <= memory_gb <= MOST_GB:
        raise ValueError(f"--memory-gb must be from 1 to {MOST_GB}; got {memory_gb}")
    for name, value in ((_ARCHITECTURE, force_arch), (_MEMORY, memory_gb)):
        if value is not None:
            variables[name] = str(value)
    return read(variables)


def leave(variables: MutableMapping[str, str] = os.environ) -> None:
    """Take back what was asked for, where a forced process does work on the CPU."""
    for name in (_ARCHITECTURE, _MEMORY):
        variables.pop(name, None)


def machine(found: Machine, gpu: Gpu | None, forced: Forced | None) -> Machine:
    """The machine under the name of what it is forced to. Raises ValueError where it cannot be."""
    if forced is None:
        return found
    require_gpu(forced, there=gpu is not None and found.id != machines.CPU)
    assert gpu is not None
    here = "sm{}{}".format(*gpu.compute_capability)
    if int(here[2:]) <= int(forced.architecture[2:]):
        raise ValueError(f"--force-arch {forced.architecture} needs a newer GPU; {gpu.name} is {here}: leave it out")
    if forced.memory_gb and found.memory_gb and forced.memory_gb > found.memory_gb:
        raise ValueError(f"--memory-gb must be at most the GPU's {found.memory_gb:.0f}; got {forced.memory_gb}")
    memory_gb = forced.memory_gb or found.memory_gb
    capped = f", {forced.memory_gb} GB" if forced.memory_gb else ""
    return replace(
        found,
        id=f"{found.id}{forced.suffix}",
        title=f"{found.title}, forced to {forced.architecture}{capped}",
        suite=found.suite if memory_gb is None or found.device == machines.CPU else machines.largest_suite(memory_gb),
        bf16_tflops=None,
        memory_tb_per_s=None,
        memory_gb=memory_gb,
    )


def require_gpu(asked: Forced | None, *, there: bool) -> None:
    """Raises ValueError where something is asked for and there is no GPU that it could be asked of."""
    if asked is not None and not there:
        raise ValueError(f"--force-arch {asked.architecture} needs an NVIDIA GPU; leave it out on a CPU")


def of(machine_id: str) -> Forced | None:
    """What the machine of a record was forced to; None where it was itself."""
    found = _NAME.fullmatch(machine_id)
    if found is None:
        return None
    return Forced(found["architecture"], int(found["memory_gb"]) if found["memory_gb"] else None)


def itself(machine_id: str) -> str:
    """The machine without what it was forced to: "h200" of "h200-forced-sm86"."""
    found = _NAME.fullmatch(machine_id)
    return machine_id if found is None else found["machine"]


def require_named(machine_id: str) -> None:
    """Raises ValueError where this process is forced to something else than the name of its records says."""
    asked, named = read(), of(machine_id)
    if asked != named:
        options = " ".join(asked.options) if asked else "nothing"
        raise ValueError(
            f"this process is forced to {options}, which records of {machine_id!r} would not say: only"
            " `benchmarks run`, `regression run` and the tests can be forced; for anything else unset"
            f" {_ARCHITECTURE} and {_MEMORY}"
        )


def require_report(path: str | None, asked: Forced | None) -> None:
    """Raises ValueError where the name of a report of tests does not end in what they were forced to."""
    suffix = asked.suffix if asked else ""
    stem = Path(path).stem if path else suffix
    if not stem.endswith(suffix) or (not suffix and "-forced-" in stem):
        wanted = f"end in {suffix}" if suffix else "not say that anything was forced"
        raise ValueError(f"--junitxml: the name of the report must {wanted}; got {Path(str(path)).name}")


def memory_bytes() -> tuple[int, int]:
    """(free, total) memory of the current GPU in bytes, within the cap. What this process's allocator keeps and does
    not use is free to it."""
    import torch  # as in machines.visible_gpu

    free, total = torch.cuda.mem_get_info()
    forced, used = read(), torch.cuda.memory_allocated()
    most = forced.memory_gb * _GB if forced and forced.memory_gb else total
    return min(free + torch.cuda.memory_reserved() - used, most - used), min(total, most)


def cap_memory() -> None:
    """Have PyTorch's allocator refuse what is above the cap, in this process, as a smaller GPU would.

    From the moment at which the process uses the GPU: one that never does can still be forked. To ask whether there is
    one (torch.cuda.is_available) would start CUDA's driver, after which no forked child can use it.
    """
    forced = read()
    if forced is None or forced.memory_gb is None:
        return
    import torch

    most = forced.memory_gb * _GB

    def cap() -> None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(most / total, 1.0))

    torch.cuda._lazy_call(cap)

"""Which architecture's tables and kernels serve a GPU: its own, or with NSA_FORCE_ARCH=sm86 those of an older one.

Forced, a GPU does what the older one would: the tables, no kernel of `hopper/`, instructions that Triton chooses for
that architecture (mma.sync and cp.async in place of wgmma and TMA), and its shared memory as the limit of every kernel.
It shows that they are right and fit, and nothing about how fast they are. The variable is read once, when this is
imported; Triton generates code up to LLVM IR for the architecture that is asked for (`override_arch`) and assembles it
for the GPU that is there.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

VARIABLE = "NSA_FORCE_ARCH"
FORCEABLE = (80, 86, 89)
"""Compute capabilities that have a table and that a newer GPU runs all instructions of."""
SHARED_MEMORY_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""By compute capability: what one program may have (CUDA programming guide, "technical specifications")."""
LEAST_SHARED_KIB = 99  # of any architecture
_HOPPER_ONLY = re.compile(r"\bwgmma\b|\bcp\.async\.bulk\b|\bcp\.reduce\.async\.bulk\b|\btcgen05\b")
"""Instructions of PTX that no forceable architecture has (PTX ISA, "target notes")."""


WGMMA = (0, 90)
"""Compute capabilities whose products are of four warps together (wgmma); 0: the interpreter."""


def forced_by(variables: Mapping[str, str]) -> int | None:
    """The architecture that the variables ask for, as in 86; None where they ask for none. Raises ValueError."""
    text = variables.get(VARIABLE) or None
    known = {f"sm{architecture}": architecture for architecture in FORCEABLE}
    if text is not None and text not in known:
        raise ValueError(f"{VARIABLE} must be {', '.join(known)}, or not set; got {text!r}")
    return None if text is None else known[text]


@functools.cache
def of_gpu(device: torch.device) -> int:
    """A GPU's own compute capability, as in 86; 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def of(device: torch.device) -> int:
    """The compute capability whose tables and kernels serve. Raises ValueError on a GPU that cannot be forced to it."""
    here = of_gpu(device)
    if FORCED is None:
        return here
    if here and here <= FORCED:
        raise ValueError(
            f"{VARIABLE}=sm{FORCED} needs a newer GPU than sm{here}; unset it to run this GPU's own kernels"
        )
    return FORCED


def shared_kib(architecture: int) -> int:
    """Shared memory that one program may have on this compute capability, KiB."""
    return SHARED_MEMORY_KIB.get(architecture, LEAST_SHARED_KIB)


def require_fit(architecture: int, metadata: Mapping[str, Any], ptx: str | None) -> None:
    """Refuse a compiled kernel that a GPU of this architecture would not run.

    Raises triton's OutOfResources where it needs more shared memory, and RuntimeError where it was generated for
    another architecture or holds an instruction of Hopper. `ptx` None is not looked into.
    """
    if metadata["arch"] != f"sm{architecture}":
        raise RuntimeError(f"a kernel was compiled for {metadata['arch']}, and {VARIABLE} asks for sm{architecture}")
    if ptx is not None and (found := _HOPPER_ONLY.search(ptx)):
        raise RuntimeError(f"a kernel that was compiled for sm{architecture} holds {found[0]}, which needs sm90")
    limit = shared_kib(architecture) * 1024
    if metadata["shared"] > limit:
        raise OutOfResources(metadata["shared"], limit, f"shared memory (sm{architecture}, forced)")


def force(architecture: int) -> None:
    """Have Triton generate code for this architecture in this process (and, by TRITON_OVERRIDE_ARCH, which Triton sets,
    in its children), and refuse kernels of this package that do not fit.

    Raises ValueError where this version of Triton cannot be told to.
    """
    knobs: Any = getattr(triton, "knobs", None)
    if not hasattr(getattr(knobs, "runtime", None), "override_arch") or not hasattr(knobs.compilation, "listener"):
        raise ValueError(f"{VARIABLE} needs Triton 3.6 or newer; this is {triton.__version__}")

    def compiled(*, src: Any, metadata: Mapping[str, Any], metadata_group: Mapping[str, str], **_: Any) -> None:
        if not str(getattr(getattr(src, "fn", None), "__module__", "")).startswith(f"{__package__}."):
            return  # torch.compile's, or another package's
        paths = [Path(path) for name, path in metadata_group.items() if name.endswith(".ptx")]
        require_fit(architecture, metadata, paths[0].read_text() if paths else None)

    knobs.runtime.override_arch = f"sm{architecture}"
    knobs.compilation.listener = compiled  # called for each kernel, also one from the cache, before it can be launched


FORCED = forced_by(os.environ)
"""The architecture that serves in place of the GPU's own; None in an ordinary process."""
if FORCED is not None:
    force(FORCED)

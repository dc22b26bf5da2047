"""Whose matter a step is that failed: the machine's, the driver's, Triton's or ours; and what to send.

Judged from its exit code and the error that ended it (`log_errors`), by the first sign that is found there, the most
certain ones first. What shows no sign of another is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from benchmarks.contact import log_errors


class Cause(str, Enum):
    """Who must do something."""

    MACHINE = "the machine"
    """Its hardware, its memory, its disk, or other work on it."""
    DRIVER = "the driver"
    """NVIDIA's driver, or a PyTorch that does not fit it."""
    TRITON = "Triton"
    """The compiler of the kernels."""
    OURS = "ours"
    """This project's."""


@dataclass(frozen=True)
class Diagnosis:
    """What is said of a step that failed."""

    cause: Cause
    message: str
    """What was seen, in one line."""
    do: str
    """What its owner can do."""
    send: str
    """What to send, and to whom."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {"said": "message"}


_TO_US = "the bundle, to us"
_VIA_US = "the bundle, to us, who report it to Triton"
_LINE_CHARACTERS = 300


@dataclass(frozen=True)
class _Sign:
    cause: Cause
    pattern: str
    """Found in the error, whatever the case of its letters."""
    do: str
    send: str = "nothing: nobody else can repair it"


_SIGNS = (
    _Sign(Cause.MACHINE, r"uncorrectable ECC|fallen off the bus|\bXid\b|GPU is lost",
          "the GPU is faulty: dmesg says more",
          "`nvidia-smi -q` and dmesg, to whoever runs the machine"),
    _Sign(Cause.OURS, r"/nsa +(INCORRECT|NONFINITE) ", "nothing: NSA is wrong on this GPU", _TO_US),
    _Sign(Cause.MACHINE, r"No space left on device|Disk quota exceeded|no room for", "make room, then run this again"),
    _Sign(Cause.MACHINE, r"out of memory|can't allocate memory|MemoryError",
          "end other work on this machine, then run this again; if nothing else ran, send it", _TO_US),
    _Sign(Cause.MACHINE, r"this session needs an? ", "run it on that GPU, or leave out --gpu"),
    _Sign(Cause.MACHINE, r" is a vGPU: ", "pass a whole GPU or a MIG slice through to this machine"),
    _Sign(Cause.MACHINE, r" computed on the GPU too|devices?(\(s\))? (is|are|is/are) busy or unavailable",
          "end other work on the GPU, then run this again"),
    _Sign(Cause.MACHINE, r"Failed to find C compiler|Python\.h: No such file"
          r"|Command '\['[^']*\b(gcc|clang|cc)'.* returned non-zero",
          "Triton builds its launcher here: install a C compiler and Python's headers (build-essential, python3-dev)"),
    _Sign(Cause.DRIVER, r"driver version is insufficient|driver .{0,80} is too old|Driver/library version mismatch"
          r"|Found no NVIDIA driver|couldn't communicate with the NVIDIA driver"
          r"|CUDA driver initialization failed|CUDA unknown error|forward compatibility was attempted",
          "upgrade the driver, or reboot after an upgrade; else a PyTorch for this driver",
          "`nvidia-smi`, to whoever runs the machine"),
    _Sign(Cause.DRIVER, r"no kernel image is available",
          "install a PyTorch that is built for this GPU's compute capability", "the bundle, to PyTorch"),
    _Sign(Cause.OURS, r"out of resources?: |OutOfResources",
          "a kernel's tiles do not fit this GPU: `python -m benchmarks tune` finds some that do", _TO_US),
    _Sign(Cause.TRITON, r"PassManager::run failed|LLVM ERROR|ptxas|MLIR|triton\.compiler\.errors|CompilationError"
          r"|No module named 'triton'",
          "take the Triton that constraints.txt names, if another one is installed", _VIA_US),
)  # fmt: skip


def diagnose(code: int, log: str) -> Diagnosis:
    """Of a step that ended with this code (negative: a signal) and printed this."""
    if code in (-9, 137):
        message = "it was killed (SIGKILL), as Linux does when memory runs out"
        return Diagnosis(Cause.MACHINE, message, "end other work on this machine, then run this again", _TO_US)
    error = log_errors.ending(log)
    for sign in _SIGNS:
        for line in error:
            if re.search(sign.pattern, line, re.IGNORECASE):
                return Diagnosis(sign.cause, _short(line), sign.do, sign.send)
    message = _short(error[-1]) if error else f"exit code {code}, without a word"
    do = "nothing before an answer: figures of this machine would prove nothing"
    return Diagnosis(Cause.OURS, message, do, _TO_US)


def _short(line: str) -> str:
    return line.strip()[:_LINE_CHARACTERS]

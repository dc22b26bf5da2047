"""What kernels need of a GPU, without one: a call's launches are recorded, not run, and compiled for any architecture.

Triton's launcher and cache are the real ones; only the driver, the compiler and the launch are stand-ins. So the sizes,
types, constants and the alignment of arguments are those of a real launch. For a process without Triton's interpreter.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from nsa import NSAConfig, nsa_attention
from nsa.triton_backend import architecture as served
from nsa.triton_backend import decode, dispatch, planned, tuning

BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
SERIALISED = "wgmma.mma_async instructions are serialized"
"""How every warning of ptxas begins that says so, of whatever reason (C7510, C7511, C7515, ...)."""
SMS = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}
"""By compute capability: multiprocessors of its largest usual board (A100, RTX 3090, RTX 4090, H100 and H200, B200,
RTX 5090). Into how many programs a decode step is split depends on them, and some of that is compiled in."""
_devices = itertools.count(start=-1, step=-1)  # no GPU has such a number: what is recorded never meets what runs


@dataclass(frozen=True)
class Needs:
    """What one kernel takes of a multiprocessor."""

    shared_bytes: int
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread: registers that had to go through memory."""
    num_warps: int
    serialises_wgmma: bool
    """Whether Hopper's asynchronous products wait for one another, which made a kernel an eighth slower."""


@dataclass(frozen=True)
class Launch:
    """One kernel that a call had to compile."""

    name: str
    """File and function: "compressed_window._forward"."""
    architecture: int
    source: ASTSource
    options: dict[str, Any]

    def compiled(self) -> Any:
        """Triton's kernel: taken from its cache if it is there, else compiled, and kept there."""
        target = GPUTarget("cuda", self.architecture, 32)
        return triton.compile(self.source, target=target, options=self.options)

    def build_launcher(self, compiled: Any) -> None:
        """Have Triton build what launches this kernel, and keep it in its cache, where `builds_launchers` says so."""
        if builds_launchers():
            nvidia.CudaLauncher(self.source, compiled.metadata)

    def needs(self) -> Needs:
        """Compile it."""
        compiled = self.compiled()
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(BINARIES / "cuobjdump"), "-res-usage", file.name]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", printed)}
        shared: int = compiled.metadata.shared
        serialises = serialises_wgmma(compiled.asm["ptx"])
        return Needs(shared, found["REG"], found["STACK"], self.options["num_warps"], serialises)


def serialises_wgmma(ptx: str) -> bool:
    """Whether the assembler warns of it; Triton does not hand its warnings on."""
    if "wgmma" not in ptx:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [str(BINARIES / "ptxas"), "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/cubin"]
        return SERIALISED in subprocess.run(command, capture_output=True, text=True, check=True).stderr


@cache
def builds_launchers() -> bool:
    """Whether each signature of a kernel is launched by C of its own, and that can be built here.

    Up to Triton 3.6 it is built by a C compiler, half a second each, at the first launch in a process whose cache has
    none. It is linked with libcuda, which a machine without a driver lacks. Triton 3.7 has one launcher for all.
    """
    if not hasattr(nvidia, "make_launcher"):
        return False
    try:
        nvidia.CudaUtils()  # it holds the type of descriptors that each launcher asks for
    except AssertionError:  # as Triton says that there is no libcuda
        return False
    return True


class _Driver:
    """The driver of a GPU that is not there."""

    def __init__(self, architecture: int) -> None:
        self.target, self.device = GPUTarget("cuda", architecture, 32), next(_devices)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def recorded(architecture: int, sms: int | None = None) -> Iterator[list[Launch]]:
    """The kernels that calls of the Triton backend on CPU tensors would compile for compute capability 86, 90, ...

    `sms`: multiprocessors of that GPU, by `SMS` unless given.
    """
    launches: list[Launch] = []

    def do_compile(
        self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, _: bool
    ) -> mock.Mock:
        name = f"{self.fn.__module__.removeprefix(f'{tuning.__package__}.')}.{self.fn.__name__}"
        source = self.ASTSource(self, signature, constants, attributes)
        launches.append(Launch(name, architecture, source, vars(options)))
        self.device_caches[device][0][key] = stand_in = mock.Mock()
        return stand_in

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(architecture)),
        mock.patch.object(JITFunction, "_do_compile", do_compile),
        mock.patch.object(dispatch, "_why_not_here", return_value=None),
        mock.patch.object(served, "of_gpu", return_value=architecture),
        mock.patch.object(decode, "num_sms", return_value=sms or SMS.get(architecture, SMS[90])),
        mock.patch.object(planned, "AVAILABLE", False),  # a plan would not say again what it launches
    ):
        yield launches


@dataclass(frozen=True)
class Heads:
    """The heads of a model."""

    group: int
    dk: int
    dv: int
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.bfloat16


def call(heads: Heads, queries: int, keys: int, *, backward: bool = True) -> None:
    """One call of `nsa_attention` on zeros, to be recorded."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.zeros(1, *shape, dtype=heads.dtype).requires_grad_(backward)

    num_heads = heads.group * heads.num_kv_heads
    q, gates = draw(queries, num_heads, heads.dk), draw(queries, num_heads, 3)
    k, v = draw(keys, heads.num_kv_heads, heads.dk), draw(keys, heads.num_kv_heads, heads.dv)
    o = nsa_attention(q, k, v, gates, NSAConfig(), backend="triton")
    if backward:
        torch.autograd.grad(o, (q, k, v, gates), torch.zeros_like(o))

"""Cases of one version of nsa/: for each a hash over what its call runs on the device.

Usage: python -m benchmarks.ab.device_code_worker '{"keys": [{...}], "gpu": {...}}', with the sources of one side
first on the path; "gpu" is `device_code.Gpu`. For each key a line of stdout is {"sha256": "...", "why": null}, or
says why there is no hash. It fails where that nsa/ cannot say what it launches.

The hash is over, in order: each launch (instructions of the compiled kernel, grid, numbers, and the shapes, types and
strides of tensors and of what TMA reads), the calls of PyTorch's operators with the shapes of their tensors and the
sizes, strides and types that they are asked for, and the source that chooses the backend. A number that is multiplied
with a tensor is not seen: it changes no time.
Instructions are SASS, in which no line number of the source stands, so that an edited comment changes nothing; where
Triton brings no cuobjdump they are the lines of PTX without what names the source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.cases.key import Key
from benchmarks.workloads import prepare as preparation
from nsa import backends
from nsa.triton_backend import ahead_of_time, decode

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_SOURCE_LINES = (".loc", ".file", "//", ".section", ".target")
"""What lines of PTX begin with that name the source, or follow from it."""


def sha256(key: Key, gpu: Mapping[str, int]) -> str:
    """The hash of one case's call on this GPU."""
    digest = hashlib.sha256(Path(str(backends.__file__)).read_bytes())
    launched: list[tuple[int, str]] = []
    recorded = ahead_of_time.recorded(_architecture(gpu))
    with _any_memory(), _zeros(), recorded as kernels, _on_board(gpu), _launches(launched):
        work = preparation.prepare(dataclasses.replace(key, backend_asked="triton"), "cpu")
        launched.clear()  # preparing is not timed; a kernel that it compiled keeps its number
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
            work.call()
    if not launched:
        raise RuntimeError(f"no launch of {key.name} was recorded, which Triton {triton.__version__} must have made")
    code = {number: instructions(kernels[number]) for number in {number for number, _ in launched}}
    for number, arguments in launched:
        digest.update(f"{kernels[number].name} {code[number]} {arguments}\n".encode())
    for event in profiled.events() or ():
        if event.name.startswith("aten::"):
            digest.update(f"{event.name} {event.input_shapes} {event.concrete_inputs}\n".encode())
    return digest.hexdigest()


def instructions(kernel: ahead_of_time.Launch) -> str:
    """A hash over one kernel's instructions, and over what it is launched with."""
    target = GPUTarget("cuda", kernel.architecture, 32)
    compiled = triton.compile(kernel.source, target=target, options=kernel.options)
    if hasattr(kernel, "build_launcher"):  # else this version leaves it to the first launch
        kernel.build_launcher(compiled)
    shape = f"{compiled.metadata.shared} {compiled.metadata.num_warps} {kernel.architecture}"
    text = _sass_sha256(compiled.asm["cubin"]) if _CUOBJDUMP.exists() else without_source(compiled.asm["ptx"])
    return hashlib.sha256(f"{shape}\n{text}".encode()).hexdigest()


@cache
def _sass_sha256(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run([str(_CUOBJDUMP), "-sass", file.name], capture_output=True, check=True).stdout
    return hashlib.sha256(listed).hexdigest()


def without_source(ptx: str) -> str:
    """PTX up to its debug sections, without the lines that name the source."""
    code = ptx.partition("\t.section\t.debug")[0]
    return "\n".join(line for line in code.splitlines() if not line.strip().startswith(_SOURCE_LINES))


@contextmanager
def _launches(launched: list[tuple[int, str]]) -> Iterator[None]:
    """Append (number of the kernel, grid and arguments) for each launch of a kernel that is recorded."""
    record: Callable[..., mock.Mock] = JITFunction._do_compile
    kernels = 0

    def do_compile(*arguments: Any) -> mock.Mock:
        nonlocal kernels
        number, kernels = kernels, kernels + 1
        kernel = record(*arguments)
        kernel.result.return_value = kernel  # Triton 3.6 takes the result of whatever has one
        # functions, since a mock would keep the tensors of all its calls
        kernel.run = lambda *words, **_: launched.append((number, _said(words)))
        kernel.launch_metadata = lambda *_: None
        return kernel

    with mock.patch.object(JITFunction, "_do_compile", do_compile):
        yield


def _said(words: tuple[Any, ...]) -> str:
    """Grid and arguments of a launch as text; what has an address says none."""
    return " ".join(filter(None, map(_word, words)))


def _word(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    if isinstance(value, tuple):
        return f"({_said(value)})"
    if hasattr(value, "block_shape") and not isinstance(value, mock.Mock):  # a descriptor of what TMA reads
        return f"{_word(value.base)} {value.shape} {value.strides} {value.block_shape}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else ""


def _architecture(gpu: Mapping[str, int]) -> int:
    return 10 * gpu["major"] + gpu["minor"]


@contextmanager
def _on_board(gpu: Mapping[str, int]) -> Iterator[None]:
    """What depends on multiprocessors, L2 or bandwidth is chosen as on that GPU; in early versions nothing does."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(decode, "num_sms", return_value=gpu["multi_processor_count"]))
        if find_spec("nsa.triton_backend.traffic") is not None:
            traffic = import_module("nsa.triton_backend.traffic")
            with mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(**gpu)):
                found = traffic.memory_system(torch.device("cuda", 0), _architecture(gpu))
            stack.enter_context(mock.patch.object(traffic, "memory_system", return_value=found))
        yield


@contextmanager
def _zeros() -> Iterator[None]:
    """Inputs of zeros, which take neither time nor memory: no kernel reads them."""

    def zeros(*size: int, dtype: torch.dtype | None = None, **_: object) -> Tensor:
        return torch.zeros(*size, dtype=dtype)

    with mock.patch.object(torch, "randn", zeros), mock.patch.object(torch, "rand", zeros):
        yield


@contextmanager
def _any_memory() -> Iterator[None]:
    """No case is refused for the memory of its oracle, which is not asked here."""
    with mock.patch.object(preparation, "require_room"):
        yield


def main(task: str) -> None:
    """Print the hashes. What libraries print goes to stderr, so that it cannot break the answers."""
    answers, asked = os.fdopen(os.dup(sys.stdout.fileno()), "w"), json.loads(task)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for key in asked["keys"]:
        found, why = None, None
        try:
            found = sha256(Key(**key), asked["gpu"])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        print(json.dumps({"sha256": found, "why": why}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

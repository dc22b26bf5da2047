"""Whose matter a failure is: what the error says that ended the step, and nothing that its log mentions beside it."""

from __future__ import annotations

import pytest

from benchmarks.contact.cause import Cause, diagnose

LOGS = [
    (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", Cause.MACHINE),
    (1, "FAILED tests/laws/x.py - torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB", Cause.MACHINE),
    (1, "OSError: [Errno 28] No space left on device", Cause.MACHINE),
    (-9, "collected 12 items", Cause.MACHINE),
    (2, "python -m benchmarks: this session needs an NVIDIA A100; found: NVIDIA L4", Cause.MACHINE),
    (1, "The NVIDIA driver on your system is too old (found version 11040)", Cause.DRIVER),
    (1, "RuntimeError: CUDA error: no kernel image is available for execution on the device", Cause.DRIVER),
    (1, "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch", Cause.DRIVER),
    (1, "ERROR: GPU is lost", Cause.MACHINE),
    (2, "python -m benchmarks: NVIDIA A10-24Q is a vGPU: other guests use its multiprocessors", Cause.MACHINE),
    (2, "python -m benchmarks: python (pid 7) computed on the GPU too, for as long as was waited", Cause.MACHINE),
    (1, "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", Cause.MACHINE),
    (1, "torch.AcceleratorError: CUDA-capable device(s) is/are busy or unavailable", Cause.MACHINE),
    (1, "RuntimeError: Failed to find C compiler. Please specify via CC environment variable", Cause.MACHINE),
    (1, "cuda_utils.c:7:10: fatal error: Python.h: No such file or directory", Cause.MACHINE),
    (1, "RuntimeError: Found no NVIDIA driver on your system", Cause.DRIVER),
    (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", Cause.DRIVER),
    (1, "triton.compiler.errors.CompilationError: at 12:4", Cause.TRITON),
    (1, "RuntimeError: PassManager::run failed", Cause.TRITON),
    (1, "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072", Cause.OURS),
    (1, "[1/2 3 s] decode/8x2x64/nsa   INCORRECT  o: 0.1 > 0.01\nx/nsa  OUT_OF_MEMORY  out of memory", Cause.OURS),
    (1, "E  AssertionError: row 3 sees the future\nFAILED tests/laws/test_causality.py::test_x", Cause.OURS),
    (1, "", Cause.OURS),
]  # fmt: skip


@pytest.mark.parametrize(("code", "log", "cause"), LOGS)
def test_whose_matter_a_failure_is(code: int, log: str, cause: Cause) -> None:
    found = diagnose(code, f"before\n{log}\n" if log else "")
    assert found.cause is cause
    assert found.message
    assert found.do
    assert found.send


MENTIONED = [
    ("E   AssertionError: row 3 sees the future\n--- Captured stderr call ---\nptxas info: 0 bytes spill stores\n"
     "FAILED tests/laws/x.py::test_y - AssertionError: row 3", Cause.OURS, "FAILED tests/laws/x.py::test_y"),
    ("skipped: dlopen: MLIR is not here\nptxas warning: x\nTraceback (most recent call last):\n  File a.py\n"
     "ValueError: must be 4; got 3\n\nException ignored in: <function Cache.__del__>\n"
     "Traceback (most recent call last):\n  File c.py\n"
     "RuntimeError: PassManager::run failed\n", Cause.OURS, "ValueError: must be 4; got 3"),
    ("[1/3   1 s,   2 s left] prefill/8/flash-attn  COMPILE_ERROR  CompilationError: MLIR\n"
     "[2/3   1 s,   1 s left] prefill/8/nsa  CRASHED  RuntimeError: CUDA error: misaligned address\n"
     "[3/3   1 s,   0 s left] prefill/9/nsa  PASSED  1 ms", Cause.OURS, "[2/3"),
    ("[1/2    1 s] tie-break   faulty   CRASHED  caught: LLVM ERROR: out of memory\n"
     "[2/2    1 s] tie-break   product  WRONG    RED: WRONG: blocks: row 3", Cause.OURS, "[2/2"),
    ("Traceback (most recent call last):\n  File a.py\nRuntimeError: PassManager::run failed\n\ntried again\n"
     "python -m benchmarks: driver 570.10.01 is too old", Cause.DRIVER, "python -m benchmarks: driver"),
    ("Traceback (most recent call last):\n  File a.py\nsubprocess.CalledProcessError: Command '['ptxas', '-v']'"
     " returned non-zero exit status 255.\n\nDuring handling of the above exception, another exception occurred:\n\n"
     "Traceback (most recent call last):\n  File b.py\nRuntimeError: no kernel for this", Cause.TRITON, "subprocess."),
    ("x.c:7:10: fatal error: Python.h: No such file or directory\nTraceback (most recent call last):\n  File a.py\n"
     "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/triton/x.c']' returned non-zero exit status 1.",
     Cause.MACHINE, "subprocess.CalledProcessError"),
    ("E   triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n"
     "FAILED tests/laws/x.py::test_y", Cause.TRITON, "E   triton.runtime.errors.PTXASError"),
    ("LLVM ERROR: Cannot select: intrinsic\nFatal Python error: Aborted\n\nworker 'gw0' crashed while running 'x'\n"
     "FAILED tests/laws/x.py::test_y\n1 failed", Cause.TRITON, "LLVM ERROR: Cannot select"),
]  # fmt: skip


@pytest.mark.parametrize(("log", "cause", "message"), MENTIONED, ids=[f"{row[1].name}: {row[2]}" for row in MENTIONED])
def test_what_a_log_mentions_beside_the_error_decides_nothing(log: str, cause: Cause, message: str) -> None:
    found = diagnose(1, log)
    assert found.cause is cause
    assert found.message.startswith(message)


def test_the_line_that_was_seen_is_told() -> None:
    assert diagnose(1, "a\n  no kernel image is available\n").message == "no kernel image is available"
    assert diagnose(1, "a\nFAILED tests/x.py::test_y\n2 failed\n").message == "FAILED tests/x.py::test_y"


def test_a_process_that_was_killed_told_nothing() -> None:
    assert diagnose(-9, "ptxas info: 1\nRuntimeError: PassManager::run failed\n").cause is Cause.MACHINE

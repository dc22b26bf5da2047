"""The kernels of an older architecture on a newer GPU, as far as no GPU is needed: which are launched, what is
generated for them, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from nsa.triton_backend import architecture, dispatch, hopper, tuning
from tests.nsa.triton_backend.processes import answer

A_TENSOR = torch.zeros(1, 64, 16, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(("text", "found"), [("sm80", 80), ("sm86", 86), ("sm89", 89), ("", None), (None, None)])
def test_the_variable_names_an_architecture_or_none(text: str | None, found: int | None) -> None:
    assert architecture.forced_by({} if text is None else {architecture.VARIABLE: text}) == found


@pytest.mark.parametrize("text", ["sm90", "86", "SM86", "sm75", "sm86 "])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=f"NSA_FORCE_ARCH must be sm80, sm86, sm89, or not set; got '{text}'"):
        architecture.forced_by({architecture.VARIABLE: text})


def test_a_wrong_one_ends_the_process_that_imports_the_kernels() -> None:
    command = [sys.executable, "-c", "import nsa.triton_backend.architecture"]
    done = subprocess.run(command, env={**os.environ, architecture.VARIABLE: "sm90"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: NSA_FORCE_ARCH must be sm80" in done.stderr


@pytest.mark.parametrize(("here", "forced", "served"), [(90, 86, 86), (90, None, 90), (120, 80, 80), (0, 80, 80)])
def test_a_newer_gpu_serves_as_the_older_one(
    here: int, forced: int | None, served: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0: the interpreter, in which the tiles of any architecture run."""
    monkeypatch.setattr(architecture, "FORCED", forced)
    monkeypatch.setattr(architecture, "of_gpu", lambda _: here)
    assert architecture.of(torch.device("cpu")) == served


@pytest.mark.parametrize("here", [80, 86])
def test_a_gpu_that_is_not_newer_is_refused(here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "FORCED", 86)
    monkeypatch.setattr(architecture, "of_gpu", lambda _: here)
    with pytest.raises(ValueError, match=f"NSA_FORCE_ARCH=sm86 needs a newer GPU than sm{here}"):
        architecture.of(torch.device("cpu"))


def test_a_forced_gpu_takes_its_table_and_no_kernel_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "FORCED", None)
    monkeypatch.setattr(architecture, "of_gpu", lambda _: 90)
    monkeypatch.setattr(hopper, "AVAILABLE", True)
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    kernels = ("compressed_window_forward", "scores", "selected_forward", "selected_backward_q")

    def chosen() -> list[dispatch.Variant]:
        return [
            dispatch.variant(kernel, A_TENSOR, A_TENSOR[:, :, :1], A_TENSOR[:, :, :1], dispatch.SelectionBlocks(64))
            for kernel in kernels
        ]

    assert chosen() == [dispatch.Variant.HOPPER] * 4
    monkeypatch.setattr(architecture, "FORCED", 86)
    assert dispatch.Variant.HOPPER not in chosen()
    for kernel in ("compressed_window_forward", "compressed_window_backward_kv"):
        expected = tuning.fit(kernel, 86, 16, 128, 128, torch.bfloat16)
        assert tuning.shape(kernel, A_TENSOR, A_TENSOR[:, :, :1]) == expected
        assert expected != tuning.fit(kernel, 90, 16, 128, 128, torch.bfloat16)


def compiled(**changes: Any) -> dict[str, Any]:
    return {"arch": "sm86", "shared": 99 * 1024, **changes}


def test_what_fits_is_let_through() -> None:
    architecture.require_fit(86, compiled(), "mma.sync.aligned.m16n8k16; cp.async.cg.shared.global")
    architecture.require_fit(80, compiled(arch="sm80", shared=163 * 1024), None)


@pytest.mark.parametrize(("forced", "limit_kib"), [(86, 99), (80, 163)])
def test_a_kernel_with_more_shared_memory_is_refused(forced: int, limit_kib: int) -> None:
    with pytest.raises(OutOfResources, match=rf"shared memory \(sm{forced}, forced\).*limit: {limit_kib * 1024}"):
        architecture.require_fit(forced, compiled(arch=f"sm{forced}", shared=limit_kib * 1024 + 1), None)


@pytest.mark.parametrize("word", ["wgmma.mma_async.sync", "cp.async.bulk.tensor.2d", "tcgen05.mma"])
def test_a_kernel_with_an_instruction_of_hopper_is_refused(word: str) -> None:
    with pytest.raises(RuntimeError, match="which needs sm90"):
        architecture.require_fit(86, compiled(), f"mma.sync.aligned;\n{word}.x;")


def test_a_kernel_that_was_compiled_for_another_architecture_is_refused() -> None:
    with pytest.raises(RuntimeError, match="compiled for sm90, and NSA_FORCE_ARCH asks for sm86"):
        architecture.require_fit(86, compiled(arch="sm90"), None)


def test_a_triton_that_cannot_be_told_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "triton", SimpleNamespace(__version__="3.2.0"))
    with pytest.raises(ValueError, match=r"NSA_FORCE_ARCH needs Triton 3.6 or newer; this is 3.2.0"):
        architecture.force(86)


def test_an_h200_that_is_forced_is_given_what_an_rtx_3090_would_be() -> None:
    found = answer("compile_forced", forced="sm86")
    assert not [name for name in found["launched"] if name.startswith("hopper.")]
    assert found["kernel"]["instructions"] == ["mma.sync"]
    assert found["kernel"]["target"] == "sm_90a"  # assembled for the GPU that is there
    assert found["kernel"]["shared_bytes"] <= 99 * 1024
    assert "shared memory (sm86, forced)" in found["of_hopper"]["refused"]


def test_one_that_is_not_forced_is_given_its_own() -> None:
    """What the test before looks for is there where nothing is forced."""
    found = answer("compile_forced")
    assert bool([name for name in found["launched"] if name.startswith("hopper.")]) is hopper.AVAILABLE
    assert "wgmma" in found["kernel"]["instructions"]
    assert found["of_hopper"]["shared_bytes"] > 99 * 1024

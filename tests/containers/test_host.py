"""The host's GPU, its image, its driver; each refusal says what was seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from containers import host, image
from containers.host import HostError, HostGpu
from harness import machines
from tests.containers.fake_host import A100, A6000, RTX_3090, V100, nvidia_smi, program

NOTHING = ([], host.NO_DRIVER)


@pytest.mark.parametrize(
    ("asked", "gpus", "family", "expect"),
    [
        (None, [A100], "a100", "a100"),
        ("a100", [RTX_3090, A100], "a100", "a100"),
        (None, [A6000], "3090", "gpu"),
        ("gpu", [RTX_3090], "3090", "3090"),
        (None, [], "cpu", "cpu"),
        ("cpu", [A100], "cpu", "cpu"),
    ],
)
def test_target(asked: str | None, gpus: list[HostGpu], family: str, expect: str) -> None:
    found = host.target(asked, (gpus, "nvidia-smi: no GPU"))
    assert (found.family, found.expect) == (family, expect)
    assert (found.gpu is None) == (family == "cpu")


@pytest.mark.parametrize(
    ("asked", "found", "why"),
    [
        (
            "a100",
            NOTHING,
            "needs an NVIDIA A100; this host has no GPU that its driver shows (nvidia-smi: not installed)",
        ),
        ("gpu", NOTHING, "needs a GPU; this host has no GPU"),
        ("a100", ([RTX_3090], ""), "needs an NVIDIA A100; found: NVIDIA GeForce RTX 3090"),
        (None, ([], "nvidia-smi: Driver/library version mismatch"), "driver is broken: nvidia-smi: Driver/library"),
        (None, ([V100], ""), "no image for Tesla V100-SXM2-32GB (sm70)"),
    ],
)
def test_another_machine_is_refused_with_what_was_seen(
    asked: str | None, found: tuple[list[HostGpu], str], why: str
) -> None:
    with pytest.raises(HostError, match=re.escape(why)):
        host.target(asked, found)


def test_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia_smi(monkeypatch, tmp_path, A100, RTX_3090)
    assert host.gpus()[0] == [A100, RTX_3090]
    program(monkeypatch, tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML'; exit 18")
    assert host.gpus() == ([], "nvidia-smi: Failed to initialize NVML")
    program(monkeypatch, tmp_path, "nvidia-smi", "echo 'NVIDIA A100, [GPU is lost], 580.82'")
    with pytest.raises(HostError, match=re.escape("a GPU that does not answer: 'NVIDIA A100, [GPU is lost], 580.82'")):
        host.gpus()


@pytest.mark.parametrize(("driver", "cuda"), [("580.65.06", "13.0.2"), ("590.1", "13.0.2"), ("555.42.06", "12.8.1")])
def test_a_driver_that_is_new_enough(driver: str, cuda: str) -> None:
    host.check_driver(HostGpu("GPU", (8, 0), driver), cuda)


def test_a_driver_that_is_too_old_says_what_is_needed() -> None:
    with pytest.raises(HostError, match=r"driver 570.10.01 .* CUDA 13.0.2, which needs 580.65.06 or newer"):
        host.check_driver(A6000, "13.0.2")


def test_every_family_has_an_image_and_a_name() -> None:
    dockerfile = image.DOCKERFILE.read_text()
    for family in machines.image_families():
        arguments = image.recipe(family).build_arguments()
        assert f" AS machine-{arguments['MACHINE']}\n" in dockerfile
        assert f" AS packages-{arguments['PACKAGES']}\n" in dockerfile
        assert all(re.search(rf"(?m)^ARG {name}\b", dockerfile) for name in arguments)
        assert host.title(family).startswith("an NVIDIA")


def test_the_locks_hold_the_dockerfiles_cuda() -> None:
    for lock in ("cuda", "hopper"):
        found = re.search(
            r"(?m)^cuda-toolkit==(\d+\.\d+)", (image.DOCKERFILE.parent / "lock" / f"{lock}.txt").read_text()
        )
        assert found is not None
        assert image.cuda_version().startswith(found[1] + ".")

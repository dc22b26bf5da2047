"""A newer GPU in the place of an older one: what asks for it, how it is named, how much memory it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness import fingerprint, forced, machines
from harness.forced import Forced
from harness.machines import Gpu
from nsa.triton_backend import architecture

H200, RTX_3090 = Gpu("NVIDIA H200", (9, 0)), Gpu("NVIDIA GeForce RTX 3090", (8, 6))
AS_3090, AS_A100 = Forced("sm86", 24), Forced("sm80", 40)


def test_what_can_be_forced_is_what_the_kernels_can_be() -> None:
    assert tuple(f"sm{one}" for one in architecture.FORCEABLE) == forced.ARCHITECTURES


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"NSA_FORCE_ARCH": "", "NSA_MEMORY_GB": ""}, None),
        ({"NSA_FORCE_ARCH": "sm80"}, Forced("sm80")),
        ({"NSA_FORCE_ARCH": "sm86", "NSA_MEMORY_GB": "24"}, AS_3090),
    ],
)
def test_the_variables_ask_for_it(variables: dict[str, str], found: Forced | None) -> None:
    assert forced.read(variables) == found


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"NSA_FORCE_ARCH": "sm90"}, "NSA_FORCE_ARCH must be sm80, sm86, sm89, or not set; got 'sm90'"),
        ({"NSA_MEMORY_GB": "24"}, "NSA_MEMORY_GB caps the memory of a GPU that is forced"),
        ({"NSA_FORCE_ARCH": "sm86", "NSA_MEMORY_GB": "24GB"}, "NSA_MEMORY_GB must be whole GB, such as 24; got '24GB'"),
        ({"NSA_FORCE_ARCH": "sm86", "NSA_MEMORY_GB": "0"}, "NSA_MEMORY_GB must be whole GB"),
        ({"NSA_FORCE_ARCH": "sm86", "NSA_MEMORY_GB": "-24"}, "NSA_MEMORY_GB must be whole GB"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        forced.read(variables)


def test_options_take_precedence_and_are_left_to_every_child() -> None:
    variables = {"NSA_FORCE_ARCH": "sm89", "NSA_MEMORY_GB": "24"}
    assert forced.enter("sm80", 40, variables) == AS_A100
    assert variables == {"NSA_FORCE_ARCH": "sm80", "NSA_MEMORY_GB": "40"}
    assert forced.enter(None, None, variables) == AS_A100
    with pytest.raises(ValueError, match="set NSA_FORCE_ARCH too"):
        forced.enter(None, 24, {})
    for wrong in (0, -1, 10000):
        with pytest.raises(ValueError, match=f"^--memory-gb must be from 1 to 9999; got {wrong}$"):
            forced.enter("sm86", wrong, {})


@pytest.mark.parametrize("made", [AS_3090, AS_A100, Forced("sm86")])
@pytest.mark.parametrize("gpu", [H200, Gpu("NVIDIA GeForce RTX 5090", (12, 0))])
def test_it_is_a_machine_of_its_own_without_a_data_sheet(gpu: Gpu, made: Forced) -> None:
    own = machines.recognise(gpu)
    found = forced.machine(own, gpu, made)
    assert found.id == own.id + made.suffix
    assert (found.bf16_tflops, found.memory_tb_per_s) == (None, None)
    assert (forced.of(found.id), forced.itself(found.id)) == (made, own.id)
    assert (forced.of(own.id), forced.itself(own.id)) == (None, own.id)
    assert not machines.is_id(found.id) or own.family is None
    assert forced.machine(own, gpu, None) is own


@pytest.mark.parametrize(("made", "suite"), [(AS_3090, "24gb"), (AS_A100, "24gb"), (Forced("sm80"), "80gb")])
def test_the_suite_is_that_of_the_memory(made: Forced, suite: str) -> None:
    assert forced.machine(machines.recognise(H200), H200, made).suite == suite


@pytest.mark.parametrize(
    ("gpu", "made", "why"),
    [
        (None, AS_3090, "--force-arch sm86 needs an NVIDIA GPU; leave it out on a CPU"),
        (RTX_3090, AS_3090, "needs a newer GPU; NVIDIA GeForce RTX 3090 is sm86: leave it out"),
        (Gpu("NVIDIA A100-SXM4-80GB", (8, 0)), AS_3090, "needs a newer GPU; NVIDIA A100-SXM4-80GB is sm80"),
        (H200, Forced("sm86", 142), "--memory-gb must be at most the GPU's 141; got 142"),
    ],
    ids=["CPU", "itself", "older", "more memory"],
)
def test_what_cannot_be_forced_is_refused(gpu: Gpu | None, made: Forced, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        forced.machine(machines.recognise(gpu), gpu, made)


def test_the_cpu_of_a_machine_with_a_gpu_is_refused_too() -> None:
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        forced.machine(machines.machine("cpu", H200), H200, AS_3090)


@pytest.mark.parametrize(
    ("asked", "machine"), [("sm86", "h200"), ("sm86", "h200-forced-sm80"), (None, "h200-forced-sm86")]
)
def test_no_record_has_another_name(asked: str | None, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever command takes the fingerprint: compare, calibrate, first-contact, tune."""
    monkeypatch.setenv("NSA_FORCE_ARCH", asked or "")
    with pytest.raises(ValueError, match=f"records of '{machine}' would not say"):
        fingerprint.take(machine, "cuda")
    fingerprint.take("cpu", "cpu")


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], list[float]]:
    """A GPU with so much (free, total) memory, GB; the fractions that PyTorch's allocator is given."""

    def install(free_gb: float, total_gb: float) -> list[float]:
        fractions: list[float] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free_gb * 1e9), int(total_gb * 1e9)))
        for name in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
        return fractions

    return install


def test_memory_is_capped_for_the_allocator_and_for_what_is_predicted(
    gpu_of: Callable[[float, float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions = gpu_of(138.0, 141.0)
    forced.cap_memory()
    assert (fractions, forced.memory_bytes()) == ([], (138 * 10**9, 141 * 10**9))
    monkeypatch.setenv("NSA_FORCE_ARCH", "sm80")
    forced.cap_memory()
    assert (fractions, forced.memory_bytes()) == ([], (138 * 10**9, 141 * 10**9))
    monkeypatch.setenv("NSA_MEMORY_GB", "40")
    forced.cap_memory()
    assert fractions == [pytest.approx(40 / 141)]
    assert forced.memory_bytes() == (40 * 10**9, 40 * 10**9)


def test_memory_is_capped_when_the_gpu_is_first_used(
    gpu_of: Callable[[float, float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that does not use it must stay one that can be forked, as resume-drift does."""
    fractions, queued = gpu_of(138.0, 141.0), list[tuple[Callable[[], None], object]]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_queued_calls", queued)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("starts CUDA's driver"))
    forced.enter("sm80", 40, variables := {})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    forced.cap_memory()
    assert not fractions
    for call, _ in queued:
        call()
    assert fractions == [pytest.approx(40 / 141)]


def test_what_is_done_on_the_cpu_is_not_forced() -> None:
    variables = {"NSA_ENGINE": "none"}
    assert forced.enter("sm86", 24, variables) == AS_3090
    forced.leave(variables)
    assert variables == {"NSA_ENGINE": "none"}
    forced.leave(variables)


def test_what_others_hold_is_not_free_under_a_cap(
    gpu_of: Callable[[float, float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(10.0, 141.0)
    monkeypatch.setenv("NSA_FORCE_ARCH", "sm86")
    monkeypatch.setenv("NSA_MEMORY_GB", "24")
    assert forced.memory_bytes() == (10 * 10**9, 24 * 10**9)


def test_what_this_process_keeps_and_does_not_use_is_free_to_it(
    gpu_of: Callable[[float, float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(10.0, 141.0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 9 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7 * 10**9)
    assert forced.memory_bytes() == (12 * 10**9, 141 * 10**9)
    monkeypatch.setenv("NSA_FORCE_ARCH", "sm86")
    monkeypatch.setenv("NSA_MEMORY_GB", "18")
    assert forced.memory_bytes() == (11 * 10**9, 18 * 10**9)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        (None, AS_3090),
        (None, None),
        ("results/laws/h200-20260101-aaaaaaaaaa-laws-forced-sm86-24gb.xml", AS_3090),
        ("all.xml", None),
    ],
)
def test_a_report_of_tests_says_what_they_were_forced_to(name: str | None, made: Forced | None) -> None:
    forced.require_report(name, made)


@pytest.mark.parametrize(
    ("name", "made", "why"),
    [
        ("h200-20260101-aaaaaaaaaa-laws.xml", AS_3090, "must end in -forced-sm86-24gb; got h200-"),
        ("laws-forced-sm86.xml", AS_3090, "must end in -forced-sm86-24gb"),
        ("laws-forced-sm86.xml", None, "must not say that anything was forced"),
    ],
)
def test_a_report_under_another_name_is_refused(name: str, made: Forced | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        forced.require_report(name, made)

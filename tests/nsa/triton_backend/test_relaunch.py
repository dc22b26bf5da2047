"""A launch like an earlier one goes past Triton's lookup, and one that Triton would specialize otherwise does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction

import nsa
from nsa.triton_backend import ahead_of_time
from nsa.triton_backend.launching import relaunch

pytestmark = pytest.mark.skipif(not relaunch.SERVES, reason="this Triton launches all kernels itself")
GRID, OPTIONS = (4, 2), {"num_warps": 4}
HOOKS = "launch_enter_hook", "launch_exit_hook"


def scaled(X, Y, count, stride, scale, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    x = tl.load(X + place * stride, mask=place < count)
    if Y is not None:
        tl.store(Y + place, x * scale, mask=place < count)


class Launches:
    """Those of one kernel: what it is launched with, and how often that goes through Triton."""

    def __init__(self, run: mock.Mock) -> None:
        self.kernel, self._run = relaunch.Kernel(scaled, ("count",)), run
        self.given: dict[str, Any] = {
            "X": torch.zeros(64, dtype=torch.bfloat16),
            "Y": torch.zeros(64),
            "count": 48,
            "stride": 32,
            "scale": 0.5,
            "SIZE": 64,
        }

    @property
    def through_triton(self) -> int:
        return self._run.call_count

    def __call__(self, grid: Any = GRID, *, options: dict[str, Any] = OPTIONS, **changed: Any) -> Any:
        """Launch, and give the compiled kernel."""
        return self.kernel[grid](*{**self.given, **changed}.values(), **options)


@pytest.fixture
def launches() -> Iterator[Launches]:
    with (
        ahead_of_time.recorded(90),
        mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run,
    ):
        yield Launches(run)


def launched(compiled: mock.Mock) -> tuple[Any, ...]:
    """What the compiled kernel was launched with last, without metadata for hooks and hooks."""
    words = compiled.run.call_args.args
    return *words[:6], *words[9:]


def test_a_second_launch_goes_past_triton_with_the_same_arguments(launches: Launches) -> None:
    compiled = launches()
    first = launched(compiled)
    assert launches() is compiled
    assert launches.through_triton == 1
    assert compiled.run.call_count == 2
    second = launched(compiled)
    assert len(second) == len(first)
    assert all(a is b or a == b for a, b in zip(first, second, strict=True))


SAME = {
    "another length": {"count": 17},
    "a length of 1": {"count": 1},
    "another tensor": {"X": torch.ones(640, dtype=torch.bfloat16)[64:]},
    "a parameter": {"Y": torch.zeros(64).requires_grad_()},
    "another float": {"scale": 7.5},
    "another grid": {"grid": (1, 2, 3)},
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_triton_does_not_specialize_on(launches: Launches, change: dict[str, Any]) -> None:
    compiled = launches()
    assert launches(**change) is compiled
    assert launches.through_triton == 1
    words = launched(compiled)
    assert words[:3] == (*change.get("grid", GRID), 1)[:3]
    given = {**launches.given, **change}
    assert all(a is b or a == b for a, b in zip(words[6:], (given[x] for x in launches.given), strict=True))


OTHER = {
    "an address that is no multiple of 16": {"X": torch.zeros(65, dtype=torch.bfloat16)[1:]},
    "another such address": {"Y": torch.zeros(65)[1:]},
    "another dtype": {"X": torch.zeros(64, dtype=torch.float16)},
    "no tensor": {"Y": None},
    "a stride of 1": {"stride": 1},
    "a stride that is no multiple of 16": {"stride": 40},
    "a stride of 64 bits": {"stride": 2**31},
    "a length of 64 bits": {"count": 2**31},
    "a bool": {"stride": True},
    "an int for a float": {"scale": 1},
    "another constant": {"SIZE": 128},
    "another option": {"options": {"num_warps": 8}},
    "one more option": {"options": {"num_warps": 4, "num_stages": 5}},
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_triton_specializes_on(launches: Launches, change: dict[str, Any]) -> None:
    for _ in range(2):  # in the second round all are found again
        launches()
        launches(**change)
    assert launches.through_triton == 2


def test_a_one_is_not_a_true_nor_a_float(launches: Launches) -> None:
    """They are equal to Python."""
    for one in (1, True, 1.0):
        launches(stride=one)
    assert launches.through_triton == 3


def test_which_of_the_addresses_is_a_multiple_of_16(launches: Launches) -> None:
    x, y = torch.zeros(65, dtype=torch.bfloat16)[1:], torch.zeros(65)[1:]
    for _ in range(2):
        for moved in ({"X": x}, {"Y": y}, {"X": x, "Y": y}):
            launches(**moved)
    assert launches.through_triton == 3


def test_another_device(launches: Launches) -> None:
    driver = triton.runtime.driver.active
    here = driver.device
    for _ in range(2):
        for driver.device in (here, here - 10**6):
            launches()
    assert launches.through_triton == 2


def test_arguments_by_name_and_of_unknown_types_go_through_triton(launches: Launches) -> None:
    *first, last = launches.given.values()
    for _ in range(2):
        launches.kernel[GRID](*first, SIZE=last, **OPTIONS)
        launches(X=(launches.given["X"],), Y=None)
    assert launches.through_triton == 4


@pytest.mark.parametrize("name", HOOKS)
def test_a_launch_hook_is_told_by_triton(launches: Launches, name: str) -> None:
    compiled, chain = launches(), getattr(triton.knobs.runtime, name)
    chain.add(print)
    try:
        launches()
        assert launches.through_triton == 2
        assert chain in compiled.run.call_args.args
    finally:
        chain.remove(print)
    launches()
    assert launches.through_triton == 2


def _inspected(patch: pytest.MonkeyPatch, _: Launches) -> None:
    patch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda: ("key", "hash"))


def _debugged(patch: pytest.MonkeyPatch, _: Launches) -> None:
    patch.setattr(triton.knobs.runtime, "debug", True)


def _instrumented(patch: pytest.MonkeyPatch, _: Launches) -> None:
    patch.setattr(triton.knobs.compilation, "instrumentation_mode", "fpsan")


def _replaced(patch: pytest.MonkeyPatch, _: Launches) -> None:
    patch.setattr(triton.knobs.runtime, "launch_enter_hook", print)


def _before_each_run(patch: pytest.MonkeyPatch, launches: Launches) -> None:
    patch.setattr(launches.kernel, "pre_run_hooks", [lambda *_, **__: None])


@pytest.mark.parametrize("mode", [_inspected, _debugged, _instrumented, _replaced, _before_each_run])
def test_where_triton_is_observed_or_compiles_otherwise_it_launches(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, mode: Callable[[pytest.MonkeyPatch, Launches], None]
) -> None:
    launches()
    with monkeypatch.context() as patch:
        mode(patch, launches)
        for _ in range(2):
            launches()
    assert launches.through_triton == 3
    launches()
    assert launches.through_triton == 3


def test_what_was_compiled_and_not_launched_is_not_kept(launches: Launches) -> None:
    compiled = launches(stride=48)  # whose stand-in is in Triton's cache from here on
    launches.kernel._by_types.clear()
    compiled.function = None
    for _ in range(2):
        launches(stride=48)
    assert launches.through_triton == 3


def test_what_is_kept_is_bounded(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch, "MOST_KEYS", 3)
    for stride in range(2, 20):
        launches(stride=stride)
    (known,) = launches.kernel._by_types.values()
    assert known is not None
    assert 1 <= len(known.launched) <= 3


def test_a_device_is_entered_where_another_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tensors = [mock.Mock(is_cuda=True, device=torch.device("cuda", i)) for i in range(3)]
    for number, x in enumerate(tensors):
        x.get_device.return_value = number
    entered = [isinstance(relaunch.on_device(x), torch.cuda.device) for x in (*tensors, torch.zeros(1))]
    assert entered == [True, False, True, False]


@pytest.mark.gpu
def test_calls_of_changing_alignment_agree_with_the_first() -> None:
    """A kernel that was compiled for aligned addresses would fault on others."""
    length, offsets = 1024, (0, 0, 1, 0, 8, 1, 3)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (4, 64), (2, 64), (2, 64), (4, 3)
    drawn = [
        torch.randn(1, length, *shape, device="cuda", generator=generator).bfloat16().requires_grad_()
        for shape in shapes
    ]

    def moved(x: Tensor, offset: int) -> Tensor:
        """x, `offset` elements behind an aligned address."""
        place = torch.empty(x.numel() + offset, device=x.device, dtype=x.dtype)[offset:].view(x.shape)
        return place.copy_(x.detach()).requires_grad_()

    def call(offset: int) -> list[Tensor]:
        q, k, v, gates = (moved(x, offset) for x in drawn)
        o = nsa.nsa_attention(q, k, v, gates, nsa.NSAConfig(), backend="triton")
        return [o.detach(), *torch.autograd.grad(o, (q, k, v, gates), torch.ones_like(o))]

    first, *later = map(call, offsets)
    for found in later:
        for one, wanted in zip(found, first, strict=True):
            torch.testing.assert_close(one, wanted, rtol=0.02, atol=0.02)


@pytest.fixture(params=[False, True], ids=["no scratch", "scratch"])
def compiled_for_a_gpu(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A kernel as Triton compiles it, with scratch memory or without; its launcher calls a mock in place of C."""
    launcher = CudaLauncher.__new__(CudaLauncher)
    of_this_triton = {} if hasattr(nvidia, "make_launcher") else {"arg_annotations": [9], "kernel_signature": b"ii"}
    vars(launcher).update(
        launch=mock.Mock(), num_ctas=1, launch_cooperative_grid=False, launch_pdl=True,
        global_scratch_size=64 * request.param, global_scratch_align=16,
        profile_scratch_size=0, profile_scratch_align=1, **of_this_triton,
    )  # fmt: skip
    return SimpleNamespace(run=launcher, function=7, packed_metadata=(1, 2))


def test_a_start_gives_tritons_function_what_its_launcher_does(compiled_for_a_gpu: SimpleNamespace) -> None:
    launcher, function, metadata = vars(compiled_for_a_gpu).values()
    launch, fixed, packed = relaunch.start(compiled_for_a_gpu)
    arguments = 5, 6
    memory = mock.Mock(return_value=1024)
    allocator = mock.Mock(get=mock.Mock(return_value=memory))
    with mock.patch.object(nvidia._allocation, "_allocator", allocator):
        launch(1, 2, 3, 99, *fixed, *([arguments] if packed else arguments))
        launcher(1, 2, 3, 99, function, metadata, None, None, None, *arguments)
    ours, tritons = launcher.launch.call_args_list
    assert ours == tritons
    assert memory.call_count == (2 if launcher.global_scratch_size else 0)

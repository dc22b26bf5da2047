"""A function's launches, recorded once, are launched again for other tensors: the same as calling the function.

The kernels here are Python that computes on a CPU, and is given addresses or tensors as Triton's launcher is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nsa.triton_backend import ahead_of_time, tuning
from nsa.triton_backend.launching import lanes, plan, recording, relaunch
from nsa.triton_backend.launching import plans as plans_module
from nsa.triton_backend.launching.plan import Plan, Tensors
from nsa.triton_backend.launching.plans import Plans
from nsa.triton_backend.launching.recording import Memory

pytestmark = pytest.mark.skipif(not relaunch.SERVES, reason="this Triton launches all kernels itself")
RESULT, KEPT, WORKSPACE = Memory.RESULT, Memory.KEPT, Memory.WORKSPACE
SIZE = 6


def _values(x: Tensor | int, count: int) -> Any:
    """The float32 numbers at an address, or at a tensor's."""
    address = x.data_ptr() if isinstance(x, Tensor) else x
    return (ctypes.c_float * count).from_address(address)


class Kernel:
    """OUT = A + scale * B, of `count` numbers; B may be None. Told to who records, as `relaunch.Kernel` tells."""

    function, packed_metadata = 1, 2

    def __init__(self) -> None:
        self.streams: list[int] = []

    def __call__(self, a: Tensor, b: Tensor | None, out: Tensor, scale: float) -> None:
        arguments = (a, b, out, out.numel(), scale)
        self.run(1, 1, 1, 0, self.function, self.packed_metadata, None, None, None, *arguments)
        if relaunch.thread.recorder is not None:
            relaunch.thread.recorder.launched(self, (1,), arguments)

    def run(self, x: int, y: int, z: int, stream: int, *more: Any) -> None:
        function, metadata, *hooks, a, b, out, count, scale = more
        assert (x, y, z, function, metadata, hooks) == (1, 1, 1, 1, 2, [None] * 3)
        self.streams.append(stream)
        second = [0.0] * count if b is None else [*_values(b, count)]
        _values(out, count)[:] = [one + scale * other for one, other in zip(_values(a, count), second, strict=True)]


kernel = Kernel()


def chained(given: Tensors, scale: float = 2.0) -> Tensors:
    """(a + scale b, what lies between, a + scale b + scale a): by way of workspace."""
    a, b = given
    assert a is not None
    between, workspace, total = torch.empty(SIZE), torch.empty(SIZE), torch.empty(SIZE)
    kernel(a, b, between, scale)
    kernel(between, a, workspace, scale)
    kernel(workspace, None, total, scale)
    return between, workspace, total


def wanted(given: Tensors, scale: float = 2.0) -> list[Tensor]:
    a, b = given
    assert a is not None
    between = a + scale * (torch.zeros(SIZE) if b is None else b)
    return [between, between + scale * a]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with ahead_of_time.recorded(90):
        yield


@pytest.fixture
def plans() -> Plans:
    return Plans(chained, (RESULT, WORKSPACE, KEPT))


def drawn(*, offset: int = 0) -> Tensor:
    return torch.randn(SIZE + offset)[offset:]


def check(plans: Plans, given: Tensors, *, scale: float = 2.0) -> Plan:
    """One call is right."""
    found = plans.keeping(given, scale)
    assert found is not None
    (result,), kept, its = found
    (view,) = its.views
    for one, true in zip((result, view.of(kept)), wanted(given, scale), strict=True):
        assert one is not None
        torch.testing.assert_close(one, true)
    return its


def pairs(*, of: Callable[[], Sequence[Tensor | None]], calls: int = 3) -> Iterator[Sequence[Tensor | None]]:
    for _ in range(calls):
        yield of()


def of_one_storage() -> Sequence[Tensor | None]:
    both = torch.randn(2 * SIZE)
    return both[:SIZE], both[SIZE:]


GIVEN: dict[str, Callable[[], Sequence[Tensor | None]]] = {
    "two tensors": lambda: (drawn(), drawn()),
    "parts of one": of_one_storage,
    "parts that begin later": lambda: (drawn(offset=4), drawn(offset=1)),
    "no second": lambda: (drawn(), None),
    "parameters": lambda: (drawn().requires_grad_(), drawn()),
}


@pytest.mark.parametrize("of", GIVEN.values(), ids=GIVEN)
def test_a_call_by_plan_is_a_call_of_the_function(
    plans: Plans, of: Callable[[], Sequence[Tensor | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        first, *later = pairs(of=of)
        found = check(plans, first)
        monkeypatch.setattr(plans, "function", None)  # which is not called again
        assert all(check(plans, given) is found for given in later)


def test_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans(lambda given: (*chained(given)[:1], None, chained(given)[2]), (RESULT, RESULT, RESULT))
    for number in range(3):
        given = drawn(), drawn()
        first, none, last = plans(given)
        assert none is None
        for one, true in zip((first, last), wanted(given), strict=True):
            assert one is not None
            torch.testing.assert_close(one, true)
        if number == 0:
            monkeypatch.setattr(plans, "function", None)


def test_what_is_kept_and_workspace_do_not_overlap(plans: Plans) -> None:
    found = check(plans, (drawn(), drawn()))
    assert found.kept_bytes == found.workspace_bytes == recording.ALIGNMENT
    assert all(view.first_byte % recording.ALIGNMENT == 0 for view in found.views)


def test_the_same_tensor_twice_is_no_two_tensors(plans: Plans) -> None:
    """Which of the two an address belongs to is not seen where they are one."""
    x = drawn()
    same = check(plans, (x, x))
    assert check(plans, (drawn(), drawn())) is not same
    assert check(plans, (x, x.clone())) is not same
    y = drawn()
    assert check(plans, (y, y)) is same


def _another_table(patch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace()
    patch.setattr(tuning, "table", lambda _: other)


def _another_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan.driver.active, "device", plan.driver.active.device - 10**6)


OTHER: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "another alignment": lambda _: {"given": (drawn(offset=1), drawn())},
    "the second's": lambda _: {"given": (drawn(), drawn(offset=1))},
    "another number": lambda _: {"scale": 3.0},
    "one is missing": lambda _: {"given": (drawn(), None)},
    "another current device": lambda patch: _another_device(patch) or {},  # type: ignore[func-returns-value]
    "another table of launches": lambda patch: _another_table(patch) or {},  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_launches_depend_on_has_another_plan(
    plans: Plans, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], dict[str, Any]]
) -> None:
    first = check(plans, (drawn(), drawn()))
    changed = change(monkeypatch)
    given = changed.pop("given", (drawn(), drawn()))
    assert check(plans, given, **changed) is not first


def test_another_shape_dtype_or_stride_has_another_key(plans: Plans) -> None:
    x = torch.randn(4, 4)
    keys = [plans._key((one, None), ()) for one in (x, x.T, x[:, :2], x.view(16), x.double(), x.clone())]
    assert len(set(keys)) == len(keys) - 1
    assert keys[0] == keys[-1]


def test_launches_go_to_the_stream_that_is_current(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    check(plans, (drawn(), drawn()))
    monkeypatch.setattr(type(plan.driver.active), "get_current_stream", lambda *_: 77)
    kernel.streams.clear()
    check(plans, (drawn(), drawn()))
    assert kernel.streams == [77, 77, 77]


def _an_operation(given: Tensors) -> Tensors:
    between, workspace, total = chained(given)
    assert total is not None
    return between, workspace, total + 0.0


def _a_copy(given: Tensors) -> Tensors:
    a, b = given
    assert a is not None
    return chained((torch.stack([a, a], 1)[:, 0].contiguous(), b))


def _a_given_tensor(given: Tensors) -> Tensors:
    return given[0], *chained(given)[1:]


def _one_result_twice(given: Tensors) -> Tensors:
    between, workspace, _ = chained(given)
    return between, workspace, between


def _part_of_an_allocation(given: Tensors) -> Tensors:
    between, workspace, total = chained(given)
    wide = torch.empty(2 * SIZE)
    kernel(total, None, wide[:SIZE], 0.0)  # type: ignore[arg-type]
    return between, workspace, wide[:SIZE]


def _a_launch_of_triton(given: Tensors) -> Tensors:
    found = chained(given)
    if relaunch.thread.recorder is not None:
        relaunch.thread.recorder.launched(None, (1,), None)
    return found


UNPLANNED = _an_operation, _a_copy, _a_given_tensor, _one_result_twice, _part_of_an_allocation, _a_launch_of_triton


@pytest.mark.parametrize("function", UNPLANNED)
def test_what_does_more_than_launch_is_called_each_time(function: Callable[[Tensors], Tensors]) -> None:
    keeping, resulting = Plans(function, (RESULT, WORKSPACE, KEPT)), Plans(function, (RESULT, RESULT, RESULT))
    for _ in range(3):
        given = drawn(), drawn()
        assert keeping.keeping(given) is None
        for one, true in zip(resulting(given), function(given), strict=True):
            assert one is not None
            assert true is not None
            torch.testing.assert_close(one, true)


def test_a_part_of_one_of_two_tensors_of_a_storage_is_not_planned() -> None:
    """Which of them it is a part of cannot be told."""

    def function(given: Tensors) -> Tensors:
        a, _ = given
        assert a is not None
        out = torch.empty(SIZE - 1)
        kernel(a[1:], None, out, 0.0)
        return (out,)

    assert Plans(function, (RESULT,)).keeping(of_one_storage()) is None
    assert Plans(function, (RESULT,)).keeping((drawn(), drawn())) is not None


@pytest.mark.parametrize("packed", [False, True])
def test_a_plan_launches_as_relaunch_says(plans: Plans, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """With arguments one by one, as Triton 3.6 takes them, or as one tuple, as 3.7 does."""
    launched = []

    def launch(x: int, y: int, z: int, stream: int, fixed: str, *arguments: Any) -> None:
        launched.append(fixed)
        own = arguments[0] if packed else arguments
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *own)

    monkeypatch.setattr(relaunch, "start", lambda _: relaunch.Start(launch, ("fixed",), packed))
    for _ in range(2):
        check(plans, (drawn(), drawn()))
    assert launched == 3 * ["fixed"]


def test_while_launches_are_observed_the_function_is_called(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each call, and no plan is made of it."""
    found = check(plans, (drawn(), drawn()))
    calls: list[Tensors] = []
    monkeypatch.setattr(plans, "function", lambda given, scale: (calls.append(given), chained(given, scale))[1])
    with monkeypatch.context() as patch:
        patch.setattr(relaunch, "observed", lambda: True)
        assert check(plans, (drawn(), drawn())) is found  # what is kept lies where the plan says
        assert len(calls) == 1
        assert plans.keeping((drawn(), None), 2.0) is None
        assert plans.if_planned((drawn(), drawn()), 2.0) is None
        assert len(calls) == 1
        plans((drawn(), None), 2.0)
        assert len(calls) == 2
    assert check(plans, (drawn(), drawn())) is found
    check(plans, (drawn(), None))
    assert len(calls) == 3


def test_a_table_that_is_gone_is_not_taken_for_a_newer_one(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python gives its address to another object."""
    found = []
    for _ in range(8):
        table = SimpleNamespace()
        monkeypatch.setattr(tuning, "table", lambda _, it=table: it)
        found.append(check(plans, (drawn(), drawn())))
        del table
    assert len({id(one) for one in found}) == len(found)


def test_a_part_that_begins_where_another_tensor_does_is_none_of_it() -> None:
    def function(given: Tensors) -> Tensors:
        a, _ = given
        assert a is not None
        out = torch.empty(SIZE)
        kernel(a[SIZE:], None, out, 0.0)
        return (out,)

    plans = Plans(function, (RESULT,))
    for second in (SIZE, SIZE + 4):
        both = torch.randn(3 * SIZE)
        (out,) = plans((both[: 2 * SIZE], both[second : second + SIZE + 1]))
        assert out is not None
        assert torch.equal(out, both[SIZE : 2 * SIZE])


def test_a_call_inside_a_recording_makes_it_incomplete(plans: Plans) -> None:
    """The outer one does not hear what the inner one launches."""

    def outer(given: Tensors) -> Tensors:
        return plans((given[0], given[1]), 2.0)

    plans.memories = (RESULT, RESULT, RESULT)
    around = Plans(outer, (RESULT, RESULT, RESULT))
    for _ in range(3):
        given = drawn(), drawn()
        first, _, last = around(given)
        for one, true in zip((first, last), wanted(given), strict=True):
            assert one is not None
            torch.testing.assert_close(one, true)
    assert [*around._known.values()] == [None]


def test_what_is_kept_of_plans_is_bounded(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "MOST_PLANS", 3)
    for scale in range(10):
        check(plans, (drawn(), drawn()), scale=float(scale))
        assert 1 <= len(plans._known) <= 3


def test_an_error_ends_the_recording(plans: Plans) -> None:
    def fails(_: Tensors) -> Tensors:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Plans(fails, (RESULT,)).keeping((drawn(),))
    assert relaunch.thread.recorder is None
    check(plans, (drawn(), drawn()))


def in_lanes(given: Tensors) -> Tensors:
    """One launch, two beside one another, one behind both; and one in a lane that ends with the call."""
    a, _ = given
    assert a is not None
    first, left, right, both, last = (torch.empty(SIZE) for _ in range(5))
    kernel(a, None, first, 0.0)
    with lanes.beside(2, a):
        with lanes.lane(1):
            kernel(first, a, left, 2.0)
        with lanes.lane(2):
            kernel(first, a, right, 3.0)
            kernel(right, a, right, 1.0)
    kernel(left, right, both, 1.0)
    with lanes.beside(1, a), lanes.lane(1):
        kernel(both, a, last, 1.0)
    return both, last


@dataclass
class Stream:
    """Notes who waits for whom, and behind how many launches."""

    cuda_stream: int
    waits: list[tuple[int, int, int]]

    def wait_stream(self, other: Stream) -> None:
        self.waits.append((self.cuda_stream, other.cuda_stream, len(kernel.streams)))


def in_lanes_with_lane_0(given: Tensors) -> Tensors:
    """Three launches beside one another, one of them in lane 0 and before that of lane 2; and two blocks with no launch
    of lane 0 in between."""
    a, _ = given
    assert a is not None
    first, left, middle, right, last = (torch.empty(SIZE) for _ in range(5))
    kernel(a, None, first, 0.0)
    with lanes.beside(2, a):
        with lanes.lane(1):
            kernel(first, a, left, 2.0)
        kernel(first, a, middle, 4.0)
        with lanes.lane(2):
            kernel(first, a, right, 3.0)
    with lanes.beside(1, a), lanes.lane(1):
        kernel(left, right, last, 1.0)
    kernel(last, middle, last, 1.0)
    return middle, last


@pytest.mark.parametrize(
    ("function", "streams_of_capture", "waits_of_capture"),
    [
        (in_lanes, [0, 1, 2, 2, 0, 1], [(1, 0, 1), (2, 0, 1), (0, 1, 4), (0, 2, 4), (1, 0, 5), (0, 1, 6)]),
        (
            in_lanes_with_lane_0,
            [0, 1, 0, 2, 1, 0],
            [(1, 0, 1), (2, 0, 1), (0, 1, 4), (0, 2, 4), (1, 0, 4), (0, 1, 5)],
        ),
    ],
    ids=["one after the other", "two in a row"],
)
def test_a_graph_that_is_captured_has_a_stream_for_each_lane(
    function: Callable[[Tensors], Tensors],
    streams_of_capture: list[int],
    waits_of_capture: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, waits = Plans(function, (RESULT, RESULT)), list[tuple[int, int, int]]()
    plans((drawn(), None))
    monkeypatch.setattr(plan, "side_stream", lambda _, beside, lane: Stream(lane + beside, waits))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(0, waits))
    for capturing, streams, wanted in ((False, [0] * 6, []), (True, streams_of_capture, waits_of_capture)):
        monkeypatch.setattr(plan, "_capturing", lambda _, it=capturing: it)
        kernel.streams.clear()
        waits.clear()
        given = drawn(), None
        found, true = plans(given), function(given)
        assert all(one is not None and other is not None and torch.equal(one, other)
                   for one, other in zip(found, true, strict=True))  # fmt: skip
        assert kernel.streams[:6] == streams
        assert waits == wanted

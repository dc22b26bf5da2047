"""Whole calls by plans give the bits of calls without them, forward and backward, whatever is asked of them.

On a CPU the kernels run in Triton's interpreter, which is told to record and to launch again as a GPU's launcher does.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import nsa
from nsa import checks
from nsa.config import BRANCHES

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from nsa import triton_backend
from nsa.triton_backend import ahead_of_time, attention_ops, dispatch, hopper, ops, planned, tuning
from nsa.triton_backend.launching import plan, plans, relaunch
from nsa.triton_backend.launching.recording import Recording
from tests.nsa.triton_backend import masking

CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=13)
LENGTH, SHORT = 40, 17


@dataclass
class _Interpreted:
    """What the interpreter ran, to be run again with addresses in place of tensors."""

    kernel: InterpretedFunction
    launch: Callable[..., object]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    function: int = 1
    packed_metadata: None = None

    def run(self, x: int, y: int, z: int, *more: Any) -> None:
        given = more[-len(self.arguments) :]
        arguments = [_at(one, was.dtype) if isinstance(was, Tensor) else one
                     for one, was in zip(given, self.arguments, strict=True)]  # fmt: skip
        self.launch(self.kernel, *arguments, grid=(x, y, z), warmup=False, **self.options)


def _at(address: int, dtype: torch.dtype) -> Tensor:
    """A tensor that begins there: a kernel asks for its address and its dtype alone."""
    if not address:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


@pytest.fixture(autouse=True)
def planned_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the interpreter too."""
    if not dispatch.interpreted():
        yield
        return
    launch = InterpretedFunction.run

    def run(kernel: InterpretedFunction, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        with _disable_current_modes():  # the interpreter's own operations are no part of a call
            launch(kernel, *arguments, grid=grid, warmup=warmup, **options)
        if relaunch.thread.recorder is not None:
            relaunch.thread.recorder.launched(_Interpreted(kernel, launch, arguments, options), grid, arguments)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(planned, "AVAILABLE", True)
    with mock.patch.object(ahead_of_time.triton.runtime.driver, "_active", ahead_of_time._Driver(0)):
        yield


@dataclass(frozen=True)
class Call:
    """What a call is given."""

    sets: int = 3
    """Of keys and values: one for all branches, or one for each."""
    heads: tuple[int, int] = (4, 2)
    channels: int = 16
    queries: int = LENGTH
    keys: int = LENGTH
    documents: tuple[int, ...] | None = None
    compressed: bool = False
    """Whether the caller compresses keys and values."""
    observed: bool = False
    through_lse: bool = False
    """Whether the log-sum-exps have gradients, too."""
    dtype: torch.dtype = torch.float32
    masked: bool = True
    """Whether `selected_masked.py` serves it: else the backward pass sorts an index, which no plan does."""

    def drawn(self, device: torch.device, seed: int) -> list[Tensor]:
        """q, keys, values, gates, and what the caller compresses."""
        generator = torch.Generator().manual_seed(seed)
        heads, num_kv_heads = self.heads
        shapes = [(self.queries, heads, self.channels), *2 * self.sets * [(self.keys, num_kv_heads, self.channels)]]
        shapes += [(self.queries, heads, 3), *2 * self.compressed * [(self.keys, num_kv_heads, self.channels)]]
        return [torch.randn(1, *shape, generator=generator).to(device, self.dtype).requires_grad_() for shape in shapes]

    def __call__(self, leaves: list[Tensor]) -> list[Tensor]:
        """All that it gives."""
        q, *kv, gates = leaves[: 2 + 2 * self.sets]
        k, v = kv[: self.sets], kv[self.sets :]
        more: dict[str, Any] = {"backend": "triton", "return_aux": self.observed}
        if self.documents is not None:
            more["cu_seqlens"] = torch.tensor(self.documents, dtype=torch.int32, device=q.device)
        if self.compressed:
            names = "k_compressed", "v_compressed"
            more |= {
                name: nsa.compress(x, CONFIG, backend="triton") for name, x in zip(names, leaves[-2:], strict=True)
            }
        k, v = (3 // self.sets * x for x in (k, v))
        found = nsa.nsa_attention(q, k, v, gates, CONFIG, **more)
        if not self.observed:
            return [found]
        o, aux = found
        of_branches = [*(aux.lse[branch] for branch in BRANCHES), *(aux.keys_read[branch] for branch in BRANCHES)]
        return [o, *of_branches, aux.block_indices]

    def outcome(self, device: torch.device, seed: int, upstream: float | None = None) -> list[Tensor]:
        """The same, and the gradients of all that it was given and used; `upstream` everywhere where it is given."""
        leaves = self.drawn(device, seed)
        found = self(leaves)
        reached = [x for x in found if x.requires_grad][: None if self.through_lse else 1]
        rising = [torch.linspace(-1, 1, x.numel(), device=device).view(x.shape).to(x.dtype) for x in reached]
        given = rising if upstream is None else [torch.full_like(x, upstream) for x in reached]
        gradients = torch.autograd.grad(reached, leaves, given, allow_unused=True)
        return [x.detach() for x in (*found, *gradients) if x is not None]


CALLS = {
    "one set": Call(sets=1),
    "three sets": Call(),
    "documents": Call(heads=(16, 1), documents=(0, 7, 7, 20, LENGTH), masked=False),
    "compressed by the caller": Call(compressed=True),
    "observed": Call(observed=True),
    "observed, through the log-sum-exps": Call(sets=1, observed=True, through_lse=True),
    "the last queries": Call(queries=24),
    "half precision": Call(dtype=torch.float16),
    "an index": Call(masked=False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_by_plan_has_the_bits_of_one_without(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    if call.masked:
        masking.serve(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "MOST_PLANNED_BYTES", 0)
        wanted = call.outcome(device, 1)
    call.outcome(device, 0)  # is recorded
    for one, true in zip(call.outcome(device, 1), wanted, strict=True):
        assert torch.equal(one, true)
    forward = planned.OBSERVED_FORWARD if call.observed else planned.FORWARD
    for known, is_planned in ((forward._known, True), (planned.BACKWARD._known, call.masked)):
        assert [found is not None for found in known.values()] == [is_planned]


AGAIN = ("one set", "three sets", "compressed by the caller", "half precision", "an index")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_comes_again_is_not_checked_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where it was checked once, and nothing is asked for that is no part of a plan."""
    call = CALLS[name]
    if call.masked:
        masking.serve(monkeypatch)
    call.outcome(device, 0)
    checked = mock.Mock(wraps=checks.queries_and_keys)
    monkeypatch.setattr(checks, "queries_and_keys", checked)
    found = call.outcome(device, 1)
    assert checked.called is (name not in AGAIN)
    plans.forget_all()
    for one, true in zip(found, call.outcome(device, 1), strict=True):
        assert torch.equal(one, true)


SMALL = Call(sets=1, queries=SHORT, keys=SHORT, masked=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Call:
    masking.serve(monkeypatch)
    return SMALL


ALIKE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "gates of another shape": ({"gates": torch.zeros(1, SHORT, 4, 2)}, ValueError, "gates must have shape"),
    "keys elsewhere": ({"k": torch.zeros(1, SHORT, 2, 16, device="meta")}, ValueError, "k must be on the device of q"),
    "sparse values": ({"v": torch.zeros(1, SHORT, 2, 16).to_sparse()}, ValueError, "v must be a dense"),
    "values of another dtype": ({"v": torch.zeros(1, SHORT, 2, 16).half()}, TypeError, "v must have the dtype of k"),
    "no tensor": ({"q": [1.0]}, TypeError, "q must be a tensor"),
    "three dimensions": ({"q": torch.zeros(1, SHORT, 16)}, ValueError, "q must have shape"),
    "a bool": ({"scale": True}, TypeError, "scale must be a float"),
    "no config": ({"config": {"l": 8}}, TypeError, "config must be an NSAConfig"),
    "another phi": ({"config": replace(CONFIG, phi="mlp")}, ValueError, "k_compressed must be given"),
    "no backend": ({"backend": "tirton"}, ValueError, "backend must be one of"),
}


@pytest.mark.parametrize(("changed", "error", "says"), ALIKE.values(), ids=ALIKE)
def test_a_call_that_looks_alike_is_checked(
    device: torch.device, small: Call, changed: dict[str, Any], error: type[Exception], says: str
) -> None:
    q, k, v, gates = (x.detach() for x in small.drawn(device, 0))
    given = {"q": q, "k": k, "v": v, "gates": gates, "config": CONFIG, "scale": 1.0, "backend": "triton"}
    for _ in range(2):
        nsa.nsa_attention(**given)
    moved = {name: x.to(device) if isinstance(x, Tensor) and not x.is_meta else x for name, x in changed.items()}
    with pytest.raises(error, match=says):
        nsa.nsa_attention(**{**given, **moved})


OTHERS: dict[str, dict[str, Any]] = {
    "a negative scale": {"scale": -1.0},
    "a scale of 0": {"scale": 0.0},
    "another backend": {"backend": "reference"},
    "documents": {"cu_seqlens": torch.tensor([0, 5, SHORT], dtype=torch.int32)},
    "what was seen": {"return_aux": True},
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_a_call_that_is_another_does_not_get_the_plan_of_the_first(
    device: torch.device, small: Call, changed: dict[str, Any]
) -> None:
    q, k, v, gates = (x.detach() for x in small.drawn(device, 0))
    given = {"q": q, "k": k, "v": v, "gates": gates, "config": CONFIG, "scale": 1.0, "backend": "triton"}
    other = given | {name: x.to(device) if isinstance(x, Tensor) else x for name, x in changed.items()}
    wanted = nsa.nsa_attention(**other)
    for _ in range(2):
        nsa.nsa_attention(**given)
    found = nsa.nsa_attention(**other)
    if "return_aux" in changed:
        (found, aux), (wanted, _) = found, wanted
        assert aux.backend == "triton"
    assert torch.equal(found, wanted)


def test_a_tensor_of_another_type_is_checked(device: torch.device, small: Call) -> None:
    """It may hold other data than its address says."""

    class Other(Tensor):
        pass

    q, k, v, gates = (x.detach() for x in small.drawn(device, 0))
    for _ in range(2):
        wanted = nsa.nsa_attention(q, k, v, gates, CONFIG, backend="triton")
    with mock.patch.object(checks, "queries_and_keys", wraps=checks.queries_and_keys) as checked:
        found = nsa.nsa_attention(q.as_subclass(Other), k, v, gates, CONFIG, backend="triton")
    assert checked.called
    assert torch.equal(found, wanted)


def test_a_call_that_has_become_too_long_for_a_plan_has_none(
    device: torch.device, small: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the tuner asks for, which measures the kernels of other calls."""
    small.outcome(device, 0)
    monkeypatch.setattr(dispatch, "MOST_PLANNED_BYTES", 0)
    with mock.patch.object(plan.Plan, "__call__", side_effect=AssertionError):
        small.outcome(device, 0)


def test_a_graph_is_traced_where_a_plan_is_known(device: torch.device, small: Call) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return nsa.nsa_attention(q, k, v, gates, CONFIG, backend="triton")

    given = [x.detach() for x in small.drawn(device, 0)]
    for _ in range(2):
        wanted = call(*given)
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(*given), wanted)


def test_a_step_of_a_decode_without_gradients_is_decoded(device: torch.device, small: Call) -> None:
    """Where the same call with gradients went by a plan."""
    call = replace(small, queries=4, keys=LENGTH)
    call.outcome(device, 0)
    leaves = call.drawn(device, 1)
    decode = mock.Mock(wraps=triton_backend.decode_attention)
    with torch.no_grad(), mock.patch.object(triton_backend, "decode_attention", decode):
        call(leaves)
    assert decode.called


def test_a_kept_graph_has_a_second_backward_pass(device: torch.device, small: Call) -> None:
    """The first leaves the outputs of the branches as they are; the last overwrites them, in the plan too."""
    for seed in (0, 1):
        leaves = small.drawn(device, seed)
        (o,) = small(leaves)
        upstream = torch.ones_like(o)
        first, second, last = (
            torch.autograd.grad(o, leaves, upstream, retain_graph=kept) for kept in (True, True, False)
        )
        for one, two, three in zip(first, second, last, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, three)
    assert len(planned.BACKWARD._known) == 2


def test_an_upstream_gradient_that_is_an_input_is_no_other(
    device: torch.device, small: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the gradient of o is q itself, its address is q's, and is not taken for q's in the next call."""

    def gradients(of_q: bool) -> tuple[Tensor, ...]:
        leaves = small.drawn(device, 1)
        (o,) = small(leaves)
        return torch.autograd.grad(o, leaves, leaves[0].detach() if of_q else leaves[0].detach() + 1)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "MOST_PLANNED_BYTES", 0)
        wanted = gradients(False)
    gradients(True)  # is recorded
    for one, true in zip(gradients(False), wanted, strict=True):
        assert torch.equal(one, true)


def test_a_recomputed_call_saves_as_many_tensors_as_the_first(device: torch.device, small: Call) -> None:
    """Checkpointing refuses others: a call that is recorded keeps what one by plan does."""
    for seed in (0, 1):
        leaves = small.drawn(device, seed)
        (o,) = small(leaves)
        wanted = torch.autograd.grad(o, leaves, torch.ones_like(o))
        plans.forget_all()
        recomputed = checkpoint(lambda *x: small([*x])[0], *leaves, use_reentrant=False)
        for one, true in zip(torch.autograd.grad(recomputed, leaves, torch.ones_like(o)), wanted, strict=True):
            assert torch.equal(one, true)


def test_long_calls_have_no_plan(device: torch.device, small: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their backward pass frees each tensor behind its last use."""
    monkeypatch.setattr(dispatch, "MOST_PLANNED_BYTES", SHORT * 4 * 16 * 4 - 1)
    small.outcome(device, 0)
    assert not planned.FORWARD._known
    monkeypatch.setattr(dispatch, "MOST_PLANNED_BYTES", SHORT * 4 * 16 * 4)
    small.outcome(device, 0)
    assert planned.FORWARD._known


@pytest.mark.parametrize("short", [True, False])
def test_an_operator_of_a_graph_goes_by_plan(device: torch.device, small: Call, short: bool) -> None:
    """And gives what an eager call gives."""
    operator = attention_ops._short_attention if short else attention_ops._attention
    for seed in (0, 1):
        q, k, v, gates = leaves = small.drawn(device, seed)
        numbers, scale = ops.numbers_of(CONFIG), small.channels**-0.5
        o, *_ = operator(q, k, v, *6 * (None,), gates, None, numbers, scale)
        found = o, *torch.autograd.grad(o, leaves, torch.ones_like(o))
        for one, true in zip(found, small.outcome(device, seed, upstream=1.0), strict=True):
            assert torch.equal(one, true)
    of_long = attention_ops._FORWARD, attention_ops._BACKWARD
    of_short = attention_ops._SHORT_FORWARD, attention_ops._SHORT_BACKWARD
    for of_pass in of_short if short else of_long:
        assert [found is not None for found in of_pass._known.values()] == [True]
    for of_pass in of_long if short else of_short:
        assert not of_pass._known


def test_kernels_of_hopper_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan would leave them out: their descriptors are made anew for each launch."""
    if not hopper.AVAILABLE:
        pytest.skip("this Triton has no kernels of hopper/")
    told = mock.Mock()
    monkeypatch.setattr(relaunch.thread, "recorder", told)
    with ahead_of_time.recorded(90), torch.no_grad():
        kv = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
        lse, out = torch.zeros(1, 64, 16), torch.zeros(1, 64, 1, 4)
        places = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        q = torch.zeros(1, 64, 16, 128, dtype=torch.bfloat16)
        shape = tuning.shape("hopper.scores", q, kv)
        hopper.scores.group_probabilities(q, kv, lse, places, out, 0, 64, 1, shape, 1.0, summed=False)
    assert [one.args[2] for one in told.launched.call_args_list] == [None]


@pytest.mark.parametrize("heads", [(64, 64), (64, 128), (128, 128), (192, 128)], ids=str)
def test_a_graph_and_a_call_agree_on_what_goes_by_plan_on_hopper(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]
) -> None:
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    with ahead_of_time.recorded(90), mock.patch.object(planned, "AVAILABLE", True):
        q, k, v = (
            torch.zeros(1, 256, n, d, dtype=torch.bfloat16) for n, d in ((12, heads[0]), *((2, d) for d in heads))
        )
        assert attention_ops._is_short(q, k, v) is planned.serves(q, k, v)


def _before(launches: list[Any]) -> list[set[int]]:
    """For each launch of a plan which ones have ended when it starts: by the order in its lane, and by its waits."""
    found, ended = list[set[int]](), defaultdict[int, set[int]](set)  # the latter of each lane, where it stands now
    for number, launch in enumerate(launches):
        for waiting, awaited in launch.waits:
            ended[waiting] |= ended[awaited]
        found.append(set(ended[launch.lane]))
        ended[launch.lane].add(number)
    return found


@pytest.mark.parametrize("call", [SMALL, Call(), Call(compressed=True), Call(observed=True)])
def test_no_launch_of_another_lane_runs_before_what_it_reads_is_written(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """Of each tensor that the call makes, all launches but the one that writes it wait for that."""
    masking.serve(monkeypatch)
    call.outcome(device, 0)
    forward = planned.OBSERVED_FORWARD if call.observed else planned.FORWARD
    for of_pass in (forward, planned.BACKWARD):
        (found,) = of_pass._known.values()
        assert found is not None
        assert found.num_lanes > 1
        num_results = sum(x is not None for x in found.results)
        workspace = max(found.sources) - num_results - 1  # behind what is given; then what is kept, and the results
        values: list[Any] = [("number", i) for i in range(len(found.numbers))]
        values += [("given" if source < workspace else "made", i) for i, source in enumerate(found.sources)]
        writer, before = dict[Any, int](), _before(found.launches)
        for number, launch in enumerate(found.launches):
            for place in [value for value in launch.pick(tuple(values)) if value[0] == "made"]:
                assert writer.setdefault(place, number) in {number, *before[number]}
        joined = {awaited for launch in found.launches for _, awaited in launch.waits}
        joined |= {awaited for waiting, awaited in found.waits_at_end if waiting == 0}
        assert joined >= {launch.lane for launch in found.launches}


@pytest.mark.parametrize(
    "call", [Call(masked=False), Call(sets=1, masked=False), Call(heads=(16, 1), masked=False)], ids=str
)
def test_nor_does_one_of_a_call_that_no_plan_can_hold(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """Its lanes are those of a graph that captures the call itself (`lanes.CapturedLanes`)."""
    monkeypatch.setattr(planned, "serves", lambda q, k, v: False)
    leaves = call.drawn(device, 0)
    with Recording() as forward:
        (o,) = call(leaves)
    upstream = torch.ones_like(o)
    with Recording() as backward, torch.autograd.set_multithreading_enabled(False):  # it hears of its own thread alone
        gradients = torch.autograd.grad(o, leaves, upstream)
    assert all(x.isfinite().all() for x in gradients)
    made_before = {storage(x) for x in (*leaves, upstream)}
    for recording, lanes in ((forward, {0, 1}), (backward, {0, 1, 2, 3})):
        writer, before = dict[int, int](), _before(recording.launches)
        assert {launch.lane for launch in recording.launches} == lanes
        for number, launch in enumerate(recording.launches):
            tensors = [x for x in launch.arguments if isinstance(x, Tensor) and x.numel()]
            for place in {storage(x) for x in tensors} - made_before:
                assert writer.setdefault(place, number) in {number, *before[number]}
        made_before |= set(writer)


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.gpu
def test_plans_serve_a_cuda_graph_and_other_streams() -> None:
    """Those of an eager call, recorded in it, and those that are recorded while a graph is."""
    call, device = Call(sets=1, queries=1024, keys=1024, channels=64, dtype=torch.bfloat16), torch.device("cuda")
    wanted = call.outcome(device, 1)
    for forget in (True, False):
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                found = call.outcome(device, 1)
            stream.synchronize()
            assert all(torch.equal(one, true) for one, true in zip(found, wanted, strict=True))
        leaves = call.drawn(device, 1)
        upstream = torch.linspace(-1, 1, leaves[0].numel(), device=device).view(leaves[0].shape).to(call.dtype)
        torch.cuda.synchronize()
        if forget:
            plans.forget_all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (o,) = call(leaves)
            recorded = [o.detach(), *torch.autograd.grad(o, leaves, upstream)]
        for _ in range(2):
            graph.replay()
            assert all(torch.equal(one, true) for one, true in zip(recorded, wanted, strict=True))

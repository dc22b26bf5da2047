"""`torch.compile` around a call and around the layer: one graph, and the numbers of the eager call."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion

import nsa
from nsa import backends

CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=13)
SHORT = "short_attention_2"
"""With the version of what it keeps."""
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["torch", "triton"])
def fast_backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    probe = torch.zeros(1, 1, 1, 16, device=device)
    if request.param == "triton" and (reason := backends.why_not_triton(probe, probe)):
        pytest.skip(reason)
    name: str = request.param
    return name


def draw(device: torch.device, queries: int, keys: int) -> list[Tensor]:
    """q, k, v and gates that want gradients: 2 groups of 2 heads, 16 and 8 channels."""
    generator = torch.Generator().manual_seed(queries)
    shapes = (1, queries, 4, 16), (1, keys, 2, 16), (1, keys, 2, 8), (1, queries, 4, 3)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def outcome(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    o = call(*inputs)
    weights = torch.linspace(-1.0, 1.0, o.numel(), device=o.device).view(o.shape)
    return [o, *torch.autograd.grad((o * weights).sum(), inputs)]


def agree(call: Callable[..., Tensor], inputs: list[Tensor], **compiling: Any) -> None:
    """The compiled call gives the eager call's bits: what is fused around the parts are integers and copies."""
    compiled = torch.compile(call, fullgraph=True, **({"backend": "aot_eager"} | compiling))
    for found, wanted in zip(outcome(compiled, inputs), outcome(call, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (7, 40)])
def test_a_compiled_call_gives_the_bits_of_an_eager_one(
    device: torch.device, fast_backend: str, queries: int, keys: int
) -> None:
    agree(
        lambda q, k, v, gates: nsa.nsa_attention(q, k, v, gates, CONFIG, backend=fast_backend),
        draw(device, queries, keys),
    )


def test_documents_and_a_negative_scale_are_compiled_too(device: torch.device, fast_backend: str) -> None:
    documents = torch.tensor([0, 1, 17, 17, 24], dtype=torch.int32, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return nsa.nsa_attention(q, k, v, gates, CONFIG, cu_seqlens=documents, scale=-0.3, backend=fast_backend)

    agree(call, draw(device, 24, 24))


def test_autocast_around_a_compiled_call_changes_nothing_in_it(device: torch.device, fast_backend: str) -> None:
    """Nor in its backward pass, which is traced while autocast is on."""

    def call(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return nsa.nsa_attention(q, k, v, gates, CONFIG, backend=fast_backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")

    def under_autocast(*inputs: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            o: Tensor = compiled(*inputs)
        return o

    inputs = draw(device, 24, 24)
    for found, wanted in zip(outcome(under_autocast, inputs), outcome(call, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_what_a_call_did_is_known_from_a_graph(device: torch.device, fast_backend: str) -> None:
    inputs = draw(device, 24, 24)

    def call(*given: Tensor) -> tuple[Tensor, nsa.Aux]:
        return nsa.nsa_attention(*given, CONFIG, backend=fast_backend, return_aux=True)

    _, found = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    _, wanted = call(*inputs)
    assert found.backend == wanted.backend == fast_backend
    assert torch.equal(found.block_indices, wanted.block_indices)
    for branch, lse in wanted.lse.items():
        assert torch.equal(found.lse[branch], lse)
        assert torch.equal(found.keys_read[branch], wanted.keys_read[branch])
    through_lse = (
        torch.autograd.grad(list(aux.lse.values()), inputs[:2], [torch.ones_like(x) for x in aux.lse.values()])
        for aux in (found, wanted)
    )
    for one, other in zip(*through_lse, strict=True):
        assert torch.equal(one, other)


def test_the_layer_is_one_graph(device: torch.device, fast_backend: str) -> None:
    torch.manual_seed(0)
    layer = nsa.NativeSparseAttention(24, 4, 2, 16, 8, CONFIG, backend=fast_backend, device=device)
    x = torch.randn(1, 24, 24, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = []
    for call in (compiled, layer):
        layer.zero_grad()
        call(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


class Adapter(nn.Linear):
    """Another class in the place of a layer's product."""


def _hooked(layer: nsa.NativeSparseAttention) -> None:
    layer.gates.register_forward_hook(lambda module, given, gates: gates / 2)


def _adapted(layer: nsa.NativeSparseAttention) -> None:
    layer.v = Adapter(24, layer.v.out_features, bias=False)


def _wrapped(layer: nsa.NativeSparseAttention) -> None:
    layer.v.forward = lambda x, multiply=layer.v.forward: 2 * multiply(x)  # type: ignore[method-assign]


class OtherGates(nn.Module):
    """They have no product at all."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :12].sigmoid().unflatten(-1, (4, 3))


def _other_gates(layer: nsa.NativeSparseAttention) -> None:
    layer.gates = OtherGates()  # type: ignore[assignment]


def _biased(layer: nsa.NativeSparseAttention) -> None:
    layer.v = nn.Linear(24, layer.v.out_features)


def _without_bias(layer: nsa.NativeSparseAttention) -> None:
    layer.gates.linear = nn.Linear(24, 12, bias=False)


def _frozen(layer: nsa.NativeSparseAttention) -> None:
    layer.v.requires_grad_(False)


def _distributed(layer: nsa.NativeSparseAttention) -> None:
    weight = layer.gates.linear.weight.detach()
    layer.gates.linear.weight = nn.Parameter(TwoTensor(weight, weight.clone()))


def _without_scores(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], gates: Tensor, config: nsa.NSAConfig, **_: object
) -> Tensor:
    """[B, S, Hq, Dv] of all that attention reads, each head with a weight of its own."""
    del config

    def heads(x: Tensor) -> Tensor:
        return (x * torch.linspace(1.0, 2.0, x.shape[2])[:, None]).mean(2)

    pairs = zip(k, v, gates.unbind(-1), strict=True)
    values = [heads(value) * heads(key).mean(-1, keepdim=True) * heads(gate[..., None]) for key, value, gate in pairs]
    return q.mean(-1, keepdim=True) * sum(values)[:, :, None]


@pytest.mark.parametrize(
    ("change", "products"),
    [
        (None, 4), (_hooked, 5), (_adapted, 5), (_wrapped, 5), (_distributed, 5), (_other_gates, 4), (_biased, 5),
        (_without_bias, 5), (_frozen, 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shared_kv", [False, True])
def test_values_and_gates_are_one_product_of_a_graph_where_nothing_stands_between(
    change: Callable[[nsa.NativeSparseAttention], None] | None,
    products: int,
    shared_kv: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of q, k and o are three; with the gates' own it would be five."""
    # tracing attention takes most of the time, and it holds no such product
    monkeypatch.setattr(nsa.layer, "nsa_attention", _without_scores)
    torch.manual_seed(0)
    layer = nsa.NativeSparseAttention(24, 4, 2, 16, 8, CONFIG, shared_kv=shared_kv, backend="torch")
    if change is not None:
        change(layer)
    x, counts = torch.randn(2, 24, 24), list[int]()

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        counts.append(sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=count)
    gradients = []
    for call in (compiled, layer):
        layer.zero_grad()
        o = call(x)
        if change is not _distributed:  # Dynamo traces no parameter of the test's class that has a gradient
            o.square().sum().backward()
        gradients.append([o, *(parameter.grad for parameter in layer.parameters())])
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    assert counts == [products]
    with torch.no_grad():
        compiled(x)
    assert counts[1:] == [4 if change is _other_gates else 5], "without gradients to join the weights may not pay"


@pytest.fixture
def kernels(device: torch.device) -> Callable[..., Tensor]:
    """A call of the Triton kernels, where they can run."""
    probe = torch.zeros(1, 1, 1, 16, device=device)
    if reason := backends.why_not_triton(probe, probe):
        pytest.skip(reason)
    return lambda *given: nsa.nsa_attention(*given, CONFIG, backend="triton")


def test_two_lengths_make_one_graph_for_all_lengths(device: torch.device, kernels: Callable[..., Tensor]) -> None:
    graphs = []

    def counted(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(kernels, fullgraph=True, backend=counted)
    for length in (20, 27, 23):
        inputs = [x.detach() for x in draw(device, length, length)]
        found = compiled(*inputs)
    assert torch.equal(found, kernels(*inputs))
    assert len(graphs) == 2  # the first length's own, then one for any


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor compiles C++ on a CPU")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # the first that Inductor captures is
def test_reduce_overhead_replays_one_graph_with_the_numbers_of_an_eager_call(
    device: torch.device, kernels: Callable[..., Tensor]
) -> None:
    """On a GPU Inductor captures a CUDA graph, which it leaves out, and counts, where an operator does not allow it."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(kernels, fullgraph=True, mode="reduce-overhead")
    inputs = draw(device, 24, 24)
    for _ in range(3):  # warms up, captures, replays
        found = [x.clone() for x in outcome(compiled, inputs)]
    for one, wanted in zip(found, outcome(kernels, inputs), strict=True):
        torch.testing.assert_close(one, wanted)
    if device.type == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


def operators_of(call: Callable[..., Tensor], inputs: list[Tensor]) -> Counter[str]:
    """Those of NSA's in the graph of a call."""
    held: Counter[str] = Counter()

    def counted(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        held.update(str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith("nsa."))
        return graph.forward

    torch.compile(call, fullgraph=True, backend=counted)(*inputs)
    return held


@pytest.mark.parametrize(("most_bytes", "name"), [(2**24, SHORT), (0, "attention")])
def test_a_graph_holds_a_call_as_one_operator(
    device: torch.device, kernels: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, most_bytes: int, name: str
) -> None:
    monkeypatch.setattr("nsa.triton_backend.dispatch.MOST_PLANNED_BYTES", most_bytes)
    assert operators_of(kernels, draw(device, 24, 24)) == {name: 1}


@pytest.mark.parametrize(("there", "name"), [(False, SHORT), (True, "attention")])
def test_what_kernels_of_hopper_serve_is_not_copied_together(
    device: torch.device, kernels: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, there: bool, name: str
) -> None:
    monkeypatch.setattr("nsa.triton_backend.dispatch.has_hopper_kernels", lambda _: there)
    shapes = (1, 24, 2, 128), (1, 24, 1, 128), (1, 24, 1, 128), (1, 24, 2, 3)
    assert operators_of(kernels, [torch.randn(shape, device=device) for shape in shapes]) == {name: 1}


@functools.cache
def leaves_out_second_gradients() -> bool:
    """Whether a graph that PyTorch compiles, and that keeps none of its inputs, gives no second gradient and no error.

    2.11 does so; 2.13 has an error.
    """
    x = torch.zeros(1, requires_grad=True)
    (first,) = torch.autograd.grad(torch.compile(torch.exp, backend="aot_eager")(x), x, create_graph=True)
    left_out = not first.requires_grad
    assert not left_out or torch.__version__ < TorchVersion("2.13")
    return left_out


@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["linear", "square"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_gradient_is_refused(
    device: torch.device, fast_backend: str, compiled: bool, loss: Callable[[Tensor], Tensor]
) -> None:
    if compiled and (fast_backend, loss) == ("torch", torch.sum) and leaves_out_second_gradients():
        pytest.skip("this PyTorch's own compiled graphs leave a second gradient out without an error")
    inputs = draw(device, 20, 20)

    def call(*given: Tensor) -> Tensor:
        return nsa.nsa_attention(*given, CONFIG, backend=fast_backend)

    def second() -> None:
        o = (torch.compile(call, backend="aot_eager") if compiled else call)(*inputs)
        (first,) = torch.autograd.grad(loss(o), inputs[:1], create_graph=True)
        (inputs[0].sum() + first.square().sum()).backward()

    with pytest.raises(RuntimeError, match="double backward"):
        second()

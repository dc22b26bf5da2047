"""Each operator keeps what it promises a compiler: its schema, the shapes it announces, its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal import optests

import nsa
from nsa.geometry import Layout

pytest.importorskip("triton")

from nsa.triton_backend import attention, attention_ops, autograd, compression, gated_sum, ops

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch itself
CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=13)
LENGTH = 20
WHOLE = "attention", "attention of three", "attention of the caller's blocks"
SHORT = [f"short {name}" for name in WHOLE]
DIFFERENTIABLE = "compressed_window_attention", "selected_attention", "gated_sum", "compress", *WHOLE, *SHORT
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def draw(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def attended(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """q, k, v that are no contiguous tensors, and their layout."""
    q, k, v = draw(device, (1, 4, LENGTH, 16), (1, 2, LENGTH, 16), (1, 2, LENGTH, 8))
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    return q, k, v, Layout(LENGTH, LENGTH, CONFIG, device)


def calls(device: torch.device) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every operator, with arguments."""
    q, k, v, layout = attended(device)
    window = (*layout.window_interval, *layout.window_queries, 0, 1, 0.25)
    seen = (*layout.compressed_interval, layout.positions, LENGTH, None, ops.numbers_of(CONFIG), 0.25)
    chosen = torch.tensor([0, -1, -1, -1], dtype=torch.int32, device=device).expand(1, LENGTH, 2, 4)
    places = (chosen, layout.starts, layout.blocks_before, *layout.block_tokens, None, seen[5], 0.25)
    branches = draw(device, *3 * ((1, LENGTH, 4, 8),), (1, LENGTH, 4, 3))
    more, compressed = draw(device, *2 * (k.shape, v.shape)), draw(device, (1, 4, 2, 16), (1, 4, 2, 8))
    rest = branches[3], None, ops.numbers_of(CONFIG), 0.25
    given = {
        "attention": (q, k, v, *6 * (None,), *rest),
        "attention of three": (q, k, v, *more, None, None, *rest),
        "attention of the caller's blocks": (q, k, v, *4 * (None,), *compressed, *rest),
    }
    return {
        "compressed_window_attention": (ops.compressed_window_attention, (q, k, v, *window)),
        "select_blocks": (ops._select, (q.detach(), k[:, :4].detach(), None, *seen)),
        "selected_attention": (ops._selected, (q, k, v, *places)),
        "gated_sum": (ops.combine, tuple(branches)),
        "compress": (ops.compress, (k, *compression.places(layout), CONFIG.l, CONFIG.d)),
        **{name: (attention_ops._attention, one) for name, one in given.items()},
        **{f"short {name}": (attention_ops._short_attention, one) for name, one in given.items()},
    }


@pytest.mark.parametrize("name", ["select_blocks", *DIFFERENTIABLE])
def test_an_operator_is_what_it_says(device: torch.device, name: str) -> None:
    operator, arguments = calls(device)[name]
    # between the tensors that a short one keeps lie bytes that nobody writes, so that two calls differ in them
    torch.library.opcheck(operator, arguments, test_utils=CHECKS[:-1] if name in SHORT else CHECKS)


def test_what_a_short_call_keeps_has_a_version_of_its_own(device: torch.device) -> None:
    """A graph of an older version, kept on disk, names the same operator and announces other sizes."""
    q, k, v, layout = attended(device)
    _, num_bytes = attention_ops._views(q, [k, v, *6 * (None,)], layout)
    sizes = {"nsa.short_attention_2.default": 12032}
    assert sizes[str(attention_ops._short_attention)] == num_bytes, "raise the version and write the size here"


def test_an_operator_that_announces_another_shape_is_found_out(device: torch.device) -> None:
    schema = "(Tensor o_cmp, Tensor o_sel, Tensor o_win, Tensor gates) -> Tensor"
    wrong = torch.library.custom_op("nsa_tests::gated_sum", gated_sum.forward, mutates_args=(), schema=schema)
    wrong.register_fake(lambda o_cmp, *_: o_cmp.new_empty(o_cmp.shape[:3]))
    with pytest.raises(optests.OpCheckError, match="test_faketensor"):
        torch.library.opcheck(wrong, calls(device)["gated_sum"][1], test_utils=CHECKS)


def eager(name: str, device: torch.device) -> Callable[..., Any]:
    layout = attended(device)[3]
    return {
        "compressed_window_attention": autograd.CompressedWindowAttention.apply,
        "selected_attention": lambda q, k, v, chosen, *_: autograd.SelectedAttention.apply(
            q, k, v, chosen, layout, 0.25
        ),
        "gated_sum": autograd.GatedSum.apply,
        "compress": autograd.Compress.apply,
    }.get(name, lambda *given: autograd.Attention.apply(*given[:-3], layout, 0.25))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_an_operator_and_its_eager_function_give_the_same_gradients(device: torch.device, name: str) -> None:
    operator, arguments = calls(device)[name]
    wanting = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    found = []
    for call in (operator, eager(name, device)):
        output = call(*arguments)
        output = output if isinstance(output, tuple) else (output,)
        if name in SHORT:  # o alone is for the caller
            output = output[:1]
        differentiable = attention.NUM_DIFFERENTIABLE if name.startswith("attention") else len(output)
        wanted = [x.is_floating_point() and i < differentiable for i, x in enumerate(output)]
        assert [x.requires_grad for x in output] == wanted
        kept = [x.clone() for x in output]  # the eager backward pass overwrites what only it needs
        found.append([*kept, *torch.autograd.grad(sum(x.sum() for x in output if x.requires_grad), wanting)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_an_operator_refuses_a_second_gradient(device: torch.device, name: str) -> None:
    """Also where the gradient from above wants none, and the sum goes on to what has one."""
    operator, arguments = calls(device)[name]
    output = operator(*arguments)
    first = output[0] if isinstance(output, tuple) else output
    (gradient,) = torch.autograd.grad(first.sum(), arguments[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        (arguments[0].sum() + gradient.square().sum()).backward()

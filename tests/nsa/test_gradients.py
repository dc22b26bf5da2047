"""A second gradient, which no kernel has, is an error wherever it is asked for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nsa
from harness.repository import ROOT

CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=8)
LENGTH = 20
CHOSEN = torch.tensor([0, -1, -1, -1], dtype=torch.int32).expand(1, LENGTH, 2, 4)
PARTS: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "window": lambda q, k, backend: nsa.window_attention(q, k, k, CONFIG, backend=backend)[0],
    "selected": lambda q, k, backend: nsa.selected_attention(q, k, k, CHOSEN.to(q.device), CONFIG, backend=backend)[0],
    "compressed": lambda q, k, backend: nsa.compressed_attention(
        q, *2 * (nsa.compress(k, CONFIG, backend=backend),), CONFIG, backend=backend
    )[0],
    "all": lambda q, k, backend: nsa.nsa_attention(
        q, k, k, torch.ones(1, LENGTH, 4, 3, device=q.device), CONFIG, backend=backend
    ),
}


def drawn(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, LENGTH, heads, 16, generator=generator).to(device) for heads in (4, 2))
    return q.requires_grad_(), k


@pytest.mark.parametrize("part", PARTS)
def test_a_second_gradient_is_refused(device: torch.device, backend: str, part: str) -> None:
    """Whether the gradient from above wants one, or does not."""
    if backend == "reference":
        pytest.skip("the reference has second gradients")
    q, k = drawn(device)
    for loss in (torch.sum, lambda o: o.square().sum()):
        (first,) = torch.autograd.grad(loss(PARTS[part](q, k, backend)), q, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            (q.sum() + first.square().sum()).backward()


def test_a_first_gradient_can_be_changed_in_place(device: torch.device, backend: str) -> None:
    """Also where a second one could be asked for: hooks do so."""
    q, k = drawn(device)
    (wanted,) = torch.autograd.grad(PARTS["all"](q, k, backend).sum(), q)
    (first,) = torch.autograd.grad(PARTS["all"](q, k, backend).sum(), q, create_graph=True)
    assert torch.equal(first.mul_(2), 2 * wanted)


def backward_passes() -> Iterator[tuple[str, list[str]]]:
    """(the class, its decorators) of each autograd function of nsa/."""
    for path in sorted(Path(ROOT / "nsa").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                (backward,) = (one for one in node.body if getattr(one, "name", "") == "backward")
                assert isinstance(backward, ast.FunctionDef)
                yield f"{path.stem}.{node.name}", [ast.unparse(one) for one in backward.decorator_list]


def test_every_backward_pass_says_that_it_has_no_second_gradient() -> None:
    """Also those that only several ranks run."""
    found = dict(backward_passes())
    assert len(found) > 10
    without = [name for name, decorators in found.items() if "without_second_gradient" not in decorators]
    assert without == ["gradients._NoSecondGradient"]

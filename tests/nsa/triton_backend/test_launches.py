"""How many kernels a call launches: no more than these, so that they do not creep up, and as many at any length."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import nsa

pytest.importorskip("triton")

from nsa import backends, triton_backend
from tests.nsa.triton_backend import masking
from tests.nsa.triton_backend.launches import Launches, of_cache_write, of_call, of_layer

FORWARD = {
    "places._places": 1,
    "compression._prepare": 1,
    "compressed_window._forward": 2,
    "scores._group_probabilities": 1,
    "topk._topk": 1,
    "index._cells": 1,
    "aten.sort": 1,
    "index._tiles": 1,
    "selected_kv_major._forward": 1,
    "partial_sums.merge_blocks": 1,
}
BACKWARD = {
    "gated_sum._backward": 1,
    "compressed_window._backward_q": 2,
    "compressed_window._backward_kv": 2,
    "index._cells": 1,
    "aten.sort": 1,
    "index._tiles": 1,
    "selected_kv_major._backward": 1,
    "partial_sums.sum_dkdv": 1,
    "partial_sums.sum_dq": 1,
    "compression._gradient": 1,
}
"""Of 12/2 heads of 64 where `selected_masked.py` does not serve them."""
SHORT_FORWARD = {
    "places._places": 1,
    "compression._prepare": 1,
    "compressed_window._forward": 3,
    "scores._group_probabilities": 1,
    "topk._topk": 1,
}
SHORT_BACKWARD = {
    "gated_sum._backward": 1,
    "compressed_window._backward_q": 3,
    "compressed_window._backward_kv": 3,
    "compression._gradient": 1,
}
"""Of the same heads at 2048 tokens, where all branches are the same kernels."""
BY_QUERY = {"selected._forward": 1}
"""In place of the index, the KV-stationary forward and its merge: 16 heads per group."""
DQ_BY_QUERY = {"selected._backward_q": 1}
WRITE = {"cache_write._write": 1}
"""Of a decode step, per layer."""
NEW_TOKENS = {"aten.arange": 1, "aten.add": 2}
"""Of a step in pages, once for all layers: where its tokens stand."""
SUMS = ("partial_sums._add_kv_parts", 3)
"""At most, in a backward pass: one for each branch whose keys are so few that several programs share their queries."""
SORT_KERNELS = 6
"""At most, of one radix sort on a GPU, beside its memsets and its copy."""
_NO_KERNELS = ("Memset", "Memcpy")


def printed(names: list[str]) -> str:
    return "\n".join(f"{count} {name}" for name, count in Counter(names).items())


def names_of(*sizes: Any, **more: Any) -> list[list[str]]:
    """Without the sums, of which there may be some."""
    name, most = SUMS
    forward, backward = (found.names for found in of_call(*sizes, **more))
    assert name not in forward
    assert backward.count(name) <= most, printed(backward)
    return [forward, [one for one in backward if one != name]]


@pytest.mark.interpreter
def test_of_a_small_model() -> None:
    forward, backward = names_of(12, 2, 64, 2048)
    assert Counter(forward) == FORWARD, printed(forward)
    assert Counter(backward) == BACKWARD, printed(backward)


@pytest.mark.interpreter
def test_of_a_short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    masking.serve(monkeypatch, 1024)
    forward, backward = names_of(12, 2, 64, 2048)
    assert Counter(forward) == SHORT_FORWARD, printed(forward)
    assert Counter(backward) == SHORT_BACKWARD, printed(backward)


@pytest.mark.interpreter
def test_of_a_short_text_with_a_tensor_of_each_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of the selected keys are made forward alone, as the masks are."""
    masking.serve(monkeypatch, 1024)
    forward, backward = names_of(12, 2, 64, 2048, of_each_branch=True)
    assert Counter(forward) == SHORT_FORWARD | {"launch._finite_keys": 1}, printed(forward)
    assert Counter(backward) == SHORT_BACKWARD, printed(backward)


@pytest.mark.interpreter
def test_of_wide_groups() -> None:
    forward, backward = names_of(32, 2, 128, 2048)
    merged = ("index._cells", "aten.sort", "index._tiles", "selected_kv_major._forward", "partial_sums.merge_blocks")
    wanted = {name: count for name, count in FORWARD.items() if name not in merged} | BY_QUERY
    assert Counter(forward) == wanted, printed(forward)
    wanted = {name: count for name, count in BACKWARD.items() if name != "partial_sums.sum_dq"} | DQ_BY_QUERY
    assert Counter(backward) == wanted, printed(backward)


@pytest.mark.interpreter
@pytest.mark.parametrize("length", [2049, 4096])
def test_a_longer_text_launches_as_many(length: int) -> None:
    assert [Counter(names) for names in names_of(12, 2, 64, length)] == [FORWARD, BACKWARD]


@pytest.mark.interpreter
def test_a_tensor_of_each_branch_adds_one_pass_over_the_selected_keys() -> None:
    forward, backward = names_of(12, 2, 64, 2048, of_each_branch=True)
    assert Counter(forward) == FORWARD | {"launch._finite_keys": 1}, printed(forward)
    assert Counter(backward) == BACKWARD, printed(backward)


@pytest.mark.interpreter
def test_packed_documents_add_what_checks_their_bounds_and_no_more() -> None:
    """On a GPU the host may not read them, so that the device checks them; on a CPU it may."""
    documents = torch.tensor([0, 5, 1000, 2048], dtype=torch.int32)
    assert [Counter(names) for names in names_of(12, 2, 64, 2048, cu_seqlens=documents)] == [FORWARD, BACKWARD]


@pytest.mark.interpreter
def test_a_layer_rotates_by_one_kernel_and_lets_the_call_compress() -> None:
    """In each pass; PyTorch projects, and does nothing for positions, keys or values."""
    forward, backward = (Counter(found.names) for found in of_layer(64))
    assert forward["rope._rotate"] == backward["rope._rotate"] == 1
    assert forward["compression._prepare"] == backward["compression._gradient"] == 1
    once = {"aten.arange": 1, "aten.div": 1, "aten.neg": 1, "aten.pow": 1}  # RoPE's frequencies, made once in a process
    of_pytorch = Counter({name: count for name, count in forward.items() if name.startswith("aten.")})
    projections = {"aten.mm": 4, "aten.addmm": 1, "aten.sigmoid": 1}
    assert of_pytorch - Counter(projections) - Counter(once) == Counter(), printed([*forward.elements()])


@pytest.mark.interpreter
@pytest.mark.parametrize("length", [46, 47])  # the 48th token completes a compressed block
def test_a_cache_writes_a_step_in_one_launch_per_layer(length: int) -> None:
    side_by_side = of_cache_write(paged=False, length=length, layers=2).names
    assert Counter(side_by_side) == Counter(WRITE) + Counter(WRITE), printed(side_by_side)
    in_pages = of_cache_write(paged=True, length=length, layers=2).names
    assert Counter(in_pages) == Counter(WRITE) + Counter(WRITE) + Counter(NEW_TOKENS), printed(in_pages)


@pytest.mark.interpreter
def test_a_learned_phi_adds_what_compresses_a_block() -> None:
    assert of_cache_write(paged=False, length=46, phi="mlp").names == list(WRITE)
    found = of_cache_write(paged=False, length=47, phi="mlp").names
    assert found[0] == "cache_write._write"
    assert found.count("aten.gelu") == 2
    assert len(found) <= 13, printed(found)


@pytest.mark.interpreter
@pytest.mark.parametrize("paged", [False, True])
def test_a_write_by_indexing_is_found(monkeypatch: pytest.MonkeyPatch, paged: bool) -> None:
    """As it was before there was a kernel."""
    monkeypatch.setattr(backends, "cache_writer", lambda *_: None)
    assert len(of_cache_write(paged=paged, length=47).names) >= 12


@pytest.mark.interpreter
def test_a_piece_of_one_sequence_is_not_copied_to_its_place() -> None:
    o, dq, gates = (torch.zeros(1, 64, 4, channels) for channels in (16, 16, 3))
    rows = slice(16, 48)
    o_cmp, o_sel, o_win = (torch.zeros(1, 32, 4, 16) for _ in range(3))
    with Launches() as found:
        triton_backend.combine_into(o[:, rows], (o_cmp, o_sel, o_win), gates[:, rows])
        triton_backend.add_gradients(dq[:, rows], o_cmp, o_sel, o_win)
    assert found.names == ["gated_sum._forward", "launch._add"]


@pytest.mark.interpreter
def test_what_is_launched_too_often_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that PyTorch computes, as it was before."""
    monkeypatch.setattr(triton_backend.attention, "located", lambda layout: layout)
    forward, backward = names_of(12, 2, 64, 2048)
    assert len(forward) > sum(FORWARD.values()) + 20
    assert len(backward) > sum(BACKWARD.values())


@pytest.mark.interpreter
def test_views_and_allocations_are_no_launches() -> None:
    x = torch.zeros(4, 6)
    with Launches() as found:
        y = torch.empty(6, 4)
        y.copy_(x.T.unsqueeze(0)[0])
        x.reshape(24).expand(2, 24)
        x.T.contiguous()
    assert found.names == ["aten.copy_", "aten.clone"]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(12, 2, 64), (32, 2, 128)], ids=str)
def test_a_gpu_runs_as_many(heads: tuple[int, int, int]) -> None:
    """By CUPTI's own records; there a sort is several kernels, beside memsets and a copy."""
    (heads_q, heads_kv, dim), length = heads, 2048
    shapes = (heads_q, dim), (heads_kv, dim), (heads_kv, dim), (heads_q, 3)
    inputs = [
        torch.randn(1, length, *shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes
    ]
    upstream = torch.randn_like(inputs[0])

    def step() -> None:
        o = nsa.nsa_attention(*inputs, nsa.NSAConfig(), backend="triton")
        torch.autograd.grad(o, inputs, upstream)

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("CUPTI records nothing on this machine")
    kernels = [name for name in names if not name.startswith(_NO_KERNELS)]
    most = sum(FORWARD.values()) + sum(BACKWARD.values()) + SUMS[1] + 2 * SORT_KERNELS
    assert len(kernels) <= most, printed(names)

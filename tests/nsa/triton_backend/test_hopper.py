"""On a Hopper GPU the laws on calls that reach the kernels of `hopper/`: packed, in chunks, any group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import nsa
from harness import forced
from nsa.attention import _distinct
from nsa.geometry import Layout

pytest.importorskip("triton")

from nsa.triton_backend import compressed_window, dispatch, hopper, scores, selected, selected_kv_major
from nsa.triton_backend.dispatch import hopper_serves
from tests.laws import test_causality, test_memory, test_selection
from tests.laws.cases import Case
from tests.laws.parts import BRANCHES_AND_ALL, Parts
from tests.laws.test_precision import values_and_gradients_within_budget
from tests.laws.test_sizes import LONG

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available()
        and not (torch.cuda.get_device_capability() == (9, 0) and hopper.AVAILABLE and forced.read() is None),
        reason="needs a Hopper GPU that is not forced to be another, and a version of Triton that was tried",
    ),
]
PLAIN = replace(
    LONG, config=nsa.NSAConfig(l=8, d=4, l_sel=64, n_sel=6, w=150), group=16, dk=128, dv=128, dtype=torch.bfloat16
)
PAPER = replace(PLAIN, config=nsa.NSAConfig(n_sel=6, w=150), keys=2311)
"""Its choice is made of scores that the kernel summed, several tiles of them."""
CASES = {
    "plain": PLAIN,
    "packed": replace(PLAIN, documents=(130, 0, 1, 309, 260)),
    "chunk": replace(PLAIN, queries=301),
    "batch of 2, float16": replace(PLAIN, batch=2, queries=333, keys=333, seed=210, dtype=torch.float16),
    "group of 6": replace(PLAIN, group=6),
    "group of 1": replace(PLAIN, group=1),
    "group of 64": replace(PLAIN, num_kv_heads=1, group=64, queries=200, keys=200, seed=117),
    "blocks of 128": replace(PLAIN, config=nsa.NSAConfig(l=8, d=4, l_sel=128, n_sel=4, w=150)),
    "keys of 192": replace(PLAIN, dk=192),
    "keys of 192, batch of 2": replace(PLAIN, dk=192, batch=2, group=6, queries=333, keys=333, seed=210),
    "keys of 192, packed": replace(PLAIN, dk=192, documents=(130, 0, 1, 309, 260)),
    "compressed blocks of the paper": replace(PAPER, queries=301),
    "compressed blocks of the paper, keys of 192, group of 6": replace(PAPER, queries=301, dk=192, group=6),
    "one token": replace(PLAIN, queries=1, keys=1, seed=0),
    "heads of 64": replace(PLAIN, dk=64, dv=64, group=6),
    "heads of 64, packed": replace(PLAIN, dk=64, dv=64, group=12, documents=(130, 0, 1, 309, 260)),
    "group of 5, chunk": replace(PLAIN, group=5, queries=301),
}
OF_ONE_DOCUMENT = {
    name: case
    for name, case in CASES.items()
    if case.dk > 64 and case.group <= 16 and not case.documents and case.config.l_sel == 64
}
SHARED = {f"{name}, blocks shared": replace(case, seed=case.seed + 1) for name, case in OF_ONE_DOCUMENT.items()}
"""Calls in which neighbouring queries share their blocks, however short."""
PARTLY_SHARED = {
    f"{name}, blocks partly shared": replace(OF_ONE_DOCUMENT[name], seed=OF_ONE_DOCUMENT[name].seed + 2)
    for name in ("plain", "chunk", "compressed blocks of the paper, keys of 192, group of 6")
}
"""Calls in which some do."""
BY_BLOCK = {
    f"{name}, by block": replace(CASES[name], group=min(CASES[name].group, 8), seed=CASES[name].seed + 3)
    for name in ("plain", "packed", "chunk", "batch of 2, float16", "group of 6", "keys of 192, packed")
}
"""Calls that loop over blocks, however short, a few queries at a time."""
ALL = CASES | SHARED | PARTLY_SHARED | BY_BLOCK


def values_and_gradients(parts: Parts, case: Case, branch: str) -> None:
    """Without the floor of a single term's rounding, which in bf16 is more than all of dq; where there are few
    keys, a gradient may be a single term."""
    values_and_gradients_within_budget(parts, case, branch, steady=case.keys > 64)


LAWS: list[Callable[..., None]] = [
    test_causality.test_past_ignores_a_changed_future.check,
    test_causality.test_past_ignores_a_future_that_is_not_finite.check,
    test_causality.test_gradient_of_the_past_ignores_the_future.check,
    test_causality.test_nan_gradient_of_a_row_stays_with_the_past.check,
    test_memory.test_repeats_bit_for_bit.check,
    values_and_gradients,
]
OF_THE_CHOICE: list[Callable[..., None]] = [
    test_selection.test_selection_follows_equation_9.check,
    test_selection.test_invisible_blocks_never_move_the_indices.check,
    test_selection.test_indices_are_distinct_ascending_causal_and_padded.check,
]


class _Unused:
    """A kernel that must not be launched."""

    def __getitem__(self, grid: object) -> None:
        pytest.fail("the call did not reach `hopper/`")


FORWARD_AND_DQ = [
    *((compressed_window, name) for name in ("_forward", "_backward_q")),
    (scores, "_group_probabilities"),
    *((selected, name) for name in ("_forward", "_backward_q")),
]


@pytest.fixture
def only_hopper(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Fail where a kernel is launched that `hopper/` stands in for.

    Of one token there is no compressed block; the selected branch takes groups of up to 16 heads. Heads of 64 have dk
    and dv in `hopper/` alone, and compressed keys of large groups with heads of 128 all but these.
    """
    monkeypatch.setattr(dispatch, "MOST_PLANNED_BYTES", 0)
    if case in (SHARED | PARTLY_SHARED).values():
        most = 8 if case in PARTLY_SHARED.values() else None
        monkeypatch.setattr(dispatch, "SHARED_MIN_QUERIES", 1)
        monkeypatch.setattr(selected, "max_shared_blocks", lambda *_: most)
    if case in BY_BLOCK.values():
        monkeypatch.setattr(dispatch, "KV_MAJOR_MIN_QUERIES", 1)
        monkeypatch.setattr(dispatch, "sooner_by_block", lambda *_, **__: True)
        monkeypatch.setattr(selected_kv_major, "CHUNK", 300)
        monkeypatch.setattr(selected_kv_major, "INDEXED", 600)
        monkeypatch.setattr(selected_kv_major, "BACKWARD_SCRATCH", 2**21)
        monkeypatch.setattr(selected_kv_major, "_forward", _Unused())
    for module, name in FORWARD_AND_DQ if case.dk > 64 else ():
        if case.group <= 16 if module is selected else case.keys > 1:
            monkeypatch.setattr(module, name, _Unused())
    if case.keys > 1 and (case.dk != 128 or case.group < 16):
        monkeypatch.setattr(compressed_window, "_backward_kv", _Unused())
    if case.group <= 32 and case.config.l_sel == 64:
        monkeypatch.setattr(selected_kv_major, "_backward", _Unused())


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
class TestLaws:
    pytestmark = on_hopper

    @pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
    @pytest.mark.parametrize("check", LAWS, ids=lambda check: check.__name__.removeprefix("test_"))
    def test_of_a_branch(self, case: Case, check: Callable[..., None], branch: str) -> None:
        check(Parts("triton", torch.device("cuda")), case, branch)

    @pytest.mark.parametrize("check", OF_THE_CHOICE, ids=lambda check: check.__name__.removeprefix("test_"))
    def test_of_the_choice(self, case: Case, check: Callable[..., None]) -> None:
        check(Parts("triton", torch.device("cuda")), case)


class TestChoices:
    pytestmark = on_hopper

    @pytest.mark.parametrize("group", [16, 6, 1])
    def test_equal_keys_leave_the_choice_to_the_index(self, group: int) -> None:
        case = replace(PLAIN, group=group)
        x = case.inputs(torch.device("cuda"))
        same = x._replace(k=x.k[:, :1].expand_as(x.k).contiguous())
        found, wanted = (Parts(name, torch.device("cuda")).select(case, same) for name in ("triton", "reference"))
        assert torch.equal(found, wanted)

    @pytest.mark.parametrize(("group", "dk"), [(16, 128), (6, 192)])
    def test_programs_that_share_a_tile_choose_as_the_reference(self, group: int, dk: int) -> None:
        case = replace(PAPER, group=group, dk=dk, queries=61, keys=20_011)
        x = case.inputs(torch.device("cuda"))
        found, wanted = (Parts(name, torch.device("cuda")).select(case, x) for name in ("triton", "torch"))
        assert (found == wanted).float().mean() > 0.999  # of probabilities rounded in two ways


class TestSharedBlocks:
    pytestmark = on_hopper

    @pytest.mark.parametrize(("group", "dk"), [(16, 128), (9, 192)])
    def test_what_neighbours_chose_changes_no_bit(self, group: int, dk: int) -> None:
        """Of four queries that share their blocks the first keeps its choice, the others take any."""
        case = replace(PAPER, group=group, dk=dk, queries=2311)
        x = case.inputs(torch.device("cuda"))
        q, k, v = x.qkv()
        layout = Layout(case.queries, case.keys, case.config, q.device)
        chosen = Parts("triton", torch.device("cuda")).select(case, x).contiguous()
        others = (torch.randint_like(chosen, 2**30) % (layout.positions.int() // 64 + 1)[:, None, None]).sort(-1).values
        others = _distinct(others, layout)
        first = (torch.arange(case.queries, device=q.device) % 4 == 0)[:, None, None]
        changed = torch.where(first, chosen, others)
        assert selected.variant("selected_forward", q, k, v, selected._blocks(layout, 6)) is dispatch.Variant.SHARED
        one, other = (selected.forward(q, k, v, blocks, layout, dk**-0.5) for blocks in (chosen, changed))
        assert not torch.equal(one[1], other[1])
        for before, after in zip(one[:3], other[:3], strict=True):
            assert torch.equal(before[:, ::4], after[:, ::4])


class TestBarriers:
    pytestmark = on_hopper

    def test_none_stands_in_the_memory_of_a_tile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where many short programs run beside long ones: `hopper.tile.release`. Without it each of 12 calls had 14 to
        44 elements of dq that were not finite."""
        monkeypatch.setattr(dispatch, "sooner_by_block", lambda *_, backward: backward)
        length, device = 65536, torch.device("cuda")
        generator = torch.Generator(device).manual_seed(0)
        q, k, v, do = (
            torch.randn(1, length, heads, 128, generator=generator, device=device).bfloat16()
            for heads in (64, 4, 4, 64)
        )
        layout = Layout(length, length, nsa.NSAConfig(), device)
        own = torch.arange(length, device=device)[:, None, None] // 64
        among = torch.rand(1, length, 4, 13, generator=generator, device=device) * (own - 1)
        blocks = torch.cat(
            [0 * among[..., :1], among.floor().clamp(1), own - 1 + 0 * among[..., :1], own + 0 * among[..., :1]], -1
        )
        blocks = _distinct(blocks.int().sort(-1).values.contiguous(), layout)
        lse = torch.full((1, length, 64), 11.0, device=device)
        dq, dk, dv = selected.gradients(q, k, v, do, lse, torch.zeros_like(lse), blocks, layout, 128**-0.5)
        for gradient in (dq, dk, dv):
            assert gradient.isfinite().all()


class TestAddresses:
    pytestmark = on_hopper

    def test_keys_that_tma_cannot_read_give_the_same(self) -> None:
        x = PLAIN.inputs(torch.device("cuda"))
        k, v = (torch.nn.functional.pad(y, (1, 0))[..., 1:] for y in (x.k, x.v))
        odd = x._replace(k=k, v=v)
        parts = Parts("triton", torch.device("cuda"))
        assert hopper_serves("compressed_window_forward", 16, x.k, x.v)
        assert not hopper_serves("compressed_window_forward", 16, odd.k, odd.v)
        for branch in BRANCHES_AND_ALL:
            one, other = parts.forward(PLAIN, x, branch), parts.forward(PLAIN, odd, branch)
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)

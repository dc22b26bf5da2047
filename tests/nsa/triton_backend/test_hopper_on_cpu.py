"""What the kernels of `hopper/` compute, on a CPU, against float64: with asynchronous products early and late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import nsa
from nsa.geometry import Layout
from nsa.triton_backend import architecture, block_unions, hopper, index, tuning
from nsa.triton_backend.launch import LOG2E
from tests.laws import oracle
from tests.laws.budget import BACKWARD, FORWARD, gradient_unit, output_unit, score_unit, within_budget
from tests.laws.cases import Case, Inputs
from tests.laws.parts import Parts
from tests.nsa.triton_backend.gluon_memory import Barrier, KernelError, Pointer, Shared, load
from tests.nsa.triton_backend.gluon_on_cpu import ORDERS, emulated

CPU = torch.device("cpu")
PLAIN = Case(
    config=nsa.NSAConfig(l=8, d=4, l_sel=64, n_sel=3, w=70),
    num_kv_heads=1,
    group=16,
    dk=128,
    dv=128,
    queries=150,
    keys=150,
    dtype=torch.bfloat16,
    seed=411,
)
LONG_CHUNK = replace(
    PLAIN, config=nsa.NSAConfig(l=8, d=2, l_sel=64, n_sel=5, w=330), queries=37, keys=420, dtype=torch.float16
)
"""Each slot of a ring takes several tiles."""
CASES = {
    "plain": PLAIN,
    "packed": replace(PLAIN, documents=(40, 0, 1, 109)),
    "long chunk": LONG_CHUNK,
    "batch of 2": replace(PLAIN, batch=2, queries=70, keys=70),
    "group of 6": replace(PLAIN, group=6, num_kv_heads=2),
    "group of 1": replace(PLAIN, group=1),
    "keys of 192": replace(PLAIN, dk=192),
    "long chunk, keys of 192": replace(LONG_CHUNK, dk=192),
    "batch of 2, keys of 192, group of 6": replace(
        PLAIN, dk=192, batch=2, num_kv_heads=2, group=6, queries=70, keys=70
    ),
    "packed, keys of 192": replace(PLAIN, dk=192, documents=(40, 0, 1, 49), queries=90, keys=90),
    "one query": replace(PLAIN, queries=1, keys=9),
}
HEADS_OF_64 = {
    "heads of 64": replace(PLAIN, dk=64, dv=64, group=6, num_kv_heads=2),
    "heads of 64, packed": replace(PLAIN, dk=64, dv=64, group=12, documents=(40, 0, 1, 109)),
    "long chunk, heads of 64": replace(LONG_CHUNK, dk=64, dv=64, group=5),
}
"""Of these the table has dk and dv alone."""
OF_SHARED = {name: case for name, case in CASES.items() if not case.documents} | {
    "many blocks": replace(PLAIN, config=nsa.NSAConfig(l=8, d=4, l_sel=64, n_sel=6, w=70), queries=41, keys=911)
}
OF_SUMMED = {
    "plain": {"queries": 90, "keys": 300},
    "batch of 2, group of 6": {"batch": 2, "group": 6, "num_kv_heads": 2, "queries": 31, "keys": 410},
    "group of 64, keys of 192": {"group": 64, "dk": 192, "queries": 20, "keys": 258},
    "one query": {"queries": 1, "keys": 9},
}
"""Of cases whose kernel sums probabilities to scores of selection blocks."""
GROUP_OF_64 = replace(PLAIN, group=64, queries=70, keys=70)
of_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
of_all_groups = pytest.mark.parametrize("case", [*CASES.values(), GROUP_OF_64], ids=[*CASES, "group of 64"])
WITH_HEADS_OF_64 = CASES | {"group of 64": GROUP_OF_64} | HEADS_OF_64
of_all_heads = pytest.mark.parametrize("case", WITH_HEADS_OF_64.values(), ids=WITH_HEADS_OF_64.keys())
of_both_keys = pytest.mark.parametrize("dk", [128, 192])
MOST_SHARED = {"shared": 1000, "partly shared": 2}
"""In the backward pass, how many blocks a tile of queries shares at most."""
SELECTED = ("selected", *MOST_SHARED)
"""The selected branch by query, by such tiles, and both."""
BY_BLOCK = "by block"
"""The selected branch, its gradients by programs of a block; forward as by query."""
of_intervals = pytest.mark.parametrize("branch", ["compressed", "window"])


@pytest.fixture(autouse=True)
def _tables_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "of_gpu", lambda _: 90)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    with emulated(request.param):
        yield request.param


@dataclass(frozen=True)
class Results:
    """What a branch's forward pass wrote."""

    o: Tensor
    lse: Tensor
    read: Tensor


@dataclass(frozen=True)
class Branch:
    """One branch of a case: its inputs, what each query sees, and its kernels."""

    case: Case
    name: str
    x: Inputs

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.case.queries, self.case.keys, self.case.config, CPU, self.x.cu_seqlens)

    @cached_property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """What its kernels are given."""
        q, k, v = self.x.qkv()
        if self.name == "compressed":
            k, v = (self._in_slots(oracle.compress(self.case, x)) for x in (k, v))
        return q, k, v

    def _in_slots(self, x: Tensor) -> Tensor:
        """The compressed x in the slots of packed documents, the last of which may be unused."""
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.layout.num_slots - x.shape[1]))

    @cached_property
    def blocks(self) -> Tensor:
        """int32 [B, S, Hkv, n], chosen by the reference's scores."""
        return Parts("torch", CPU).select(self.case, self.x).contiguous()

    @cached_property
    def mask(self) -> Tensor:
        """bool [B, Hkv, S, T]: what each query sees."""
        if self.name in (*SELECTED, BY_BLOCK):
            return oracle.selected_mask(self.case, self.blocks)
        if self.name == "window":
            mask = oracle.window_mask(self.case, CPU)
        else:
            mask = oracle.compressed_mask(self.case, CPU)
            mask = torch.nn.functional.pad(mask, (0, self.layout.num_slots - mask.shape[1]))
        return mask.expand(self.case.batch, self.case.num_kv_heads, -1, -1)

    @property
    def scale(self) -> float:
        return self.case.dk**-0.5

    @property
    def interval(self) -> tuple[Tensor, Tensor]:
        return self.layout.compressed_interval if self.name == "compressed" else self.layout.window_interval

    @property
    def finite(self) -> Tensor:
        _, k, v = self.qkv
        return k.isfinite().all(-1) & v.isfinite().all(-1)

    def forward(self, whole: tuple[Tensor, Tensor, Tensor, Tensor] | None = None) -> Results:
        q, k, v = self.qkv
        heads = (*q.shape[:2], q.shape[2])
        found = Results(
            q.new_full((*q.shape[:3], v.shape[3]), torch.nan),
            torch.full(heads, torch.nan),
            torch.full((*q.shape[:2], v.shape[2]), -1, dtype=torch.int32),
        )
        written = found.o, found.lse, found.read
        if self.name in ("selected", BY_BLOCK):
            hopper.selected.forward(q, k, v, self.blocks, self.layout, self.scale, *written, whole)
        elif self.name in MOST_SHARED:
            unions = block_unions.unions(self.blocks, self.finite, self.layout)
            hopper.shared_blocks.forward(q, k, v, self.finite, unions, self.layout, self.scale, *written, whole)
        else:
            hopper.compressed_window.forward(q, k, v, self.finite, *self.interval, *written, self.scale)
        return found

    def rows(self, found: Results, do: Tensor) -> tuple[Tensor, Tensor]:
        """(lse, delta); as `launch.backward_rows` has it, rows that see nothing have an lse of NaN."""
        delta = (do.float() * found.o.float()).sum(-1)
        return torch.where(found.lse == -torch.inf, torch.nan, found.lse * LOG2E), delta

    def dkv(self, found: Results, do: Tensor, parts: int = 1) -> tuple[Tensor, Tensor]:
        """(dk, dv): of the window and the compressed branch by programs that share the queries of a tile of keys."""
        if self.name == BY_BLOCK:
            return self.by_block(found, do)[1:]
        q, k, v = self.qkv
        of_k, of_v = (torch.full((parts, *x.shape), torch.nan, dtype=torch.float32) for x in (k, v))
        seen_by = self.layout.compressed_queries if self.name == "compressed" else self.layout.window_queries
        rows, bounds = self.rows(found, do), (*self.interval, *seen_by)
        hopper.keys_and_values.backward(q, k, v, do, *rows, bounds, of_k, of_v, self.scale)
        return of_k.sum(0).to(k.dtype), of_v.sum(0).to(v.dtype)

    def by_block(self, found: Results, do: Tensor, with_dq: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), of parts added up here: of up to PAIRS queries each, half of the sequence at a time."""
        (q, k, v), layout = self.qkv, self.layout
        (batch, length, num_kv_heads, n), shape = self.blocks.shape, tuning.shape("hopper.selected_backward_kv", q, v)
        dk, dv = (torch.zeros(x.shape) for x in (k, v))
        starts, ends = layout.block_tokens
        parts_of_q = []
        for first in range(0, length, -(-length // 2)):
            count = min(-(-length // 2), length - first)
            tiles = index.build(self.blocks, layout, first, first + count, chunk=count, size=PAIRS)
            parts = [torch.full((len(tiles.begin), 64, x.shape[3]), torch.nan) for x in (k, v)]
            of_q = q.new_full((batch, num_kv_heads, count, n, self.case.group, q.shape[3]), torch.nan)
            hopper.selected_keys_and_values.backward(
                q, k, v, do, *self.rows(found, do), n, tiles, layout, first, count, parts, of_q if with_dq else None,
                self.scale, shape,
            )  # fmt: skip
            parts_of_q.append(of_q)
            for tile in range(len(tiles.begin)):
                if tiles.begin[tile] < tiles.end[tile]:
                    kv_row, block = divmod(int(tiles.cell[tile]), layout.max_blocks)
                    keys = slice(int(starts[block]), int(ends[block]))
                    for total, part in zip((dk, dv), parts, strict=True):
                        total[kv_row // num_kv_heads, keys, kv_row % num_kv_heads] += part[
                            tile, : keys.stop - keys.start
                        ]
        of_q = torch.cat(parts_of_q, 2)
        taken = (self.blocks >= 0).transpose(1, 2)[..., None, None]
        dq = torch.where(taken, of_q.float(), 0.0).sum(3).transpose(1, 2).reshape(q.shape) * self.scale
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def dq(self, found: Results, do: Tensor, more: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if self.name == BY_BLOCK:
            return self.by_block(found, do)[0]
        q, k, v = self.qkv
        lse, delta = self.rows(found, do)
        dq = torch.full_like(q, torch.nan)
        if self.name == "selected":
            hopper.selected.backward_q(q, k, v, do, self.blocks, self.layout, self.scale, lse, delta, dq, more)
        elif self.name in MOST_SHARED:
            unions, most = block_unions.unions(self.blocks, self.finite, self.layout), MOST_SHARED[self.name]
            of_rows = self.layout, self.scale, lse, delta, dq, more
            hopper.shared_blocks.backward_q(q, k, v, self.finite, unions, do, *of_rows, most)
            hopper.selected.backward_q(q, k, v, do, self.blocks, *of_rows, (unions.counts, most))
        else:
            hopper.compressed_window.backward_q(q, k, v, self.finite, do, *self.interval, lse, delta, dq, self.scale)
        return dq

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(o, lse) in a dtype, by the oracle."""
        o, lse, _ = oracle.attend(*(x.to(dtype) for x in self.qkv), self.mask)
        return o, lse


PAIRS = 40
"""Queries of a block that one program takes: a few programs have one block, and the last of them a part of a tile."""


def branch_of(case: Case, name: str) -> Branch:
    return Branch(case, name, case.inputs(CPU))


def forward_by_query(branch: Branch) -> Results:
    """Of the selected branch, with PyTorch: the kernels take neither heads of 64 nor groups of more than 16."""
    o, lse = branch.expected(torch.float32)
    return Results(o.to(branch.x.q.dtype).contiguous(), lse.contiguous(), branch.mask.sum(-1).transpose(1, 2).int())


def require_forward_within_budget(branch: Branch, found: Results) -> None:
    truth, lse = branch.expected(torch.float64)
    within_budget("o", found.o, oracle.sdpa(*branch.qkv, branch.mask), truth, FORWARD, unit=output_unit(branch.x))
    single = branch.expected(torch.float32)[1]
    within_budget("lse", found.lse, single, lse, FORWARD, unit=score_unit(branch.x))
    assert torch.equal(found.read.long(), branch.mask.sum(-1).transpose(1, 2))


def require_gradients_within_budget(branch: Branch, found: Results, parts: int = 1) -> None:
    """Of the selected branch by query dq alone.

    To dk and dv no rounding of a single term is allowed: it is as much as a fifth of what many queries add up to.
    """
    do = branch.case.noise(found.o)
    own = _gradients(branch, do, oracle.sdpa, do.dtype)
    truth = _gradients(branch, do, oracle.dense, torch.float64)
    within_budget("dq", branch.dq(found, do), own[0], truth[0], BACKWARD, unit=gradient_unit(branch.x, do))
    if branch.name not in SELECTED:
        for name, *three in zip(("dk", "dv"), branch.dkv(found, do, parts), own[1:], truth[1:], strict=True):
            within_budget(name, *three, BACKWARD, unit=0.0, steady=True)


def _gradients(branch: Branch, do: Tensor, attention: oracle.Attention, dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = [x.to(dtype).detach().requires_grad_() for x in branch.qkv]
    return torch.autograd.grad(attention(*leaves, branch.mask), leaves, do.to(dtype))


@pytest.mark.usefixtures("order")
class TestBranches:
    @of_intervals
    @pytest.mark.parametrize("parts", [2, 5])
    def test_programs_that_share_the_queries_of_a_key(self, branch: str, parts: int) -> None:
        of_case = branch_of(replace(LONG_CHUNK, group=12, dk=64, dv=64, queries=200), branch)
        require_gradients_within_budget(of_case, of_case.forward(), parts)

    @of_intervals
    @of_all_heads
    def test_intervals(self, case: Case, branch: str) -> None:
        of_case = branch_of(case, branch)
        found = of_case.forward()
        require_forward_within_budget(of_case, found)
        require_gradients_within_budget(of_case, found)

    @of_cases
    def test_selected(self, case: Case) -> None:
        of_case = branch_of(case, "selected")
        found = of_case.forward()
        require_forward_within_budget(of_case, found)
        require_gradients_within_budget(of_case, found)

    @pytest.mark.parametrize("case", (CASES | HEADS_OF_64).values(), ids=CASES | HEADS_OF_64)
    def test_gradients_by_block(self, case: Case) -> None:
        branch = branch_of(case, BY_BLOCK)
        found = forward_by_query(branch)
        require_gradients_within_budget(branch, found)
        do = case.noise(found.o)
        for alone, beside_dq in zip(
            branch.by_block(found, do, with_dq=False)[1:], branch.by_block(found, do)[1:], strict=True
        ):
            assert torch.equal(alone, beside_dq)

    @pytest.mark.parametrize("most", MOST_SHARED)
    @pytest.mark.parametrize("case", OF_SHARED.values(), ids=OF_SHARED)
    def test_shared_blocks(self, case: Case, most: str) -> None:
        branch = branch_of(case, most)
        found = branch.forward()
        require_forward_within_budget(branch, found)
        require_gradients_within_budget(branch, found)

    @pytest.mark.parametrize("name", MOST_SHARED)
    @pytest.mark.parametrize("empty", [slice(0, 8), slice(60, 64), slice(148, 150), slice(0, 150)], ids=str)
    def test_tiles_whose_queries_chose_no_block(self, name: str, empty: slice) -> None:
        """As where ranks that share a sequence pad their pieces; the first block has a key that is not finite."""
        branch = branch_of(PLAIN, name)
        blocks, k = branch.blocks.clone(), branch.x.k.clone()
        blocks[:, empty], k[0, 3] = -1, torch.nan
        branch = replace(branch, x=branch.x._replace(k=k))
        branch.__dict__["blocks"] = blocks
        found = branch.forward()
        dq = branch.dq(found, PLAIN.noise(found.o))
        assert not found.o[:, empty].any()
        assert found.lse[:, empty].eq(-torch.inf).all()
        assert not found.read[:, empty].any()
        assert not dq[:, empty].any()
        by_query = replace(branch, name="selected")
        by_query.__dict__["blocks"] = blocks
        torch.testing.assert_close(found.o, by_query.forward().o, rtol=0.02, atol=0.02, equal_nan=True)

    def test_whether_a_tile_shares_is_known_before_its_queries_chose(self) -> None:
        """Of a tile, what its last query chose decides about the next one alone."""
        branch = branch_of(PLAIN, "partly shared")
        found, do = branch.forward(), PLAIN.noise(branch.forward().o)
        unions = block_unions.unions(branch.blocks, branch.finite, branch.layout)
        of_rows = (branch.scale, *branch.rows(found, do))
        seen = []
        for counts in (unions.counts, unions.counts.clone()):
            counts[0, 0, 20, 0] = 1 if counts is unions.counts else 3
            dq = torch.zeros_like(branch.x.q)
            q, k, v = branch.qkv
            hopper.selected.backward_q(q, k, v, do, branch.blocks, branch.layout, *of_rows, dq, None, (counts, 2))
            seen.append((dq != 0).flatten(2).any(2)[0])
        assert torch.equal(seen[0][:84], seen[1][:84])
        assert not seen[0][84:88].any()
        assert seen[1][84:88].all()
        assert torch.equal(seen[0][88:], seen[1][88:])

    def test_a_piece_that_begins_with_a_period_decides_as_the_whole(self) -> None:
        """From token 128 on, whatever the tile before that has."""
        branch = branch_of(PLAIN, "partly shared")
        found, do = branch.forward(), PLAIN.noise(branch.forward().o)
        counts = block_unions.unions(branch.blocks, branch.finite, branch.layout).counts
        counts[:, :, :32, 0] = 1000
        q, k, v = branch.qkv
        dq, of_rows = torch.zeros_like(q), (branch.scale, *branch.rows(found, do))
        hopper.selected.backward_q(q, k, v, do, branch.blocks, branch.layout, *of_rows, dq, None, (counts, 2))
        assert dq[:, 4:128].flatten(2).any(2).all()
        assert not dq[:, 128:132].any()

    def test_some_tiles_share_and_some_do_not(self) -> None:
        branch = branch_of(PLAIN, "partly shared")
        unions = block_unions.unions(branch.blocks, branch.finite, branch.layout)
        before = unions.counts[0, 0, :-1, 0] <= MOST_SHARED[branch.name]
        assert 0.2 < before.float().mean() < 0.9


@pytest.mark.usefixtures("order")
class TestScores:
    @pytest.mark.parametrize("splits", [1, 3])
    @of_all_groups
    def test_probabilities_summed_over_the_group(self, case: Case, splits: int) -> None:
        branch = branch_of(case, "compressed")
        q, k, _ = branch.qkv
        _, lse, p = oracle.attend(q.double(), k.double(), k.double(), branch.mask)
        first, count = case.queries // 3, case.queries - case.queries // 2
        found = torch.full((case.batch, count, case.num_kv_heads, k.shape[1]), torch.nan)
        shape = tuning.shape("hopper.scores", q, k)
        of_call = lse.float().contiguous(), branch.interval, found, first, count, splits, shape, branch.scale * LOG2E
        hopper.scores.group_probabilities(q, k, *of_call, summed=False)
        single = oracle.attend(*(x.float() for x in (q, k, k)), branch.mask)[2]
        seen = branch.mask[:, :, first : first + count].transpose(1, 2)
        summed = (
            x.unflatten(1, (case.num_kv_heads, case.group)).sum(2)[:, :, first : first + count].transpose(1, 2)[seen]
            for x in (single, p)
        )
        # its exponent holds the score, not the difference from the greatest one
        unit = case.group * score_unit(branch.x)
        within_budget("p", found[seen], *summed, FORWARD, unit=unit)

    @pytest.mark.parametrize("splits", [1, 2, 5])
    @pytest.mark.parametrize("changes", OF_SUMMED.values(), ids=OF_SUMMED.keys())
    def test_scores_are_the_sums_of_equation_9_bit_for_bit(self, changes: dict[str, int], splits: int) -> None:
        """What a query does not see is NaN here: as long as that shows, no score of a block has a share of it."""
        case = replace(PLAIN, config=nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=5, w=30), **changes)
        branch = branch_of(case, "compressed")
        q, k, _ = branch.qkv
        k = torch.where(torch.arange(k.shape[1])[:, None, None] < branch.interval[1][-1] - 3, k, torch.nan)
        first, count = case.queries // 3, case.queries - case.queries // 2
        lse, shape = case.noise(q)[..., 0].float().contiguous(), tuning.shape("hopper.scores", q, k)
        blocks = branch.layout.max_blocks
        p, found = (
            torch.full((case.batch, count, case.num_kv_heads, width), torch.nan) for width in (k.shape[1], blocks)
        )
        for out in (p, found):
            hopper.scores.group_probabilities(
                q, k, lse, branch.interval, out, first, count, splits, shape, branch.scale * LOG2E, out is found
            )
        hi = branch.interval[1][first : first + count, None, None]
        p = torch.where(torch.arange(p.shape[3]) < hi, p, 0.0)
        p = torch.nn.functional.pad(p, (1, 4 * blocks - p.shape[3]))
        wanted = p[..., 0:-1:4]
        for offset, weight in enumerate(hopper.scores.SUMMED_WEIGHTS[1:], start=1):
            wanted = wanted + weight * p[..., offset::4][..., :blocks]
        has_any = 4 * torch.arange(blocks) - 1 < hi
        assert torch.equal(*(torch.where(has_any, x, 0.0).nan_to_num(-1.0) for x in (found, wanted)))


@pytest.mark.usefixtures("order")
class TestWholeCalls:
    @pytest.mark.parametrize("name", SELECTED)
    def test_the_gated_sum_is_that_of_the_three_outputs(self, name: str) -> None:
        branch = branch_of(PLAIN, name)
        gates = branch.x.gates
        others = [PLAIN.noise(branch.qkv[0]) + i for i in range(2)]
        total = torch.full_like(others[0], torch.nan)
        found = branch.forward((*others, gates, total))
        outputs = torch.stack((others[0], found.o, others[1]), -1).double()
        wanted = (outputs * gates[:, :, :, None].double()).sum(-1)
        torch.testing.assert_close(total, wanted.to(total.dtype), rtol=torch.finfo(total.dtype).eps, atol=1e-5)

    @of_both_keys
    @pytest.mark.parametrize("name", SELECTED)
    def test_dq_of_the_other_branches_is_added(self, name: str, dk: int) -> None:
        branch = branch_of(replace(PLAIN, dk=dk), name)
        found = branch.forward()
        do = PLAIN.noise(found.o)
        more = tuple(PLAIN.noise(branch.x.q) * i for i in (1, 2))
        alone, together = branch.dq(found, do), branch.dq(found, do, (more[0], more[1]))
        wanted = (alone.float() + more[0].float() + more[1].float()).to(do.dtype)
        assert torch.equal(together, wanted)


@pytest.mark.usefixtures("order")
class TestWhatIsNotFinite:
    @of_both_keys
    @pytest.mark.parametrize("name", ["compressed", "window", *SELECTED, BY_BLOCK])
    def test_keys_that_a_query_does_not_see_change_no_bit(self, name: str, dk: int) -> None:
        branch = branch_of(replace(PLAIN, dk=dk), name)
        cut = 100
        before = branch.forward()
        do = PLAIN.noise(before.o)
        do[:, cut:] = 0.0
        dq = branch.dq(before, do)
        _, k, v = branch.x.qkv()
        k, v = k.clone(), v.clone()
        k[:, cut], v[:, cut + 1 :] = torch.nan, torch.inf
        broken = replace(branch, x=branch.x._replace(k=k, v=v))
        if name in (*SELECTED, BY_BLOCK):
            broken.__dict__["blocks"] = branch.blocks
        after = broken.forward()
        assert torch.equal(before.o[:, :cut], after.o[:, :cut])
        assert torch.equal(before.lse[:, :cut], after.lse[:, :cut])
        after = replace_rows(after, before, cut)
        assert torch.equal(dq[:, :cut], broken.dq(after, do)[:, :cut])

    @of_both_keys
    @pytest.mark.parametrize("name", ["compressed", "window", *SELECTED])
    @pytest.mark.parametrize("of", ["key", "value"])
    def test_a_query_or_a_key_that_is_seen_makes_its_rows_nan(self, name: str, dk: int, of: str) -> None:
        branch = branch_of(replace(PLAIN, dk=dk), name)
        q, k, v = (x.clone() for x in branch.x.qkv())
        q[0, 60, 3, -5] = torch.inf  # its scores are all -inf, as if it saw nothing
        k[..., -5] = -k[..., -5].abs()
        (k if of == "key" else v)[0, 140, 0, -7] = torch.nan
        broken = replace(branch, x=branch.x._replace(q=q, k=k, v=v))
        if name in SELECTED:
            broken.__dict__["blocks"] = branch.blocks
        found = broken.forward()
        changed = 140 // 4 * 4 + 8 if name == "compressed" else 140
        assert found.o[0, 60, 3].isnan().all()
        assert found.lse[0, 60, 3].isnan()
        assert found.o[0, 60, 4].isfinite().all()
        assert found.o[0, changed:, :, slice(None) if of == "key" else -7].isnan().all()
        assert found.o[0, 61:140].isfinite().all()

    @pytest.mark.parametrize("heads", [(64, 64), (128, 128), (192, 128)], ids=str)
    @pytest.mark.parametrize("name", ["compressed", "window", BY_BLOCK])
    def test_a_row_reaches_dk_and_dv_of_the_keys_that_it_sees_alone(self, name: str, heads: tuple[int, int]) -> None:
        branch = branch_of(replace(PLAIN, group=6, dk=heads[0], dv=heads[1]), name)
        found = forward_by_query(branch) if name == BY_BLOCK else branch.forward()
        do = PLAIN.noise(found.o)
        before = branch.dkv(found, do)
        q, do, lse = branch.x.q.clone(), do.clone(), found.lse.clone()
        q[0, 60, 3], do[0, 60, 3], lse[0, 60, 3] = torch.nan, torch.nan, torch.nan
        broken = replace(branch, x=branch.x._replace(q=q))
        if name == BY_BLOCK:
            broken.__dict__["blocks"] = branch.blocks
        after = broken.dkv(replace(found, lse=lse), do)
        seen = branch.mask[0, 0, 60]
        for old, new in zip(before, after, strict=True):
            assert new[:, seen].isnan().all()
            assert torch.equal(new[:, ~seen], old[:, ~seen])


class TestWhatTheEmulationRefuses:
    def test_a_wait_that_never_ends(self) -> None:
        barrier = Barrier(count=1)
        with pytest.raises(KernelError, match="never ends"):
            barrier.wait(0)
        barrier.arrive(16)  # bytes that nothing brings
        with pytest.raises(KernelError, match="never ends"):
            barrier.wait(0)
        with pytest.raises(KernelError, match="given back"):
            Barrier(phases=1).wait(0)

    def test_an_address_outside_its_tensor_unless_it_is_masked(self) -> None:
        x = torch.arange(8.0)
        pointer = Pointer(x[:4]) + torch.tensor([3, 4])
        assert load(pointer, torch.tensor([True, False]), 9.0).tolist() == [3.0, 9.0]
        for unmasked in (pointer, Pointer(x[:4]) + torch.tensor([-1])):
            with pytest.raises(KernelError, match="outside"):
                load(unmasked)

    def test_a_product_of_what_is_stored_behind_no_fence(self) -> None:
        unfenced: set[int] = set()
        shared = Shared(torch.zeros(4, 4), unfenced)
        shared.store(torch.ones(4, 4))
        with pytest.raises(KernelError, match="fence"):
            shared.permute((1, 0)).operand()
        unfenced.clear()
        assert shared.operand().sum() == 16


def replace_rows(found: Results, by: Results, cut: int) -> Results:
    """`found` up to the row `cut`, `by` from there on."""
    o, lse = found.o.clone(), found.lse.clone()
    o[:, cut:], lse[:, cut:] = by.o[:, cut:], by.lse[:, cut:]
    return Results(o, lse, found.read)

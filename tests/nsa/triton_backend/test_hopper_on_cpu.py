"""What the kernels of `hopper/` compute, on a CPU, against float64: with asynchronous products early and late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import nsa
from nsa.triton_backend import architecture, compressed_window, hopper, selected, selected_kv_major, tuning
from nsa.triton_backend.block_unions import DQ_TOKENS, FORWARD_TOKENS
from nsa.triton_backend.dispatch import Variant
from nsa.triton_backend.launch import LOG2E
from tests.laws import oracle
from tests.laws.budget import FORWARD, score_unit, within_budget
from tests.laws.cases import Case
from tests.nsa.triton_backend.gluon_on_cpu import ORDERS, emulated
from tests.nsa.triton_backend.hopper_branch import (
    BY_BLOCK,
    CASES,
    GROUP_OF_64,
    HEADS_OF_64,
    LONG_CHUNK,
    MOST_SHARED,
    OF_SHARED,
    OF_SUMMED,
    PLAIN,
    SELECTED,
    WITH_HEADS_OF_64,
    Results,
    branch_of,
    forward_by_query,
    require_forward_within_budget,
    require_gradients_within_budget,
)

pytestmark = pytest.mark.interpreter  # the other kernels run in it; on a GPU test_hopper.py serves
of_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
of_all_groups = pytest.mark.parametrize("case", [*CASES.values(), GROUP_OF_64], ids=[*CASES, "group of 64"])
of_all_heads = pytest.mark.parametrize("case", WITH_HEADS_OF_64.values(), ids=WITH_HEADS_OF_64.keys())
of_both_keys = pytest.mark.parametrize("dk", [128, 192])
of_intervals = pytest.mark.parametrize("branch", ["compressed", "window"])


@pytest.fixture(autouse=True)
def _tables_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "of_gpu", lambda _: 90)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    with emulated(request.param):
        yield request.param


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

    @of_cases
    def test_forward_by_block(self, case: Case) -> None:
        branch = branch_of(case, BY_BLOCK)
        require_forward_within_budget(branch, branch.forward())

    @pytest.mark.parametrize("case", (CASES | HEADS_OF_64).values(), ids=CASES | HEADS_OF_64)
    def test_gradients_by_block(self, case: Case) -> None:
        branch = branch_of(case, BY_BLOCK)
        found = forward_by_query(branch)
        beside_dq = require_gradients_within_budget(branch, found)  # the kernel adds each block's first tile itself
        alone = branch.by_block(found, case.noise(found.o), with_dq=False)
        assert torch.equal(beside_dq[1], alone[1])
        assert torch.equal(beside_dq[2], alone[2])

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
        unions = branch.unions(DQ_TOKENS)
        of_rows = (branch.scale, *branch.rows(found, do))
        seen = []
        for counts in (unions.counts, unions.counts.clone()):
            counts[0, 0, 10, 0] = 1 if counts is unions.counts else 3
            dq = torch.zeros_like(branch.x.q)
            q, k, v = branch.qkv
            hopper.selected.backward_q(q, k, v, do, branch.blocks, branch.layout, *of_rows, dq, None, (counts, 2))
            seen.append((dq != 0).flatten(2).any(2)[0])
        assert torch.equal(seen[0][:88], seen[1][:88])
        assert not seen[0][88:96].any()
        assert seen[1][88:96].all()
        assert torch.equal(seen[0][96:], seen[1][96:])

    def test_a_piece_that_begins_with_a_period_decides_as_the_whole(self) -> None:
        """From token 128 on, whatever the tile before that has."""
        branch = branch_of(PLAIN, "partly shared")
        found, do = branch.forward(), PLAIN.noise(branch.forward().o)
        counts = branch.unions(DQ_TOKENS).counts
        counts[:, :, :16, 0] = 1000
        q, k, v = branch.qkv
        dq, of_rows = torch.zeros_like(q), (branch.scale, *branch.rows(found, do))
        hopper.selected.backward_q(q, k, v, do, branch.blocks, branch.layout, *of_rows, dq, None, (counts, 2))
        assert dq[:, 8:128].flatten(2).any(2).all()
        assert not dq[:, 128:136].any()

    @pytest.mark.parametrize("case", [PLAIN, LONG_CHUNK], ids=["plain", "long chunk"])
    def test_one_of_two_kernels_serves_a_query(self, case: Case) -> None:
        branch, most = branch_of(case, "partly shared"), MOST_SHARED["partly shared"]
        q, k, v = branch.qkv
        found, do = branch.forward(), case.noise(branch.forward().o)
        unions = branch.unions(FORWARD_TOKENS)
        shared, by_query = branch.unwritten(), branch.unwritten()
        of_call = branch.layout, branch.scale
        hopper.shared_blocks.forward(
            q, k, v, branch.finite, unions, *of_call, shared.o, shared.lse, shared.read, None, most
        )
        written = by_query.o, by_query.lse, by_query.read
        hopper.selected.forward(q, k, v, branch.blocks, *of_call, *written, None, (unions.counts, most))
        assert torch.equal(shared.read < 0, by_query.read >= 0)
        assert torch.equal(shared.lse.isnan(), ~by_query.lse.isnan())

        unions, of_rows = branch.unions(DQ_TOKENS), branch.rows(found, do)
        dq, dq_by_query = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
        hopper.shared_blocks_dq.backward_q(q, k, v, branch.finite, unions, do, *of_call, *of_rows, dq, None, most)
        of_others = unions.counts, most
        hopper.selected.backward_q(q, k, v, do, branch.blocks, *of_call, *of_rows, dq_by_query, None, of_others)
        assert torch.equal(dq.isnan(), ~dq_by_query.isnan())

    @pytest.mark.parametrize("name", MOST_SHARED)
    @pytest.mark.parametrize("programs", [3, 6])
    def test_a_program_takes_tile_after_tile(self, name: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 20, with the bits of a program for each."""
        branch = branch_of(replace(PLAIN, num_kv_heads=2, queries=75, keys=75), name)
        found = branch.forward()
        do = PLAIN.noise(found.o)
        wanted = branch.dq(found, do)
        monkeypatch.setattr(hopper.shared_blocks_dq, "num_sms", lambda _: programs)
        assert torch.equal(branch.dq(found, do), wanted)

    @pytest.mark.parametrize("name", MOST_SHARED)
    def test_a_call_launches_both_kernels_where_not_all_tiles_share(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        branch = branch_of(replace(PLAIN, dtype=torch.float16), name)
        (q, k, v), of_call = branch.qkv, (branch.blocks, branch.layout, branch.scale)
        monkeypatch.setattr(selected, "variant", lambda *_: Variant.SHARED)
        monkeypatch.setattr(selected, "max_shared_blocks", lambda *_: MOST_SHARED[name])
        monkeypatch.setattr(selected_kv_major, "backward", lambda *_: (None, None))
        wanted = branch.forward()
        o, lse, read, _ = selected.forward(q, k, v, *of_call)
        assert torch.equal(o, wanted.o)
        assert torch.equal(lse, wanted.lse)
        assert torch.equal(read, wanted.read)
        do = PLAIN.noise(o).to(o.dtype)
        dq, _, _ = selected.gradients(q, k, v, do, *branch.rows(wanted, do), *of_call)
        assert torch.equal(dq, branch.dq(wanted, do))

    @pytest.mark.parametrize("tokens", [FORWARD_TOKENS, DQ_TOKENS])
    def test_some_tiles_share_and_some_do_not(self, tokens: int) -> None:
        branch = branch_of(PLAIN, "partly shared")
        unions = branch.unions(tokens)
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
        alone, together = branch.dq(found, do), branch.dq(found, do, (more[0].clone(), more[1]))
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
    @pytest.mark.parametrize("name", ["compressed", "window", *SELECTED, BY_BLOCK])
    @pytest.mark.parametrize("of", ["key", "value"])
    def test_a_query_or_a_key_that_is_seen_makes_its_rows_nan(self, name: str, dk: int, of: str) -> None:
        branch = branch_of(replace(PLAIN, dk=dk), name)
        q, k, v = (x.clone() for x in branch.x.qkv())
        q[0, 60, 3, -5] = torch.inf  # its scores are all -inf, as if it saw nothing
        k[..., -5] = -k[..., -5].abs()
        (k if of == "key" else v)[0, 140, 0, -7] = torch.nan
        broken = replace(branch, x=branch.x._replace(q=q, k=k, v=v))
        if name in (*SELECTED, BY_BLOCK):
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


def replace_rows(found: Results, by: Results, cut: int) -> Results:
    """`found` up to the row `cut`, `by` from there on."""
    o, lse = found.o.clone(), found.lse.clone()
    o[:, cut:], lse[:, cut:] = by.o[:, cut:], by.lse[:, cut:]
    return Results(o, lse, found.read)


def test_programs_that_share_a_tile_of_keys_have_enough_queries_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tiles of 64 rows, of 256 in all: four programs, where a GPU without this would have 16."""
    parts: list[int] = []
    monkeypatch.setattr(compressed_window, "variant", lambda *_: Variant.HOPPER)
    monkeypatch.setattr(hopper.keys_and_values, "backward", lambda *given: parts.append(given[7].shape[0]))
    q, k, rows = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 1024, 64, 128), (1, 256, 4, 128), (1024,)))
    compressed_window._parts_of_keys(q, k, k, q, *4 * [rows], rows, rows, 1024, 1.0, False, None)
    assert parts == [4]

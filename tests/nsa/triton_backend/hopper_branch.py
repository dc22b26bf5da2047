"""The branches of a case as kernels of `hopper/` compute them in the emulation of `gluon_on_cpu.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import nsa
from nsa.geometry import Layout
from nsa.triton_backend import block_unions, hopper, selected_kv_major
from nsa.triton_backend.block_unions import DQ_TOKENS, FORWARD_TOKENS, Unions
from nsa.triton_backend.dispatch import NO_BLOCKS, Variant
from nsa.triton_backend.launch import LOG2E
from tests.laws import oracle
from tests.laws.budget import BACKWARD, FORWARD, gradient_unit, greatest, output_unit, score_unit, within_budget
from tests.laws.cases import Case, Inputs
from tests.laws.parts import Parts

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
WITH_HEADS_OF_64 = CASES | {"group of 64": GROUP_OF_64} | HEADS_OF_64
MOST_SHARED = {"shared": None, "partly shared": 2}
"""How many blocks a tile of queries shares at most; None: all tiles share."""
SELECTED = ("selected", *MOST_SHARED)
"""The selected branch by query, by such tiles, and both."""
BY_BLOCK = "by block"
"""The selected branch by programs of a block."""

_UNIONS: dict[tuple[object, ...], Unions] = {}


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

    def unions(self, tokens: int) -> Unions:
        """A copy: computed once for all tests, since Triton's interpreter takes about a second for it."""
        of_choices = (x.numpy().tobytes() for x in (self.blocks, self.finite))
        key = (tokens, self.blocks.shape, self.finite.shape, self.case.config, *of_choices)
        if key not in _UNIONS:
            _UNIONS[key] = block_unions.unions(self.blocks, self.finite, self.layout, tokens)
        return Unions(_UNIONS[key].blocks.clone(), _UNIONS[key].counts.clone())

    def unwritten(self) -> Results:
        q, _, v = self.qkv
        return Results(
            q.new_full((*q.shape[:3], v.shape[3]), torch.nan),
            torch.full(q.shape[:3], torch.nan),
            torch.full((*q.shape[:2], v.shape[2]), -1, dtype=torch.int32),
        )

    def forward(self, whole: tuple[Tensor, Tensor, Tensor, Tensor] | None = None) -> Results:
        (q, k, v), found = self.qkv, self.unwritten()
        written = found.o, found.lse, found.read
        if self.name == BY_BLOCK:
            self._write_by_block(found)
        elif self.name == "selected":
            hopper.selected.forward(q, k, v, self.blocks, self.layout, self.scale, *written, whole)
        elif self.name in MOST_SHARED:
            unions, most = self.unions(FORWARD_TOKENS), MOST_SHARED[self.name]
            hopper.shared_blocks.forward(q, k, v, self.finite, unions, self.layout, self.scale, *written, whole, most)
            if most is not None:
                of_others = unions.counts, most
                hopper.selected.forward(q, k, v, self.blocks, self.layout, self.scale, *written, whole, of_others)
        else:
            hopper.compressed_window.forward(q, k, v, self.finite, *self.interval, *written, self.scale)
        return found

    def _write_by_block(self, found: Results) -> None:
        """Of up to PAIRS queries per program, half of the sequence at a time."""
        (q, k, v), written = self.qkv, (found.o, found.lse, found.read)
        with (
            mock.patch.object(selected_kv_major, "variant", return_value=Variant.HOPPER),
            mock.patch.object(selected_kv_major, "CHUNK", -(-self.case.queries // 2)),
            mock.patch.object(hopper.selected_kv_major, "PAIRS", PAIRS),
        ):
            selected_kv_major.forward(
                q, k, v, self.blocks, self.layout, self.scale, self.finite, *written, None, NO_BLOCKS
            )

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
        """(dq, dk, dv), of up to PAIRS queries per program, half of the sequence at a time."""
        (q, k, v), rows = self.qkv, self.rows(found, do)
        batch, length, num_kv_heads, n = self.blocks.shape
        sums, parts_of_q = [torch.full(x.shape, torch.nan) for x in (k, v)], []
        for first in range(0, length, -(-length // 2)):
            count = min(-(-length // 2), length - first)
            of_q = q.new_full((batch, num_kv_heads, count, n, self.case.group, q.shape[3]), torch.nan)
            with mock.patch.object(selected_kv_major, "BACKWARD_PAIRS", PAIRS):
                selected_kv_major._backward_chunk(
                    q, k, v, do, *rows, self.blocks, first, count, self.layout, self.scale, sums,
                    of_q if with_dq else None, True,
                )  # fmt: skip
            parts_of_q.append(of_q)
        taken = (self.blocks >= 0).transpose(1, 2)[..., None, None]
        dq = torch.where(taken, torch.cat(parts_of_q, 2).float(), 0.0).sum(3).transpose(1, 2).reshape(q.shape)
        return (dq * self.scale).to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype)

    def dq(self, found: Results, do: Tensor, more: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """In the place of `more[0]`, as in a whole call."""
        if self.name == BY_BLOCK:
            return self.by_block(found, do)[0]
        q, k, v = self.qkv
        lse, delta = self.rows(found, do)
        dq = torch.full_like(q, torch.nan) if more is None else more[0]
        if self.name == "selected":
            hopper.selected.backward_q(q, k, v, do, self.blocks, self.layout, self.scale, lse, delta, dq, more)
        elif self.name in MOST_SHARED:
            unions, most = self.unions(DQ_TOKENS), MOST_SHARED[self.name]
            of_rows = self.layout, self.scale, lse, delta, dq, more
            hopper.shared_blocks_dq.backward_q(q, k, v, self.finite, unions, do, *of_rows, most)
            if most is not None:
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


def require_gradients_within_budget(branch: Branch, found: Results, parts: int = 1) -> tuple[Tensor, ...]:
    """The gradients of q, k and v; of the selected branch by query that of q alone.

    No rounding of a single term to their type is allowed: in bf16 it is more than all of dq, and as much as a fifth of
    what many queries add up to in dk and dv. Of dq that of its greatest element is. Of dq and dk that of a term to
    float32 is too: where a query sees one key, its terms cancel, and what is left, of PyTorch too, is rounding that
    depends on the CPU.
    """
    do = branch.case.noise(found.o)
    own = _gradients(branch, do, oracle.sdpa, do.dtype)
    truth = _gradients(branch, do, oracle.dense, torch.float64)
    gradients: tuple[Tensor, ...]
    if branch.name == BY_BLOCK:
        gradients = branch.by_block(found, do)
    else:
        gradients = branch.dq(found, do), *(() if branch.name in SELECTED else branch.dkv(found, do, parts))
    of_terms = gradient_unit(branch.x, do) * torch.finfo(torch.float32).eps / torch.finfo(do.dtype).eps
    within_budget("dq", gradients[0], own[0], truth[0], BACKWARD, unit=greatest(truth[0]) + of_terms, steady=True)
    units = {"dk": of_terms, "dv": 0.0}
    for (name, unit), *three in zip(units.items(), gradients[1:], own[1:], truth[1:], strict=False):
        within_budget(name, *three, BACKWARD, unit=unit, steady=True)
    return gradients


def _gradients(branch: Branch, do: Tensor, attention: oracle.Attention, dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = [x.to(dtype).detach().requires_grad_() for x in branch.qkv]
    return torch.autograd.grad(attention(*leaves, branch.mask), leaves, do.to(dtype))

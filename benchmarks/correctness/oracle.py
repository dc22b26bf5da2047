"""What a sample of query rows must give: from nsa.reference in float64, and from PyTorch's own attention in any dtype.

The reference goes row by row, so that a whole prefill of 64k tokens is out of its reach. A row alone is not: its keys
are a prefix, and it is the one query that stands at the end of them. In float64 it is the truth; PyTorch's
scaled_dot_product_attention over the same keys has the error from which the budget comes. Problems are given as
`compressed` makes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

import nsa
from benchmarks.cases.inputs import Problem, block_means, with_compressed
from nsa import NSAConfig, geometry

# not cuDNN, which would build a plan for every length
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_COPIES = 8
"""Copies of each row's query, or as many as the call has queries if these are fewer. On a CPU one query is another
computation, with a product of a vector and a matrix: for 1,024 keys its error is a third smaller than that of a call
with many queries, for 16,384 at least four times as large."""


@dataclass(frozen=True)
class QueryRow:
    """One query of one sequence."""

    batch: int
    query: int


def sample_rows(problem: Problem, config: NSAConfig, count: int, seed: int = 0) -> list[QueryRow]:
    """The first and last rows, those around the branches' boundaries, then what the seed draws: as `_rows` counts."""
    num_queries = problem.q.shape[1]
    offset = problem.k.shape[1] - num_queries
    edges = (config.l, config.l_sel, config.w, config.l_sel * config.n_sel)
    boundaries = [0, num_queries - 1] + [edge + step - offset for edge in edges for step in (-1, 0)]
    queries = [query for query in dict.fromkeys(boundaries + _shuffled(num_queries, seed)) if 0 <= query < num_queries]
    return _rows(problem, queries, count)


def random_rows(problem: Problem, count: int, seed: int) -> list[QueryRow]:
    """Rows that nothing but the seed tells: as `_rows` counts."""
    return _rows(problem, _shuffled(problem.q.shape[1], seed), count)


def _shuffled(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def _rows(problem: Problem, queries: Sequence[int], count: int) -> list[QueryRow]:
    """`count` of them, or all if fewer; but one of every sequence at least, of each another query where there are some.

    A batch of which some sequences are wrong is wrong.
    """
    batch = problem.q.shape[0]
    if batch >= count:
        return [QueryRow(b, queries[b % len(queries)]) for b in range(batch)]
    return [QueryRow(b, query) for query in queries[:count] for b in range(batch)][:count]


def compressed(problem: Problem, dtype: torch.dtype, config: NSAConfig) -> Problem:
    """The problem in `dtype`, with its compressed keys and values made there unless the case gives them."""
    problem = problem.map(lambda x: x.detach().to(dtype))
    return problem if problem.k_compressed is not None else with_compressed(problem, config)


@dataclass(frozen=True)
class Prefix:
    """One row of a problem with the keys that it may see; NSA's compressed ones too."""

    q: Tensor  # [1, 1, Hq, Dk]
    k: Tensor  # [1, t + 1, Hkv, Dk]
    v: Tensor
    gates: Tensor  # [1, 1, Hq, 3]
    k_compressed: Tensor | None  # [1, visible blocks, Hkv, Dk]
    v_compressed: Tensor | None
    copies: int
    """Of the query, where PyTorch's own error is taken."""


def prefix(problem: Problem, row: QueryRow, config: NSAConfig) -> Prefix:
    """The row, cut out as views, so that gradients reach the problem's tensors."""
    length = problem.k.shape[1] - problem.q.shape[1] + row.query + 1
    blocks = geometry.num_compressed_blocks(length, config)
    batch, own = slice(row.batch, row.batch + 1), slice(row.query, row.query + 1)
    compressed_pair = (problem.k_compressed, problem.v_compressed)
    k_cmp, v_cmp = (None if x is None else x[batch, :blocks] for x in compressed_pair)
    k, v = problem.k[batch, :length], problem.v[batch, :length]
    copies = min(problem.q.shape[1], _COPIES)
    return Prefix(problem.q[batch, own], k, v, problem.gates[batch, own], k_cmp, v_cmp, copies)


NSARow = Callable[[Prefix, Tensor, NSAConfig], Tensor]
DenseRow = Callable[[Prefix], Tensor]


def nsa_row(x: Prefix, blocks: Tensor, config: NSAConfig) -> Tensor:
    """The reference's output with these blocks [1, 1, Hkv, n] selected: [1, 1, Hq, Dv]."""
    assert x.k_compressed is not None
    assert x.v_compressed is not None
    k_cmp, v_cmp, length = x.k_compressed, x.v_compressed, x.k.shape[1]
    outputs = (
        nsa.compressed_attention(x.q, k_cmp, v_cmp, config, length, backend="reference")[0],
        nsa.selected_attention(x.q, x.k, x.v, blocks, config, backend="reference")[0],
        nsa.window_attention(x.q, x.k, x.v, config, backend="reference")[0],
    )
    return nsa.combine(outputs, x.gates, backend="reference")


def dense_row(x: Prefix) -> Tensor:
    """Causal dense attention by the reference: its window branch with a window that holds every key."""
    return nsa.window_attention(x.q, x.k, x.v, NSAConfig(w=x.k.shape[1]), backend="reference")[0]


def pytorch_nsa_row(x: Prefix, blocks: Tensor, config: NSAConfig) -> Tensor:
    """What `nsa_row` says, by PyTorch's attention in the dtype of the inputs."""
    assert x.k_compressed is not None
    assert x.v_compressed is not None
    block_of_key = torch.arange(x.k.shape[1], device=x.q.device) // config.l_sel
    selected = (blocks[..., None] == block_of_key).any(-2).transpose(1, 2)  # [1, Hkv, 1, t + 1]
    outputs = (
        _sdpa(x, x.k_compressed, x.v_compressed),
        _sdpa(x, x.k, x.v, selected.repeat_interleave(x.q.shape[2] // x.k.shape[2], 1)),
        _sdpa(x, x.k[:, -config.w :], x.v[:, -config.w :]),
    )
    return (x.gates[..., None] * torch.stack(outputs, 3)).sum(3)


def pytorch_dense_row(x: Prefix) -> Tensor:
    """What `dense_row` says, by PyTorch's attention in the dtype of the inputs."""
    return _sdpa(x, x.k, x.v)


def _sdpa(row: Prefix, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    if k.shape[1] == 0:
        return row.q.new_zeros(*row.q.shape[:3], v.shape[3])
    q, k, v = (x.transpose(1, 2) for x in (row.q.repeat(1, row.copies, 1, 1), k, v))
    with sdpa_kernel(KERNELS):
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return o[:, :, :1].transpose(1, 2)


def block_scores(x: Prefix, config: NSAConfig) -> Tensor:
    """Eq. 8 to 10 for one row: [Hkv, blocks that start at or before it], the softmax in at least float32."""
    assert x.k_compressed is not None
    keys, blocks = x.k_compressed[0], geometry.num_selection_blocks(x.k.shape[1], config)  # [seen, Hkv, Dk]
    q = x.q[0, 0].unflatten(0, (keys.shape[1], -1))  # [Hkv, G, Dk]
    s = torch.einsum("hgd,chd->hgc", q, keys) * q.shape[-1] ** -0.5
    p = s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).sum(1)  # [Hkv, seen]
    offsets, step = geometry.overlap_offsets(config), config.l_sel // config.d
    weights = torch.tensor(geometry.overlap_weights(config), dtype=p.dtype, device=p.device)
    before = -offsets.start
    after = max((blocks - 1) * step + len(offsets) - before - p.shape[-1], 0)
    return pad(p, (before, after)).unfold(-1, len(offsets), step)[:, :blocks] @ weights


def own_blocks(blocks: Tensor, row: QueryRow) -> Tensor:
    """The row's own of block_indices [B, S, Hkv, n]: [1, 1, Hkv, n]."""
    return blocks[row.batch : row.batch + 1, row.query : row.query + 1]


def nsa_gradients(
    problem: Problem,
    blocks: Tensor,
    rows: Sequence[QueryRow],
    d_rows: Sequence[Tensor],
    config: NSAConfig,
    attend: NSARow,
) -> dict[str, Tensor]:
    """Gradients of Σ o·do over these rows with respect to q, k, v and gates, through the compression too."""
    leaves = problem.map(lambda x: x.detach().requires_grad_())
    o_rows = (attend(prefix(leaves, row, config), own_blocks(blocks, row), config) for row in rows)
    total = _gradients(leaves.tensors, o_rows, d_rows)
    for source in ("k", "v"):
        x = leaves.tensors[source]
        means, d_means = block_means(x, config), total.pop(f"{source}_compressed")
        total[source] += torch.autograd.grad(means, x, d_means.to(x.dtype))[0]
    return {f"d{name}": gradient.to(problem.q.dtype) for name, gradient in total.items()}


def dense_gradients(
    problem: Problem, rows: Sequence[QueryRow], d_rows: Sequence[Tensor], attend: DenseRow
) -> dict[str, Tensor]:
    """The same for dense attention, with respect to q, k and v."""
    leaves = problem.map(lambda x: x.detach().requires_grad_())
    wanted = {name: leaves.tensors[name] for name in ("q", "k", "v")}
    total = _gradients(wanted, (attend(prefix(leaves, row, NSAConfig())) for row in rows), d_rows)
    return {f"d{name}": gradient.to(problem.q.dtype) for name, gradient in total.items()}


def _gradients(leaves: dict[str, Tensor], o_rows: Iterable[Tensor], d_rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Summed row by row, in at least float32; the rows come lazily, so that one row's graph is alive at a time."""
    wide = torch.promote_types(next(iter(leaves.values())).dtype, torch.float32)
    total = {name: torch.zeros_like(x, dtype=wide) for name, x in leaves.items()}
    for o, d_o in zip(o_rows, d_rows, strict=True):
        found = torch.autograd.grad(o, list(leaves.values()), d_o.to(o.dtype), materialize_grads=True)
        for name, gradient in zip(leaves, found, strict=True):
            total[name] += gradient
    return total

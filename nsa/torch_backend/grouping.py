"""Queries grouped by the key block they chose: the tiles of the selected branch, and the way back from them.

Queries go in steps whose size grows with S, so that the number of steps does not and memory stays linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import geometry
from nsa.geometry import Layout
from nsa.torch_backend import index as inverted_index
from nsa.torch_backend.tile import partial_weights

ROWS_PER_TILE = 256
MIN_TOKENS_PER_STEP = 4096
MAX_STEPS = 8
# Elements of a temporary: larger ones are mapped afresh at each allocation, which costs more than the work.
BATCH_ELEMENTS = 2**22


@dataclass(frozen=True)
class Step:
    """The tiles of the queries first <= i < last of every kv row (batch row and kv head)."""

    first: int
    last: int
    queries: Tensor
    """int64 [tiles, C]: kv row · tokens + token; any one at an empty place."""
    query_tokens: Tensor
    """int32 [tiles, C]: the query's index among the keys, -1 at an empty place."""
    keys: Tensor
    """int64 [tiles, l']: rows of the flattened keys [kv rows · T]."""
    key_tokens: Tensor
    """int32 [tiles, l']: the key's index among the keys."""
    places: Tensor
    """int64 [kv rows · tokens, n]: each chosen block's place among the tiles' places, an empty one for none."""

    def visible(self, batch: slice) -> Tensor:
        """bool [tiles, C, l']: whether the query stands at or behind the key."""
        return self.key_tokens[batch, None] <= self.query_tokens[batch, :, None]

    def gather(self, rows: Tensor, batch: slice) -> Tensor:
        """[kv rows, tokens · G, D] -> [tiles, C · G, D]."""
        tiles, width = self.queries[batch].shape
        group = rows.shape[0] * rows.shape[1] // self.places.shape[0]
        flat = rows.reshape(self.places.shape[0], group * rows.shape[2])
        return flat[self.queries[batch]].view(tiles, width * group, rows.shape[2])


def steps(block_indices: Tensor, layout: Layout, group: int) -> list[Step]:
    """All queries in steps; block_indices int32 [B, S, Hkv, n], distinct, -1 for none."""
    if block_indices.numel() == 0:
        return []
    tokens = max(MIN_TOKENS_PER_STEP, -(-layout.num_queries // MAX_STEPS))
    firsts = range(0, layout.num_queries, tokens)
    return [_step(block_indices, layout, group, first, min(first + tokens, layout.num_queries)) for first in firsts]


def _step(block_indices: Tensor, layout: Layout, group: int, first: int, last: int) -> Step:
    reach = geometry.num_selection_blocks(layout.num_keys - layout.num_queries + last, layout.config)
    chosen = block_indices[:, first:last, :, :reach]  # more blocks than that none of these queries has
    chosen = chosen.transpose(1, 2).flatten(0, 1).long()  # [kv rows, tokens, n]
    (kv_rows, tokens, n), size, num_keys = chosen.shape, layout.config.l_sel, layout.num_keys
    kv_row = torch.arange(kv_rows, device=chosen.device)[:, None, None]
    number = kv_row * layout.max_blocks + layout.blocks_before[first:last, None] + chosen  # among all kv rows' blocks

    width = max(min(ROWS_PER_TILE // group, tokens), 1)
    numbers = torch.where(chosen < 0, -1, number).flatten()
    tiles = inverted_index.build(numbers, width, kv_rows * layout.max_blocks)
    place = tiles.begin[:, None] + torch.arange(width, device=chosen.device)
    queries = tiles.order[place.clamp(max=chosen.numel() - 1)] // n
    query_tokens = layout.tokens[first:last][queries % tokens].masked_fill_(place >= tiles.end[:, None], -1)

    first_token = layout.block_tokens[0][tiles.block % layout.max_blocks]
    key_tokens = first_token[:, None] + torch.arange(size, device=chosen.device)
    keys = (tiles.block // layout.max_blocks * num_keys)[:, None] + key_tokens.clamp(max=num_keys - 1)
    places = tiles.places(numbers).view(kv_rows * tokens, n)
    return Step(first, last, queries, query_tokens.int(), keys, key_tokens.int(), places)


def batches(count: int, elements_each: int) -> list[slice]:
    """Slices of `count` things such that a temporary of `elements_each` per thing stays small."""
    size = max(BATCH_ELEMENTS // elements_each, 1)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def merge(o: Tensor, m: Tensor, l: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Each query's results over its blocks into one: o [tiles, C·G, D], m and l [tiles, C·G] -> ([R, G, D], [R, G])."""
    of_pairs = (x.view(step.queries.numel(), -1)[step.places].transpose(1, 2) for x in (m, l))  # [R, G, n]
    weights, lse = partial_weights(*of_pairs)
    return sum_over_blocks(o, weights, step), lse


def sum_over_blocks(tiles: Tensor, weights: Tensor | None, step: Step) -> Tensor:
    """[tiles, C·G, D] with weights [R, G, n] -> [R, G, D]: the weighted sum of what each query's blocks gave."""
    (rows, n), group = step.places.shape, tiles.shape[1] // step.queries.shape[1]
    flat, head = tiles.view(-1, tiles.shape[2]), torch.arange(group, device=tiles.device)[:, None]
    out = tiles.new_empty(rows, group, tiles.shape[2])
    for batch in batches(rows, group * n * tiles.shape[2]):
        index = step.places[batch, None] * group + head  # [rows, G, n]
        given = flat[index]
        out[batch] = given.sum(2) if weights is None else (weights[batch, :, None] @ given).squeeze(2)
    return out


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index] += rows, in an order that does not change from run to run."""
    if total.is_cuda:  # index_add_ is atomic there
        total.index_put_((index.flatten(),), rows.flatten(0, 1), accumulate=True)
    else:
        total.index_add_(0, index.flatten(), rows.flatten(0, 1))

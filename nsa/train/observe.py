"""What gates and selection did in one forward pass, computed where it happened and read when it is logged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention import Aux
from nsa.geometry import Layout, num_selection_blocks, num_visible_compressed
from nsa.layer import NativeSparseAttention
from nsa.model import DecoderLM

BRANCHES = ("compressed", "selected", "window")


@dataclass(frozen=True)
class Observed:
    """Of all layers of one forward pass."""

    gate_entropy_nats: tuple[float, ...]
    """Per layer and head: mean over the rows of the entropy of the three shares."""
    gate_max_share: tuple[float, ...]
    """Per layer and head: mean over the rows of the largest share."""
    gate_shares: tuple[float, float, float]
    """Mean share of each branch."""
    selected_keys_mean: float
    """Keys of the selected branch per row."""
    selected_keys_max: int
    """What n blocks hold."""
    at_maximum: float
    """Share of rows with n blocks."""
    at_maximum_expected: float
    """The share that the lengths dictate."""
    keys_read: Mapping[str, int]
    """By branch, counted where they were read, over layers, batch, rows and kv heads."""
    keys_predicted: Mapping[str, int | None]
    """By branch, from the lengths alone; None where these do not determine it."""
    backends: Mapping[str, int]
    """Layers by the backend that ran."""

    def record(self) -> dict[str, object]:
        """For the heartbeat: JSON values, heads reduced to their worst."""
        entropy, share = self.gate_entropy_nats, self.gate_max_share
        return {
            "gate_entropy_mean_nats": sum(entropy) / len(entropy),
            "gate_entropy_min_nats": min(entropy),
            "gate_max_share_mean": sum(share) / len(share),
            "gate_max_share_max": max(share),
            "gate_shares": dict(zip(BRANCHES, self.gate_shares, strict=True)),
            "selected_keys_mean": self.selected_keys_mean,
            "selected_keys_max": self.selected_keys_max,
            "selection_at_maximum": self.at_maximum,
            "selection_at_maximum_expected": self.at_maximum_expected,
            "keys_read": dict(self.keys_read),
            "keys_predicted": dict(self.keys_predicted),
            "backends": dict(self.backends),
        }


class Observation:
    """Watches the attention layers of a model for one forward pass: set, call, `stop`, and `read` later."""

    def __init__(self, lm: DecoderLM, *, compiled: bool = False) -> None:
        self._layers = [m for m in lm.modules() if isinstance(m, NativeSparseAttention)]
        self._watched = torch.compiler.disable(self._watch) if compiled else self._watch
        self._figures: dict[int, Tensor] = {}
        self._backends: dict[int, str] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to watch: a dense model has no gates."""
        return bool(self._layers)

    def start(self) -> None:
        for number, layer in enumerate(self._layers):
            layer.observer = lambda gates, aux, cu, n=number, of=layer: self._watched(n, of, gates, aux, cu)

    def stop(self) -> Tensor:
        """End watching; all figures as one float64 tensor on the device, for `read`."""
        for layer in self._layers:
            layer.observer = None
        return torch.stack([self._figures[n] for n in range(len(self._layers))])

    def read(self, figures: Tensor) -> Observed:
        """`figures` is what `stop` gave, on the host: [layers, 12 + 2·Hq]."""
        layer = self._layers[0]
        heads, rows = layer.num_heads, figures.tolist()
        total = figures.sum(0).tolist()
        sums, many = total[2 * heads :], len(rows)
        per_row = [count / sums[3] for count in sums[:3]]
        predicted = [int(x) if x >= 0 else None for x in sums[9:12]]
        return Observed(
            gate_entropy_nats=tuple(x for row in rows for x in row[:heads]),
            gate_max_share=tuple(x for row in rows for x in row[heads : 2 * heads]),
            gate_shares=(sums[4] / many, sums[5] / many, sums[6] / many),
            selected_keys_mean=per_row[1],
            selected_keys_max=layer.config.n_sel * layer.config.l_sel,
            at_maximum=sums[7] / many,
            at_maximum_expected=sums[8] / many,
            keys_read={branch: round(x) for branch, x in zip(BRANCHES, sums[:3], strict=True)},
            keys_predicted=dict(zip(BRANCHES, predicted, strict=True)),
            backends=Counter(self._backends.values()),
        )

    @torch.no_grad()
    def _watch(
        self, number: int, layer: NativeSparseAttention, gates: Tensor, aux: Aux, cu_seqlens: Tensor | None
    ) -> None:
        self._backends[number] = aux.backend
        self._figures[number] = _figures(layer, gates, aux, cu_seqlens)


def _figures(layer: NativeSparseAttention, gates: Tensor, aux: Aux, cu_seqlens: Tensor | None) -> Tensor:
    """float64 [2·Hq + 12]: entropy and largest share per head, then what `Observation.read` names."""
    shares = gates.float() / gates.float().sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    entropy = torch.special.entr(shares).sum(-1).mean((0, 1))  # [Hq]
    largest = shares.amax(-1).mean((0, 1))  # [Hq]
    n = layer.config.n_sel
    rows = aux.block_indices.shape[:3].numel()
    chosen = (aux.block_indices >= 0).sum(-1)  # [B, S, Hkv]
    num_tokens = gates.shape[1]
    layout = Layout(num_tokens, num_tokens, layer.config, gates.device, cu_seqlens)
    fits = num_selection_blocks(layout.positions + 1, layer.config) >= n
    tail = [
        *(aux.keys_read[branch].double() for branch in BRANCHES),
        gates.new_full((), rows, dtype=torch.float64),
        *shares.mean((0, 1, 2)).double(),
        (chosen == n).double().mean(),
        fits.double().mean(),
        *(x * (rows // num_tokens) for x in _predicted(layout)),
    ]
    return torch.cat([entropy.double(), largest.double(), torch.stack(tail)])


def _predicted(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """float64: keys that one kv head reads in one sequence, by branch, from the positions; negative for unknown."""
    config, t = layout.config, layout.positions
    compressed = num_visible_compressed(t, config).sum(dtype=torch.float64)
    window = (t + 1).clamp(max=config.w).sum(dtype=torch.float64)
    if not config.local_blocks:  # the block that holds t may be left out, and it alone is not full
        return compressed, torch.full_like(window, -math.inf), window
    full_blocks = num_selection_blocks(t + 1, config).clamp(max=config.n_sel) - 1
    selected = full_blocks * config.l_sel + t % config.l_sel + 1
    return compressed, selected.sum(dtype=torch.float64), window

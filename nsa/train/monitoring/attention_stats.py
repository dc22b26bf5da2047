"""What gates and selection did in one forward pass: computed on the device as it runs, read when it is logged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.attention import Aux
from nsa.config import BRANCHES
from nsa.geometry import Layout, num_selection_blocks, num_visible_compressed
from nsa.layer import NativeSparseAttention
from nsa.model import DecoderLM

STATISTICS = (
    "gate_entropy_nats", "gate_max_share", "gate_shares", "rows", "at_maximum", "at_maximum_expected", "keys_read",
    "keys_predicted",
)  # fmt: skip
"""What is computed on the device; `AttentionStats` says what each is, `rows` is over batch, positions and kv heads."""


@dataclass(frozen=True)
class AttentionStats:
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


class AttentionObserver:
    """Watches the attention layers of a model during one forward pass: `start`, the pass, `stop`, and `read` later."""

    def __init__(self, lm: DecoderLM, *, compiled: bool = False) -> None:
        self._layers = [m for m in lm.modules() if isinstance(m, NativeSparseAttention)]
        self._watched = torch.compiler.disable(self._watch) if compiled else self._watch
        self._values: dict[int, dict[str, Tensor]] = {}
        self._backends: dict[int, str] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to watch: a dense model has no gates."""
        return bool(self._layers)

    def start(self) -> None:
        for number, layer in enumerate(self._layers):
            layer.observer = lambda gates, aux, cu, n=number, of=layer: self._watched(n, of, gates, aux, cu)

    def stop(self) -> dict[str, Tensor]:
        """End watching; the statistics of all layers by name, float64 [layers, ...] on the device, for `read`."""
        for layer in self._layers:
            layer.observer = None
        layers = [self._values[n] for n in range(len(self._layers))]
        return {name: torch.stack([values[name] for values in layers]) for name in layers[0]}

    def read(self, values: Mapping[str, Tensor]) -> AttentionStats:
        """`values` has what `stop` gave, on the host."""
        config, num_layers = self._layers[0].config, len(self._layers)
        sums: dict[str, Any] = {name: x.sum(0).tolist() for name, x in values.items() if name in STATISTICS}
        keys_read = dict(zip(BRANCHES, sums["keys_read"], strict=True))
        compressed, selected, window = (share / num_layers for share in sums["gate_shares"])
        predicted = [int(x) if x >= 0 else None for x in sums["keys_predicted"]]
        return AttentionStats(
            gate_entropy_nats=tuple(values["gate_entropy_nats"].flatten().tolist()),
            gate_max_share=tuple(values["gate_max_share"].flatten().tolist()),
            gate_shares=(compressed, selected, window),
            selected_keys_mean=keys_read["selected"] / sums["rows"],
            selected_keys_max=config.n_sel * config.l_sel,
            at_maximum=sums["at_maximum"] / num_layers,
            at_maximum_expected=sums["at_maximum_expected"] / num_layers,
            keys_read={branch: round(x) for branch, x in keys_read.items()},
            keys_predicted=dict(zip(BRANCHES, predicted, strict=True)),
            backends=Counter(self._backends.values()),
        )

    @torch.no_grad()
    def _watch(
        self, number: int, layer: NativeSparseAttention, gates: Tensor, aux: Aux, cu_seqlens: Tensor | None
    ) -> None:
        self._backends[number] = aux.backend
        self._values[number] = _statistics(layer, gates, aux, cu_seqlens)


def _statistics(layer: NativeSparseAttention, gates: Tensor, aux: Aux, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """Of one layer, by the names of STATISTICS, float64: [Hq] of the gates' heads, [3] of the branches, else []."""
    shares = gates.float() / gates.float().sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    entropy = torch.special.entr(shares).sum(-1).mean((0, 1))  # [Hq]
    largest = shares.amax(-1).mean((0, 1))  # [Hq]
    n = layer.config.n_sel
    rows = aux.block_indices.shape[:3].numel()
    chosen = (aux.block_indices >= 0).sum(-1)  # [B, S, Hkv]
    num_tokens = gates.shape[1]
    layout = Layout(num_tokens, num_tokens, layer.config, gates.device, cu_seqlens)
    if aux.positions is not None:
        layout = layout.knowing(positions=aux.positions)
    fits = num_selection_blocks(layout.positions + 1, layer.config) >= n
    values = (
        entropy.double(),
        largest.double(),
        shares.mean((0, 1, 2)).double(),
        gates.new_full((), rows, dtype=torch.float64),
        (chosen == n).double().mean(),
        fits.double().mean(),
        torch.stack([aux.keys_read[branch].double() for branch in BRANCHES]),
        torch.stack([x * (rows // num_tokens) for x in _predicted(layout)]),
    )
    return dict(zip(STATISTICS, values, strict=True))


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

"""The two profiles of the field reports that the soak trains, and what is left of them on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsa import NSAConfig
from nsa.model import BASE_125M, ModelConfig

SHRUNK_TOKENS = 16
"""A CPU trains on lengths so many times shorter."""


@dataclass(frozen=True)
class Profile:
    """A model and the largest batch that it is trained on."""

    model: ModelConfig
    batch_size: int
    seq_len: int

    @property
    def shrunken(self) -> Profile:
        """Of the same proportions, small enough for a CPU: fewer layers, narrower, shorter, smaller blocks."""
        model = replace(
            self.model,
            dim=48,
            n_layers=2,
            n_heads=6,
            n_kv_groups=2,
            d_k=8,
            d_v=8,
            nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=32),
        )
        return replace(self, model=model, seq_len=self.seq_len // SHRUNK_TOKENS)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(batch, tokens) of one round: long, short, long again; one row, more rows; a length that no block divides."""
        b, s = self.batch_size, self.seq_len
        return ((b, s), (b, s // 4), (2 * b, s // 2), (b, s), (1, s - 7), (4 * b, 17), (b, 3 * s // 4))


# 125M on random bytes; the reports name the lengths, batches and layers, and no other width for the 3090
PROFILES = {"3090": Profile(BASE_125M, 1, 1024), "a100": Profile(BASE_125M, 2, 2048)}

"""NSAConfig: the paper's letters, checked once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHIS = ("avg", "linear", "mlp")
BRANCHES = ("compressed", "selected", "window")
"""The branches in the order of their gates (Eq. 5), which everything that holds one thing per branch keeps."""


@dataclass(frozen=True)
class NSAConfig:
    """Hyper-parameters of Native Sparse Attention (arXiv 2502.11089, section 4.1 for the defaults).

    Raises ValueError for a combination that cannot work and TypeError for a wrong type,
    each naming the field, what came and what is wanted.
    """

    l: int = 32
    """Tokens in a compression block."""
    d: int = 16
    """Stride between two compression blocks, in tokens; divides l and l_sel."""
    l_sel: int = 64
    """Tokens in a selection block (l' in the paper); at least l."""
    n_sel: int = 16
    """Blocks selected per token and group (n in the paper), the forced ones included."""
    w: int = 512
    """Tokens in the sliding window, the current one included."""
    phi: str = "avg"
    """How a block is compressed: "avg", "linear" or "mlp" (the paper's)."""
    init_blocks: int = 1
    """First blocks that are always selected."""
    local_blocks: int = 2
    """Blocks always selected that end with the one holding the current token."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "phi":
                if value not in PHIS:
                    raise ValueError(f"phi must be one of {', '.join(PHIS)}; got {value!r}")
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{field.name} must be an int; got {value!r} ({type(value).__name__})")
            least = 0 if field.name in ("init_blocks", "local_blocks") else 1
            if value < least:
                raise ValueError(f"{field.name} must be at least {least}; got {value}")
        if self.l % self.d:
            raise ValueError(f"d must divide l; got d={self.d}, l={self.l}")
        if self.l_sel % self.d:
            raise ValueError(f"d must divide l_sel; got d={self.d}, l_sel={self.l_sel}")
        if self.l > self.l_sel:
            raise ValueError(f"l must be at most l_sel; got l={self.l}, l_sel={self.l_sel}")
        forced = self.init_blocks + self.local_blocks
        if forced > self.n_sel:
            raise ValueError(
                f"n_sel must hold the forced blocks: init_blocks + local_blocks = {forced}, but n_sel={self.n_sel}"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> NSAConfig:
        """Build from a mapping such as the `nsa:` part of a YAML profile; a misspelt key is an error."""
        if not isinstance(mapping, Mapping):
            raise TypeError(f"mapping must be a mapping; got {type(mapping).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in mapping:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
                raise ValueError(f"unknown NSA setting {key!r}{hint}")
        return cls(**mapping)

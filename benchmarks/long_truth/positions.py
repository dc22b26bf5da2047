"""Positions past 2²⁴, which float32 does not tell apart: of rotary embeddings, and of packed documents' bounds."""

from __future__ import annotations

import dataclasses
import math

import torch

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import OracleCheck
from benchmarks.correctness import tolerance
from benchmarks.correctness.long_rows import Document
from nsa import rope

FLOAT32_EXACT = 2**24
"""Integers that float32 holds exactly end here."""
_POSITIONS = (FLOAT32_EXACT - 1, FLOAT32_EXACT + 1, FLOAT32_EXACT + 3, 2 * FLOAT32_EXACT - 1)
_ANGLE_BUDGET = 1e-8
"""An angle of 2²⁵ radians in float64 is off by 4e-9 at most; in float32 by 2."""
_BASE = 10000.0
DOCUMENT_TOKENS = 65537
"""Odd, so that bounds past 2²⁴ are no float32."""


def rotary(device: torch.device, head_dim: int = 128) -> OracleCheck:
    """The greatest error of a cosine or sine at positions around 2²⁴ and 2²⁵, against Python's own."""
    positions = torch.tensor(_POSITIONS, device=device)
    cos, sin = rope.rotation(positions, head_dim, _BASE)
    errors = []
    for row, position in enumerate(_POSITIONS):
        for pair in range(head_dim // 2):
            angle = position * _BASE ** (-pair / (head_dim // 2))
            errors += [abs(cos[row, pair].item() - math.cos(angle)), abs(sin[row, pair].item() - math.sin(angle))]
    return tolerance.check(f"rotary angles at positions up to {_POSITIONS[-1]:,}", max(errors), _ANGLE_BUDGET)


def packed(key: Key, length: int, past: int = FLOAT32_EXACT) -> tuple[Key, list[Document]]:
    """The case over documents of `length` tokens that end past the token `past`; and those that do, to be compared."""
    count = past // length + 2
    documents = (length,) * count
    of_all = dataclasses.replace(key, num_queries=length * count, num_keys=length * count, documents=documents)
    bounds = [(i * length, (i + 1) * length) for i in range(count)]
    return of_all, [(first, last) for first, last in bounds if last > past]

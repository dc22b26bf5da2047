"""What the kernels take on each architecture, as a file. Needs no Triton."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.estimates.sass import Counts
from harness import schema
from nsa.io import atomic_write


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call on one architecture."""

    architecture: int
    group: int
    dk: int
    dv: int
    name: str
    """File and function: "compressed_window._forward"."""
    by_block: bool
    """Whether the selected branch's call went by block; of `selected_kv_major._backward`, whether it gives dq too."""
    counts: Counts
    num_warps: int
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread."""
    shared_bytes: int
    programs_per_sm: int


@dataclass(frozen=True)
class KernelTable:
    """The file of all kernels."""

    triton: str
    """The version that compiled them."""
    kernels: tuple[Kernel, ...]

    def find(self, architecture: int, heads: tuple[int, int, int], name: str, by_block: bool = False) -> Kernel:
        """One of them. Raises KeyError where it was not compiled."""
        for one in self.kernels:
            if (one.architecture, (one.group, one.dk, one.dv), one.name, one.by_block) == (
                architecture, heads, name, by_block,
            ):  # fmt: skip
                return one
        raise KeyError(f"{name} of {heads} on sm{architecture}, by_block={by_block}")


def path(results: Path) -> Path:
    """Where the table stands under a folder of results."""
    return results / "estimates" / "kernels.json"


def write(results: Path, table: KernelTable) -> Path:
    """Replace the table, a kernel per line."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(one)) for one in table.kernels)
    text = f'{{"triton": {json.dumps(table.triton)}, "kernels": [\n{lines}\n]}}\n'
    file = path(results)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, text.encode())
    return file


def read(results: Path) -> KernelTable:
    """The table. Raises FileNotFoundError, and ValueError naming the file and what is wrong with it."""
    file = path(results)
    try:
        return schema.build(KernelTable, json.loads(file.read_text(encoding="utf-8")), "table")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error

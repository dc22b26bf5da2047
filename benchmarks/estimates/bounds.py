"""The least time that one kernel's work takes on a board, resource by resource."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.estimates.kernel_table import Kernel
from benchmarks.estimates.work import Work
from harness import machines, schema
from harness.machines import Board
from nsa.triton_backend import traffic
from nsa.triton_backend.traffic import MemorySystem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("throughput.toml")
LANES = 32


@dataclass(frozen=True)
class Throughput:
    """What a multiprocessor does per clock; sources in throughput.toml."""

    fp32: float
    integer: float
    mufu: float
    shuffle: float
    shared_bytes: float
    issued: float
    """Instructions of a warp."""
    synchronous_share: float
    """Of the tensor cores' peak, what mma.sync reaches."""


@dataclass(frozen=True)
class Target:
    """A board whose times are estimated."""

    board: Board
    architecture: int
    throughput: Throughput
    memory: MemorySystem

    @property
    def clocks_per_ms(self) -> float:
        """Of all multiprocessors together."""
        assert self.board.sm_clock_mhz is not None
        return self.memory.num_sms * self.board.sm_clock_mhz * 1e3


@cache
def throughputs() -> dict[int, Throughput]:
    """By compute capability, as in 86."""
    with TABLE.open("rb") as file:
        table = tomllib.load(file)
    return {int(name): schema.build(Throughput, entry, f"{TABLE.name}: {name}") for name, entry in table.items()}


def target(board_id: str) -> Target:
    """A board of harness/machines.toml. Raises ValueError where the table or its throughput is missing."""
    for family in machines.families().values():
        for board in family.boards:
            if board.id != board_id:
                continue
            architecture = 10 * family.compute_capability[0] + family.compute_capability[1]
            if architecture not in throughputs():
                raise ValueError(f"{board_id}: {TABLE.name} has no entry {architecture}")
            if board.sms is None or board.sm_clock_mhz is None or board.l2_mib is None:
                raise ValueError(f"{board_id} needs sms, sm_clock_mhz and l2_mib in machines.toml to be estimated")
            rate = traffic.REFERENCES[architecture].l2_gb_per_s_per_sm
            memory = MemorySystem(board.sms, board.l2_mib * 2**20, rate, board.memory_tb_per_s)
            return Target(board, architecture, throughputs()[architecture], memory)
    raise ValueError(f"board must be one of harness/machines.toml; got {board_id!r}")


def of_kernel(kernel: Kernel, work: Work, on: Target) -> dict[str, float]:
    """Milliseconds of each resource, if it were the only one."""
    counts, per = kernel.counts, on.throughput
    # passes of the inner loop by one warp each, or of the whole kernel
    passes = work.tensor_flop / counts.tensor_flop if counts.tensor_flop else work.programs * kernel.num_warps
    clocks = passes / on.clocks_per_ms
    asynchronous = counts.tensor_flop - counts.synchronous_flop
    flop = passes * (asynchronous + counts.synchronous_flop / per.synchronous_share)
    return {
        "tensor cores": flop / (on.board.bf16_tflops * 1e9),
        "exponentials": clocks * LANES * counts.mufu / per.mufu,
        "fp32": clocks * LANES * counts.fp32 / per.fp32,
        "integer": clocks * LANES * counts.integer / per.integer,
        "shuffles": clocks * LANES * counts.shuffle / per.shuffle,
        "issue": clocks * counts.issued / per.issued,
        "shared memory": clocks * counts.shared_bytes / per.shared_bytes,
        "L2": work.l2_bytes / (on.memory.num_sms * on.memory.l2_gb_per_s_per_sm * 1e6),
        "device memory": work.dram_bytes / (on.board.memory_tb_per_s * traffic.DRAM_SHARE * 1e9),
    }


def of_bytes(dram_bytes: float, on: Target) -> dict[str, float]:
    """Of a kernel that only moves bytes."""
    return {"device memory": dram_bytes / (on.board.memory_tb_per_s * traffic.DRAM_SHARE * 1e9)}

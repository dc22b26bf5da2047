"""How long the two selected kernels wait for bytes, by GPU: which of them serves a call (`dispatch.py`).

By query (`selected.py`), a program reads the blocks of its query: l' · (Dk + Dv) elements per choice, whatever the
group. They come from L2 as long as it holds the keys and values of one head; beyond that some come from device memory.
By block (`selected_kv_major.py`), queries and partial outputs travel through device memory: G · (Dk + 2 · Dv) elements
per choice, and G · 2 · Dk where dq comes along with dk and dv, which need the queries anyway. Both do the same
products, and both times are proportional to the number of choices: neither stands in the times below.

Choices are taken to be random but for the forced ones, which neighbours share: the worst case of reading by query.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from nsa.triton_backend import tuning
from nsa.triton_backend.tuning import next_power_of_2

DRAM_SHARE = 0.89
"""Of the data sheet's bandwidth: what a copy reaches (H200: 4.27 of 4.8 TB/s, `ceilings` of results/runs/h200)."""
KV_MAJOR_GB_PER_S_PER_SM = 35.0
"""What a multiprocessor makes of queries and partial outputs beside waiting for device memory, which nothing hides.

From the selected forward of 32/8 heads of 128 at 32k on an H200: 12.9 GB in 5.8 ms, of which device memory takes 3.0.
It is faster since (some 3.6 ms), but 12 heads of 128 were still faster by query there at 4.6 (docs/kernels.md) and
were not measured again, so that this figure stands.
"""


SHARED_FORWARD_TFLOP_PER_S_PER_SM = 3.75
SHARED_DQ_TFLOP_PER_S_PER_SM = 8.0
"""By which `max_shared_blocks` finds the limits that were best for 64/4 heads of 128 at 64k on an H200: 44 to 48 blocks
to a tile forward, 62 to 80 in dq. That is more than `hopper/shared_blocks*.py` reach: 3.2 to 3.4 forward (65,536 tiles
of 64 rows, 50.3 blocks each: 15.5 ms; 33.1: 10.6) and 6.4 to 7.6 in dq (32,768 of 128, 90.0: 18.5 ms; 47.3: 11.5),
whose consumers leave out blocks that none of their own queries chose.
"""
H100_L2_BYTES, H100_BY_QUERY = 50 * 2**20, 1.27
"""The L2 of an H100, where the selected branch by query takes so many times as long as on an H200 (64/4 heads of 128 at
64k, forward: 16.5 and 13.0 ms), and with shared blocks as long: more of them are shared there, and on slices of an H200
that have no larger L2.
"""
UNION_SAMPLES = 16
"""Positions at which `expected_union` looks."""
WORTH = 0.9
"""By block must take at most this share of the time by query: it needs an index and scratch memory."""


@dataclass(frozen=True)
class MemorySystem:
    """What one GPU reads through."""

    num_sms: int
    l2_bytes: int
    l2_gb_per_s_per_sm: float
    """GB/s that each multiprocessor gets from L2 when all of them read."""
    dram_tb_per_s: float
    """Data sheet."""


REFERENCES = {
    80: MemorySystem(108, 40 * 2**20, 53.0, 2.039),
    86: MemorySystem(82, 6 * 2**20, 27.0, 0.936),
    89: MemorySystem(128, 72 * 2**20, 40.0, 1.008),
    90: MemorySystem(132, 60 * 2**20, 80.0, 4.8),
    100: MemorySystem(148, 126 * 2**20, 80.0, 8.0),
    120: MemorySystem(170, 96 * 2**20, 38.0, 1.792),
}
"""By compute capability: A100 SXM 80 GB, RTX 3090, RTX 4090, H200, B200 and RTX 5090, where the device does not tell.

Multiprocessors, L2 and device memory are of NVIDIA's data sheets and whitepapers (A100 Tensor Core GPU, GA102, Ada, RTX
Blackwell; of the H200 the L2 that it reports; of the B200 the tuning guide's L2). L2's rate: of the H200 what the
selected forward by query takes (docs/kernels.md: 10.6 TB/s, 79 % of the peak); of the A100 79 % of its whitepaper's
5120 bytes per clock at 1.41 GHz; of the B200 the H200's. No document gives the GeForce cards' rate: 16 bytes per clock
and multiprocessor are assumed.
"""
INTERPRETED_AS = 90


@functools.cache
def memory_system(device: torch.device, capability: int) -> MemorySystem:
    """What kernels of this compute capability read through on the device.

    Where the device is of that capability, its own properties; else the reference's (the H200's in the interpreter).
    """
    reference = REFERENCES.get(capability or INTERPRETED_AS, REFERENCES[tuning.ANYWHERE])
    if device.type != "cuda":
        return reference
    seen = torch.cuda.get_device_properties(device)
    if 10 * seen.major + seen.minor != capability:
        return reference
    return replace(
        reference,
        num_sms=seen.multi_processor_count,
        l2_bytes=seen.L2_cache_size or reference.l2_bytes,
        dram_tb_per_s=_dram_tb_per_s(seen) or reference.dram_tb_per_s,
    )


def _dram_tb_per_s(properties: object) -> float:
    """Of a device's properties: two transfers per clock over its bus; 0 where PyTorch or the driver does not tell."""
    clock_khz, bus_bits = (getattr(properties, name, 0) or 0 for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e12


@dataclass(frozen=True)
class SelectedCall:
    """What a call of the selected branch looks like to the memory."""

    group: int
    """Query heads per kv head."""
    dk: int
    dv: int
    element_bytes: int
    block_size: int
    """Tokens of a block, l'."""
    num_queries: int
    """S of one sequence, the last of the keys."""
    num_keys: int
    """T of one sequence."""
    forced_share: float
    """Of the n blocks of a choice, those that neighbours share because they are forced."""


def missed_share(call: SelectedCall, l2_bytes: int) -> float:
    """Of the blocks that are read by query, what L2 does not hold, on average over the queries.

    A query at position t chooses among t tokens, of which L2 holds the `held` read last: 1 - held / t are missed.
    """
    held = l2_bytes / ((call.dk + call.dv) * call.element_bytes)
    first = call.num_keys - call.num_queries
    start = max(first, held)
    if start >= call.num_keys:
        return 0.0
    missed = (call.num_keys - start) - held * math.log(call.num_keys / start)
    return missed / call.num_queries * (1 - call.forced_share)


def by_query_ns(call: SelectedCall, memory: MemorySystem) -> float:
    """Per choice of a block, over all the GPU: the longer of L2's time and device memory's. Forward and dq alike."""
    read = call.block_size * (call.dk + call.dv) * call.element_bytes
    from_l2 = read / (memory.num_sms * memory.l2_gb_per_s_per_sm)
    return max(from_l2, read * missed_share(call, memory.l2_bytes) / _dram_gb_per_s(memory))


def by_block_ns(call: SelectedCall, memory: MemorySystem, *, backward: bool) -> float:
    """Per choice of a block, over all the GPU: device memory's time and then the multiprocessors'."""
    # backward the padded group is counted: most of these kernels pad it (`tuning.rows_first`)
    rows = next_power_of_2(call.group) * 2 * call.dk if backward else call.group * (call.dk + 2 * call.dv)
    moved = rows * call.element_bytes
    return moved / _dram_gb_per_s(memory) + moved / (memory.num_sms * KV_MAJOR_GB_PER_S_PER_SM)


def sooner_by_block(call: SelectedCall, memory: MemorySystem, *, backward: bool) -> bool:
    """Whether the loop over blocks of keys is worth its index and scratch memory: forward, or dq backward."""
    return by_block_ns(call, memory, backward=backward) < WORTH * by_query_ns(call, memory)


def max_shared_blocks(call: SelectedCall, memory: MemorySystem, chosen: int, *, backward: bool) -> int:
    """How many blocks a tile of queries that chose `chosen` each may have, so that the products of them all with each
    block, forward or of dq, take no longer than reading each query's own blocks."""
    channels = call.dv + (2 * call.dk if backward else call.dk)
    flop = 2 * tuning.padded(call.group) * call.block_size * channels  # of a query and a block
    tflop_per_s = SHARED_DQ_TFLOP_PER_S_PER_SM if backward else SHARED_FORWARD_TFLOP_PER_S_PER_SM
    query_ns = chosen * by_query_ns(call, memory) * (H100_BY_QUERY if memory.l2_bytes <= H100_L2_BYTES else 1.0)
    return int(query_ns * memory.num_sms * tflop_per_s * 1e3 / flop)


@functools.lru_cache(maxsize=256)
def expected_union(call: SelectedCall, chosen: int, tokens: int) -> float:
    """Of how many blocks `tokens` neighbouring queries choose `chosen` each, on average over the queries."""
    forced = call.forced_share * chosen
    step = call.num_queries / UNION_SAMPLES
    sizes = []
    for sample in range(UNION_SAMPLES):
        seen = (call.num_keys - call.num_queries + (sample + 0.5) * step) / call.block_size
        others = max(seen - forced, chosen - forced, 1.0)
        sizes.append(min(seen, forced + others * (1 - (1 - (chosen - forced) / others) ** tokens)))
    return sum(sizes) / UNION_SAMPLES


def _dram_gb_per_s(memory: MemorySystem) -> float:
    return memory.dram_tb_per_s * 1e3 * DRAM_SHARE

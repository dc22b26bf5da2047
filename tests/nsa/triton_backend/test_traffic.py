"""Which selected kernel each class of GPU takes at which length, and where the figures of a GPU come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from nsa.triton_backend import traffic
from nsa.triton_backend.traffic import REFERENCES, MemorySystem, SelectedCall

PAPER = SelectedCall(16, 128, 128, 2, 64, 65536, 65536, 3 / 16)
LENGTHS = [2**i for i in range(11, 21)]
GPUS = {
    "A100 SXM 80 GB": REFERENCES[80],
    "A100 40 GB": replace(REFERENCES[80], dram_tb_per_s=1.555),
    "RTX 3090": REFERENCES[86],
    "RTX 4090": REFERENCES[89],
    "H100 SXM": replace(REFERENCES[90], l2_bytes=50 * 2**20, dram_tb_per_s=3.35),
    "H200": REFERENCES[90],
    "B200": REFERENCES[100],
    "RTX 5090": REFERENCES[120],
}
BY_BLOCK_FROM = {
    "A100 SXM 80 GB": (None, 2**19),
    "A100 40 GB": (2**20, 2**19),
    "RTX 3090": (2**17, 2**11),
    "RTX 4090": (None, 2**20),
    "H100 SXM": (None, 2**20),
    "H200": (None, None),
    "B200": (None, None),
    "RTX 5090": (None, 2**20),
}
"""The first of LENGTHS at which 16 heads per group of 128 channels go by block: forward, dq."""


def by_block(call: SelectedCall, memory: MemorySystem, backward: bool) -> list[int]:
    """The lengths at which a call goes by block."""
    at = {length: replace(call, num_queries=length, num_keys=length) for length in LENGTHS}
    return [n for n, sized in at.items() if traffic.sooner_by_block(sized, memory, backward=backward)]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("backward", [False, True])
def test_wide_groups_go_by_block_where_l2_is_too_small(gpu: str, backward: bool) -> None:
    """From one length on, which is the later the more L2 holds."""
    first = BY_BLOCK_FROM[gpu][backward]
    assert by_block(PAPER, GPUS[gpu], backward) == [n for n in LENGTHS if first is not None and n >= first]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("backward", [False, True])
def test_small_groups_go_by_block_everywhere(gpu: str, backward: bool) -> None:
    assert by_block(replace(PAPER, group=4), GPUS[gpu], backward) == LENGTHS


@pytest.mark.parametrize(
    ("group", "dk", "dv", "wanted"),
    [(16, 128, 128, False), (16, 192, 128, False), (9, 128, 128, False), (8, 128, 128, True), (6, 64, 64, True),
     (4, 128, 128, True), (8, 192, 128, True)],
)  # fmt: skip
@pytest.mark.parametrize("backward", [False, True])
def test_the_h200_keeps_what_was_measured(group: int, dk: int, dv: int, wanted: bool, backward: bool) -> None:
    """Groups of up to 8 by block and others by query, at the lengths of the records (2k to 128k)."""
    call = replace(PAPER, group=group, dk=dk, dv=dv)
    measured = [n for n in by_block(call, REFERENCES[90], backward) if n <= 2**17]
    assert measured == (LENGTHS[:7] if wanted else [])


@pytest.mark.parametrize(("group", "channels"), [(5, 128), (6, 64)])
def test_a_group_that_is_not_padded_goes_by_block_on_an_h100(group: int, channels: int) -> None:
    """Forward at the lengths of the records; by query took half as long again and more at 8k."""
    call = replace(PAPER, group=group, dk=channels, dv=channels)
    assert by_block(call, GPUS["H100 SXM"], backward=False)[:7] == LENGTHS[:7]


def test_the_model_gives_the_measured_times_of_the_h200() -> None:
    """part-selected of results/runs/h200 (commit c8f3ca1): by query 13.6 ms at 64k, by block 5.8 with 32/8 at 32k."""
    queries, blocks = 4 * 65536 * 16, 8 * 32768 * 16
    llama = replace(PAPER, group=4, num_queries=32768, num_keys=32768)
    assert queries * traffic.by_query_ns(PAPER, REFERENCES[90]) / 1e6 == pytest.approx(13.6, rel=0.05)
    assert blocks * traffic.by_block_ns(llama, REFERENCES[90], backward=False) / 1e6 == pytest.approx(5.8, rel=0.05)


def test_what_is_missed_agrees_with_a_cache_that_holds_the_newest_tokens() -> None:
    """Counted query by query: of t tokens that a random choice may take, the held ones are hits."""
    call = replace(PAPER, num_queries=3000, num_keys=4000, forced_share=0.25)
    held = 1500
    counted = sum(max(1 - held / t, 0) for t in range(1000, 4000)) / 3000 * 0.75
    assert traffic.missed_share(call, held * 256 * 2) == pytest.approx(counted, rel=1e-2)
    assert traffic.missed_share(call, 4000 * 256 * 2) == 0.0
    assert traffic.missed_share(replace(call, forced_share=1.0), 0) == 0.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A slice of an A100 40 GB, whose figures no reference has."""
    seen = SimpleNamespace(
        major=8, minor=0, multi_processor_count=42, L2_cache_size=20 * 2**20,
        memory_clock_rate=1215000, memory_bus_width=5120,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    traffic.memory_system.cache_clear()
    yield seen
    traffic.memory_system.cache_clear()


def test_a_gpus_own_figures_come_before_the_reference(gpu: SimpleNamespace) -> None:
    found = traffic.memory_system(torch.device("cuda", 5), 80)
    assert (found.num_sms, found.l2_bytes) == (42, 20 * 2**20)
    assert found.dram_tb_per_s == pytest.approx(1.555, rel=1e-3)
    assert found.l2_gb_per_s_per_sm == REFERENCES[80].l2_gb_per_s_per_sm


def test_where_the_device_does_not_tell_the_reference_does(gpu: SimpleNamespace) -> None:
    gpu.L2_cache_size = 0
    del gpu.memory_clock_rate
    found = traffic.memory_system(torch.device("cuda", 5), 80)
    assert found == replace(REFERENCES[80], num_sms=42)


def test_kernels_of_another_architecture_are_chosen_by_its_reference(gpu: SimpleNamespace) -> None:
    assert traffic.memory_system(torch.device("cuda", 5), 86) == REFERENCES[86]
    assert traffic.memory_system(torch.device("cpu"), 89) == REFERENCES[89]
    assert traffic.memory_system(torch.device("cpu"), 0) == REFERENCES[90]
    assert traffic.memory_system(torch.device("cpu"), 103) == REFERENCES[86]


@pytest.mark.parametrize(
    ("dk", "chosen", "backward", "wanted"),
    [(128, 16, False, 46), (192, 16, False, 46), (128, 16, True, 66), (192, 16, True, 62), (128, 32, True, 133)],
)
def test_tiles_share_blocks_up_to_where_an_h200_breaks_even(dk: int, chosen: int, backward: bool, wanted: int) -> None:
    """Measured at 64k: best with at most 44 to 48 (forward) and 62 to 80 (dq) blocks to a tile."""
    assert traffic.max_shared_blocks(replace(PAPER, dk=dk), REFERENCES[90], chosen, backward=backward) == wanted


def test_more_blocks_are_shared_where_l2_is_slower() -> None:
    slower = replace(REFERENCES[90], l2_gb_per_s_per_sm=40.0)
    assert traffic.max_shared_blocks(PAPER, slower, 16, backward=True) == 133
    assert traffic.max_shared_blocks(PAPER, GPUS["H100 SXM"], 16, backward=False) == 59


@pytest.mark.parametrize(
    ("length", "of_4", "of_8"), [(8192, 35.4, 48.8), (16384, 42.4, 66.3), (32768, 47.2, 80.1), (65536, 50.3, 90.0)]
)
def test_unions_of_random_choices_are_as_large_as_measured(length: int, of_4: float, of_8: float) -> None:
    """Of the random inputs of the benches, 64/4 heads."""
    call = replace(PAPER, num_queries=length, num_keys=length)
    assert traffic.expected_union(call, 16, 4) == pytest.approx(of_4, rel=0.02)
    assert traffic.expected_union(call, 16, 8) == pytest.approx(of_8, rel=0.02)


def test_unions_of_few_tokens_and_of_forced_blocks() -> None:
    """A union holds no more blocks than there are, and forced ones once."""
    first = replace(PAPER, num_queries=64, num_keys=64)
    assert 0 < traffic.expected_union(first, 16, 4) <= 1
    assert traffic.expected_union(replace(PAPER, forced_share=1.0), 16, 4) == 16
    assert traffic.expected_union(PAPER, 16, 1) == pytest.approx(16, rel=0.02)

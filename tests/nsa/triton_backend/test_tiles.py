"""Tiles are cut by head size and architecture: whatever the table says, the numbers are the same."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import nsa
from nsa.parallel.plan import GRID

pytest.importorskip("triton")

from nsa.triton_backend import architecture, tuning
from nsa.triton_backend.architecture import SHARED_MEMORY_KIB
from nsa.triton_backend.tuning import LaunchConfig, Table
from nsa.tuner import candidates

CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=32, n_sel=3, w=21)

OF_EVERY_TABLE = frozenset(tuning.shipped_table(80).narrow)
"""Kernels that are not for one architecture alone."""


@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (64, 64)])
def test_tiles_smaller_and_larger_than_a_block_agree_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, rows: int, keys: int
) -> None:
    cut = Table("", dict.fromkeys(tuning.table(86).narrow, LaunchConfig(rows, keys, 4, 1)), {})
    monkeypatch.setattr(tuning, "table", lambda _: cut)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 130, heads, 16, generator=generator).to(device).requires_grad_() for heads in (4, 2, 2))
    gates = torch.rand(1, 130, 4, 3, generator=generator).to(device)
    found, wanted = (
        (o := nsa.nsa_attention(q, k, v, gates, CONFIG, backend=backend), *torch.autograd.grad(o.sum(), (q, k, v)))
        for backend in ("triton", "reference")
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_rows_that_are_too_wide_for_three_loops_take_one(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    wide = tuning.fit("compressed_window_backward_q", 86, 64, 192, 128, torch.bfloat16)
    assert (wide.stretches, tuning.fit("compressed_window_backward_q", 90, 64, 192, 128, torch.bfloat16).stretches) == (
        1,
        3,
    )
    monkeypatch.setattr(architecture, "shared_kib", lambda _: 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 50, heads, 16, generator=generator).to(device).requires_grad_() for heads in (4, 2, 2))
    one, other = (
        torch.autograd.grad(nsa.window_attention(q, k, v, CONFIG, backend=backend)[0].sin().sum(), (q, k, v))
        for backend in ("triton", "reference")
    )
    assert tuning.shape("compressed_window_backward_q", q, v).stretches == 1
    for found, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_padded_group_has_a_launch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of groups padded to 4 heads: others keep the tile of their width."""
    own, shipped = LaunchConfig(128, 64, 4, 1), tuning.table(90)
    cut = replace(shipped, narrow={**shipped.narrow, "selected_backward_kv/4": own})
    monkeypatch.setattr(tuning, "table", lambda _: cut)
    for group in (1, 2, 3, 4, 5, 8, 16):
        shape = tuning.fit("selected_backward_kv", 90, group, 128, 128, torch.bfloat16)
        assert shape.rows == (own if group in (3, 4) else shipped.narrow["selected_backward_kv"]).rows
    slim = tuning.fit("selected_backward_kv", 90, 4, 64, 64, torch.bfloat16)
    assert slim.rows == shipped.slim["selected_backward_kv"].rows


@pytest.mark.parametrize(
    ("capability", "rows", "num_warps", "dtype", "wanted"),
    [
        (90, 64, 4, torch.bfloat16, True),
        (90, 32, 4, torch.bfloat16, False),
        (90, 64, 8, torch.float16, False),
        (90, 128, 8, torch.float16, True),
        (90, 64, 4, torch.float32, False),
        (86, 64, 4, torch.bfloat16, False),
        (0, 16, 1, torch.float32, True),
    ],
)
def test_rows_come_first_where_each_warp_has_some_and_products_are_of_warpgroups(
    capability: int, rows: int, num_warps: int, dtype: torch.dtype, wanted: bool
) -> None:
    assert tuning.rows_first(capability, rows, num_warps, dtype) is wanted


@pytest.mark.parametrize(
    ("group", "channels", "wanted"), [(16, 64, True), (64, 64, True), (128, 64, False), (128, 256, False)]
)
def test_rows_come_first_only_in_tiles_of_the_table(group: int, channels: int, wanted: bool) -> None:
    """Those made for larger groups were not measured; 128 heads of 256 would need 288 KiB of shared memory."""
    shape = tuning.fit("selected_backward_kv", 90, group, channels, channels, torch.bfloat16)
    assert shape.rows_first is wanted


@pytest.mark.parametrize("kernel", sorted(OF_EVERY_TABLE & tuning.CUT_GROUPS))
def test_pieces_of_a_sequence_begin_where_tiles_do(kernel: str) -> None:
    """Whatever the architecture, the heads and the type, and whatever `nsa.tune` may choose."""
    for capability, group, channels, dtype in itertools.product(
        SHARED_MEMORY_KIB, (*range(1, 33), 64, 128), (64, 128, 192, 256), (torch.bfloat16, torch.float32)
    ):
        shape = tuning.fit(kernel, capability, group, channels, channels, dtype)
        assert GRID["triton"] * shape.group % shape.rows == 0
    assert GRID["triton"] % candidates.MAX_ROWS == 0


@pytest.mark.parametrize("kernel", sorted(tuning.CUT_GROUPS - OF_EVERY_TABLE))
@pytest.mark.parametrize("dk", [128, 192])
def test_pieces_begin_where_tiles_of_hopper_do(kernel: str, dk: int) -> None:
    for group in range(1, 65):
        shape = tuning.fit(kernel, 90, group, dk, 128, torch.bfloat16)
        assert shape.group == group
        assert GRID["triton"] * group % shape.rows == 0


def test_slim_rows_have_launches_of_their_own() -> None:
    """12/2 heads of 64 in bfloat16 are half as wide as the table's usual rows; in float32 they are as wide."""
    assert tuning.width(64, 64, torch.bfloat16) == ("slim", 1)
    assert tuning.width(64, 64, torch.float32) == tuning.width(128, 128, torch.bfloat16) == ("narrow", 1)
    slim = tuning.table(90).slim["compressed_window_backward_kv"]
    shape = tuning.fit("compressed_window_backward_kv", 90, 6, 64, 64, torch.bfloat16)
    assert (shape.keys, shape.num_warps, shape.num_stages) == (slim.keys, slim.num_warps, slim.num_stages)
    assert slim != tuning.table(90).narrow["compressed_window_backward_kv"]


@pytest.mark.parametrize("kernel", sorted(OF_EVERY_TABLE & (tuning.BY_ROW_OR_BY_KEY | tuning.CUT_GROUPS)))
@pytest.mark.parametrize("channels", [64, 128])
def test_float32_takes_half_the_rows_and_keys_of_16_bit_types(kernel: str, channels: int) -> None:
    """Whose rows have as many bytes: with as large tiles kernels would spill some KiB per thread."""
    launch = tuning.shipped_table(90).narrow[kernel]
    excess = 2 * channels // 64
    shape = tuning.fit(kernel, 90, 4, channels, channels, torch.float32)
    assert shape.rows == max(launch.rows // excess, tuning.MIN_DOT)
    assert shape.keys == max(launch.keys // excess, tuning.MIN_DOT)
    assert tuning.fit(kernel, 0, 4, 64, 64, torch.float32).keys == tuning.shipped_table(0).narrow[kernel].keys

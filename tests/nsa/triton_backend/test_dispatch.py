"""Which kernel serves which call."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import nsa
from nsa.geometry import Layout
from nsa.triton_backend import architecture, compressed_window, dispatch, hopper, scores, selected_kv_major, tuning
from nsa.triton_backend.dispatch import TABLE, Call, SelectionBlocks, Variant, hopper_serves, variant
from tests.nsa.triton_backend import masking


@pytest.mark.parametrize("computation", TABLE)
def test_the_last_kernel_of_a_computation_serves_every_call(computation: str) -> None:
    q, k = torch.zeros(1, 3, 34, 20), torch.zeros(1, 5, 2, 20)
    *_, last = TABLE[computation]
    assert last.serves(Call(computation, q, k, k, SelectionBlocks(17)))
    assert all(rule.why for rule in TABLE[computation])


@pytest.mark.parametrize(
    ("queries", "heads", "block_size", "forward", "backward"),
    [
        (2048, 8, 64, Variant.KV_MAJOR, Variant.KV_MAJOR),
        (2047, 8, 64, Variant.PLAIN, Variant.KV_MAJOR),
        (2048, 16, 64, Variant.PLAIN, Variant.PLAIN),
        (2048, 8, 512, Variant.PLAIN, Variant.PLAIN),
    ],
)
def test_many_queries_in_small_groups_take_the_kv_stationary_kernel(
    queries: int, heads: int, block_size: int, forward: Variant, backward: Variant
) -> None:
    q, k = torch.zeros(1, queries, heads, 16), torch.zeros(1, queries, 1, 16)
    assert variant("selected_forward", q, k, k, SelectionBlocks(block_size, packed=True)) is forward
    assert variant("selected_backward_q", q, k, k, SelectionBlocks(block_size, packed=True)) is backward


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "blocks", "masked"),
    [
        (1024, 4096, 8, SelectionBlocks(64, count=64), True),
        (1023, 4096, 8, SelectionBlocks(64, count=64), False),
        (1024, 4097, 8, SelectionBlocks(64, count=64), False),
        (1024, 4096, 17, SelectionBlocks(64, count=64), False),
        (1024, 4096, 8, SelectionBlocks(32, count=65), False),
        (1024, 4096, 8, SelectionBlocks(48, count=64), False),
        (1024, 4096, 8, SelectionBlocks(64, count=64, packed=True), False),
        (1024, 4096, 8, SelectionBlocks(64, count=64, sequence_tokens=8192), False),
        (64, 64, 8, SelectionBlocks(64, count=32, sequence_tokens=2048), True),
    ],
)
def test_short_sequences_in_small_groups_are_masked(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, heads: int, blocks: SelectionBlocks, masked: bool
) -> None:
    masking.serve(monkeypatch, 1024)
    q, k = torch.zeros(1, queries, heads, 16), torch.zeros(1, keys, 1, 16)
    for part in ("forward", "backward_q", "backward_kv"):
        assert (variant(f"selected_{part}", q, k, k, blocks) is Variant.MASKED) is masked


def test_wide_groups_take_it_where_l2_holds_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """64/4 heads of 128 at 128k: 67 MB a head, of which an RTX 3090's L2 holds 6 and an RTX 4090's 72."""
    q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 2**17, 64, 128)
    k = q[:, :, :4]
    for capability, wanted in ((86, Variant.KV_MAJOR), (89, Variant.PLAIN)):
        monkeypatch.setattr(architecture, "of_gpu", lambda _, it=capability: it)
        for computation in ("selected_forward", "selected_backward_q"):
            assert variant(computation, q, k, k, SelectionBlocks(64, forced_share=3 / 16)) is wanted
    monkeypatch.setattr(architecture, "of_gpu", lambda _: 86)
    all_forced = SelectionBlocks(64, forced_share=1.0)  # which neighbours share
    assert variant("selected_forward", q, k, k, all_forced) is Variant.PLAIN


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "FORCED", None)
    monkeypatch.setattr(architecture, "of_gpu", lambda _: 90)
    monkeypatch.setattr(hopper, "AVAILABLE", True)
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)


def of_blocks(computation: str, *, group: int, queries: int = 3000, dk: int = 128, **blocks: Any) -> Variant:
    """The kernel for heads in two groups, of which each query chose 16 of 47 blocks of 64 tokens unless said."""
    q = torch.zeros(1, queries, 2 * group, dk, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, queries, 2, d, dtype=torch.bfloat16) for d in (dk, min(dk, 128)))
    return variant(computation, q, k, v, SelectionBlocks(**{"size": 64, "count": 47, "chosen": 16, **blocks}))


@pytest.mark.usefixtures("as_on_hopper")
class TestWhatIsServed:
    keys = torch.zeros(2, 30, 4, 128, dtype=torch.bfloat16)

    def test_keys_of_their_type_and_size(self) -> None:
        for x in (self.keys, self.keys.half(), self.keys[:, 1::2], self.keys[:1], self.keys[:, :, 1:2]):
            assert hopper_serves("compressed_window_forward", 16, x, x)

    @pytest.mark.parametrize(
        "x",
        [
            pytest.param(keys.float(), id="float32"),
            pytest.param(keys[..., :64], id="64 channels"),
            pytest.param(torch.zeros(2, 30, 4, 136, dtype=torch.bfloat16)[..., 1:129], id="address"),
            pytest.param(torch.zeros(2, 30, 4, 129, dtype=torch.bfloat16)[..., :128], id="steps"),
            pytest.param(torch.zeros(2, 30, 4, 256, dtype=torch.bfloat16)[..., ::2], id="channels apart"),
            pytest.param(keys[:, :1].expand(2, 30, 4, 128), id="one key many times"),
            pytest.param(keys[:, :0], id="no key"),
        ],
    )
    def test_other_keys_are_not(self, x: torch.Tensor) -> None:
        assert not hopper_serves("compressed_window_forward", 16, self.keys, x)

    def test_keys_of_192_are_where_the_table_has_launches_for_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = torch.zeros(2, 30, 4, 192, dtype=torch.bfloat16)
        assert hopper_serves("compressed_window_forward", 16, keys, self.keys)
        assert hopper_serves("scores", 16, keys, keys)
        assert not hopper_serves("compressed_window_forward", 16, keys, keys)
        table = tuning.table(90)
        wide = {name: launch for name, launch in table.wide.items() if name != "hopper.compressed_window_backward_q"}
        monkeypatch.setattr(tuning, "table", lambda _: replace(table, wide=wide))
        assert hopper_serves("compressed_window_forward", 16, keys, self.keys)
        assert not hopper_serves("compressed_window_backward_q", 16, keys, self.keys)

    def test_a_choice_without_lse_looks_for_it_with_values_that_are_served(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[bool] = []

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> None:
            asked.append(hopper_serves("compressed_window_forward", 16, k, v))
            raise InterruptedError

        monkeypatch.setattr(scores.compressed_window, "forward", forward)
        monkeypatch.setattr(scores, "finite_keys", lambda *_: None)
        for dk in (128, 192):
            q, k_cmp = (torch.zeros(1, 40, heads, dk, dtype=torch.bfloat16) for heads in (32, 2))
            layout = SimpleNamespace(compressed_interval=(None, None))
            with pytest.raises(InterruptedError):
                scores.select_blocks(q, k_cmp, layout, 1.0)  # type: ignore[arg-type]
        assert asked == [True, True]

    def test_neither_are_groups_that_fill_no_tile_and_other_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert hopper_serves("compressed_window_forward", 64, self.keys, self.keys)
        assert not hopper_serves("compressed_window_forward", 65, self.keys, self.keys)
        assert not hopper_serves("selected_forward", 17, self.keys, self.keys)
        monkeypatch.setattr(architecture, "of_gpu", lambda _: 80)
        assert not hopper_serves("compressed_window_forward", 16, self.keys, self.keys)

    @pytest.mark.parametrize(
        ("group", "dk", "keys"), [(16, 128, 4096), (16, 128, 255), (8, 128, 255), (16, 192, 255), (6, 64, 255)]
    )
    def test_dk_and_dv_are_served_of_the_window_and_of_compressed_keys(self, group: int, dk: int, keys: int) -> None:
        q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(4, 8192, 2 * group, dk).contiguous()
        k, v = (torch.zeros(4, 2 * keys, 2, d, dtype=torch.bfloat16) for d in (dk, min(dk, 128)))
        assert variant("compressed_window_backward_kv", q, k, v) is Variant.HOPPER

    def test_neither_are_dk_and_dv_of_calls_by_plan_and_of_queries_that_tma_cannot_read(self) -> None:
        kernel, heads_of_64 = "compressed_window_backward_kv", torch.zeros(1, 2048, 12, 64, dtype=torch.bfloat16)
        assert variant(kernel, heads_of_64, heads_of_64[:, :, :2], heads_of_64[:, :, :2]) is Variant.PLAIN
        assert variant(kernel, self.keys, self.keys, self.keys) is Variant.HOPPER
        odd = torch.zeros(2, 30, 4, 129, dtype=torch.bfloat16)[..., 1:]
        assert variant(kernel, odd, self.keys, self.keys) is Variant.PLAIN

    @pytest.mark.parametrize(
        ("changes", "served"),
        [
            ({}, True),
            ({"group": 32}, True),
            ({"group": 33}, False),
            ({"dk": 192, "group": 12}, True),
            ({"size": 128}, False),
            ({"packed": True}, True),
            ({"dk": 64, "group": 6, "queries": 4096}, False),
            ({"dk": 64, "group": 6, "queries": 4096, "sequence_tokens": 8192}, False),
            ({"dk": 64, "group": 6, "queries": 4096, "sequence_tokens": 32768}, True),
            ({"dk": 64, "group": 6, "queries": 32768, "count": 32768 // 64}, True),
        ],
        ids=str,
    )
    def test_dk_and_dv_of_blocks_of_64_keys_are_those_of_a_part_as_of_the_whole(
        self, changes: dict[str, Any], served: bool
    ) -> None:
        found = of_blocks("selected_backward_kv", **{"group": 16, **changes})
        assert (found is Variant.HOPPER) is served

    @pytest.mark.parametrize("readable", [True, False])
    def test_dk_and_dv_take_a_gradient_that_tma_cannot_read_elsewhere(
        self, monkeypatch: pytest.MonkeyPatch, readable: bool
    ) -> None:
        on_hopper, elsewhere = mock.MagicMock(), mock.MagicMock()
        monkeypatch.setattr(hopper.keys_and_values, "backward", on_hopper)
        monkeypatch.setattr(compressed_window, "_backward_kv", elsewhere)
        size = self.keys.numel()
        do = torch.zeros(size + 8, dtype=torch.bfloat16)[8 if readable else 1 :][:size].view(self.keys.shape)
        bounds, of_rows = torch.zeros(30, dtype=torch.int32), torch.zeros(2, 30, 4)
        compressed_window._parts_of_keys(
            self.keys, self.keys, self.keys, do, bounds, bounds, of_rows, of_rows, bounds, bounds, 1, 1.0, False, None
        )
        assert (on_hopper.called, elsewhere.__getitem__.called) == (readable, not readable)

    @pytest.mark.parametrize("readable", [True, False])
    def test_so_do_those_of_the_selected_branch(self, monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
        on_hopper, elsewhere = mock.MagicMock(), mock.MagicMock()
        monkeypatch.setattr(hopper.selected_keys_and_values, "backward", on_hopper)
        monkeypatch.setattr(selected_kv_major, "_backward", elsewhere)
        tiles = mock.MagicMock(**{"begin.numel.return_value": 1})
        monkeypatch.setattr(selected_kv_major, "sum_dkdv", mock.MagicMock())
        monkeypatch.setattr(selected_kv_major.index, "build", lambda *_, **__: tiles)
        size = self.keys.numel()
        do = torch.zeros(size + 8, dtype=torch.bfloat16)[8 if readable else 1 :][:size].view(self.keys.shape)
        layout, of_rows = Layout(30, 30, nsa.NSAConfig(), do.device), torch.zeros(2, 30, 4)
        chosen, blocks = torch.zeros(2, 30, 4, 1, dtype=torch.int32), SelectionBlocks(64, count=1, chosen=1)
        selected_kv_major.backward(
            self.keys, self.keys, self.keys, do, of_rows, of_rows, chosen, layout, 1.0, None, None, False, blocks
        )
        assert (on_hopper.called, elsewhere.__getitem__.called) == (readable, not readable)

    @pytest.mark.parametrize(
        ("changes", "served"),
        [
            ({}, True),
            ({"packed": True}, True),
            ({"dk": 192, "group": 6}, True),
            ({"size": 128}, False),
            ({"dk": 64, "queries": 32768, "count": 32768 // 64}, False),
        ],
        ids=str,
    )
    def test_partial_outputs_of_blocks_of_64_keys_are_served_but_for_heads_of_64(
        self, changes: dict[str, Any], served: bool
    ) -> None:
        found = of_blocks("selected_kv_major", **{"group": 4, **changes})
        assert found is (Variant.HOPPER if served else Variant.KV_MAJOR)

    @pytest.mark.parametrize("readable", [True, False])
    def test_partial_outputs_of_queries_that_cannot_be_copied_are_made_elsewhere(
        self, monkeypatch: pytest.MonkeyPatch, readable: bool
    ) -> None:
        on_hopper, elsewhere = mock.MagicMock(), mock.MagicMock()
        monkeypatch.setattr(hopper.selected_kv_major, "forward", on_hopper)
        monkeypatch.setattr(selected_kv_major, "_forward", elsewhere)
        monkeypatch.setattr(selected_kv_major, "merge_blocks", mock.MagicMock())
        build = mock.MagicMock()
        monkeypatch.setattr(selected_kv_major.index, "build", build)
        size, layout = self.keys.numel(), Layout(30, 30, nsa.NSAConfig(), self.keys.device)
        q = torch.zeros(size + 8, dtype=torch.bfloat16)[8 if readable else 1 :][:size].view(self.keys.shape)
        chosen, flags = torch.zeros(2, 30, 4, 1, dtype=torch.int32), torch.ones(2, 30, 4, dtype=torch.bool)
        written = torch.empty_like(q), torch.zeros(2, 30, 4), torch.zeros(2, 30, 4)
        blocks = SelectionBlocks(64, count=1, chosen=1)
        selected_kv_major.forward(q, self.keys, self.keys, chosen, layout, 1.0, flags, *written, None, blocks)
        assert (on_hopper.called, elsewhere.__getitem__.called) == (readable, not readable)
        pairs = hopper.selected_kv_major.PAIRS if readable else selected_kv_major.FORWARD_PAIRS
        assert build.call_args.kwargs["size"] == pairs

    def test_the_interpreter_runs_none_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "interpreted", lambda: True)
        assert not hopper_serves("compressed_window_forward", 16, self.keys, self.keys)

    @pytest.mark.parametrize(("l_sel", "served"), [(64, True), (128, True), (96, False), (32, False)])
    def test_blocks_are_whole_tiles(self, l_sel: int, served: bool) -> None:
        q = self.keys.repeat(1, 1, 4, 1)
        found = variant("selected_forward", q, self.keys, self.keys, SelectionBlocks(l_sel))
        assert (found is Variant.HOPPER) == served

    @pytest.mark.parametrize(
        ("changes", "shared"),
        [
            ({}, True),
            ({"queries": 1023}, False),
            ({"queries": 64, "sequence_tokens": 1024}, True),
            ({"group": 9}, True),
            ({"group": 17}, False),
            ({"dk": 192}, True),
            ({"dk": 64}, False),
            ({"size": 128}, False),
            ({"packed": True}, False),
            ({"chosen": 32}, True),
            ({"chosen": 33}, False),
        ],
        ids=str,
    )
    def test_neighbours_share_blocks_that_are_tiles_of_one_document(
        self, changes: dict[str, Any], shared: bool
    ) -> None:
        sizes = {"queries": 1024, "group": 16, "dk": 128, "size": 64, "chosen": 16, **changes}
        queries, group, dk = (sizes.pop(name) for name in ("queries", "group", "dk"))
        q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, queries, 2 * group, dk)
        k, v = (torch.zeros(1, queries, 2, d, dtype=torch.bfloat16) for d in (dk, min(dk, 128)))
        found = variant("selected_forward", q, k, v, SelectionBlocks(**sizes))
        assert (found is Variant.SHARED) is shared

    @pytest.mark.parametrize(
        ("sequence_tokens", "forward", "dq"), [(8192, None, None), (16384, None, 66), (32768, 46, 66), (65536, 46, 66)]
    )
    def test_all_tiles_share_where_random_choices_are_few_blocks(
        self, sequence_tokens: int, forward: int | None, dq: int | None
    ) -> None:
        """A piece of a sequence as the whole, on an H200."""
        q, k = (torch.zeros(1, 64, heads, 128, dtype=torch.bfloat16) for heads in (32, 2))
        blocks = SelectionBlocks(64, 3 / 16, chosen=16, sequence_tokens=sequence_tokens)
        assert dispatch.max_shared_blocks("selected_forward", q, k, k, blocks) == forward
        assert dispatch.max_shared_blocks("selected_backward_q", q, k, k, blocks) == dq

    def test_the_selected_branch_has_sixteen_rows_whatever_the_table_says(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = tuning.table(90)
        more = {"hopper.selected_forward": replace(table.narrow["hopper.selected_forward"], rows=32)}
        monkeypatch.setattr(tuning, "table", lambda _: replace(table, narrow={**table.narrow, **more}))
        for group, served in ((16, True), (17, False)):
            q = self.keys.repeat(1, 1, group, 1)
            found = variant("selected_forward", q, self.keys, self.keys, SelectionBlocks(64))
            assert (found is Variant.HOPPER) == served

    def test_nothing_is_under_a_version_of_triton_that_was_not_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert hopper_serves("scores", 16, self.keys, self.keys)
        monkeypatch.setattr(hopper, "AVAILABLE", False)
        assert not hopper_serves("compressed_window_forward", 16, self.keys, self.keys)

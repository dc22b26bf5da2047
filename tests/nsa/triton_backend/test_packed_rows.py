"""Tiles that hold the heads of a group as they are, where padded ones leave less room.

What could go wrong there: rows behind the last whole group that are taken for heads of the next tile's first token, a
step that is not as long as a tile, a last token that is not the tile's last, and a group that two tiles share.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa
from nsa import NSAConfig
from tests.laws.cases import Case
from tests.laws.parts import Parts
from tests.laws.test_precision import STEADY, values_and_gradients_within_budget

pytest.importorskip("triton")

from nsa.triton_backend import compressed_window, tuning
from tests.nsa.triton_backend import masking

IN_TILE = {
    **{group: (64 // group, group) for group in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16)},
    **{13: (4, 16), 15: (4, 16), 24: (2, 32)},
}
"""By group: (tokens, rows per token) of a tile of 64 rows that cuts no group; padded where it holds no more tokens
without."""
GROUPS = (1, 2, 3, 5, 6, 7, 12, 16)
CONFIG = NSAConfig(l=4, d=2, l_sel=16, n_sel=3, w=13)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 64 rows, also of the selected branch, and several programs for the queries of a tile of keys."""
    launch = tuning.LaunchConfig(64, 16, 4, 1)
    table = tuning.Table("", dict.fromkeys(tuning.table(86).narrow, launch), {})
    monkeypatch.setattr(tuning, "table", lambda _: table)
    masking.serve(monkeypatch)
    monkeypatch.setattr(compressed_window, "MIN_TOKENS_PER_SPLIT", 24)


def test_a_tile_holds_as_many_tokens_as_find_room() -> None:
    v = torch.empty(1, 1, 1, 64)
    shapes = {group: tuning.masked_shape("backward_kv", torch.empty(1, 1, group, 64), v) for group in IN_TILE}
    assert {group: (shape.tokens, shape.group) for group, shape in shapes.items()} == IN_TILE
    assert {shape.rows for shape in shapes.values()} == {64}


@pytest.mark.parametrize("group", IN_TILE)
@pytest.mark.parametrize("kernel", ["forward", "backward_q"])
def test_where_tiles_cut_groups_none_is_padded(kernel: str, group: int) -> None:
    q, v = torch.empty(1, 1, group, 64), torch.empty(1, 1, 1, 64)
    for shape in (tuning.masked_shape(kernel, q, v), tuning.shape(f"compressed_window_{kernel}", q, v)):
        assert shape.group == group
        assert shape.tiles(1000) == -(-1000 * group // 64)


@pytest.mark.parametrize("capability", [90, 86])
@pytest.mark.parametrize(
    ("kernel", "padded_on"),
    [
        ("selected_kv_major", ()),
        ("compressed_window_backward_kv", (86,)),
        ("selected_backward_kv", (86,)),
        ("scores", (86, 90)),
    ],
)
def test_which_other_kernels_pad_a_group(kernel: str, padded_on: tuple[int, ...], capability: int) -> None:
    """Scores, which are summed over a group, and dk and dv where a thread holds many rows."""
    shape = tuning.fit(kernel, capability, 6, 64, 64, torch.bfloat16)
    assert (shape.tokens, shape.group) == ((8, 8) if capability in padded_on else (10, 6))


@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_a_piece_has_the_bits_of_the_whole(device: torch.device, branch: str) -> None:
    """Output and dq of the last 128 queries alone, with the keys that they see: a tile of 64 rows begins where they do.
    In the window its steps over keys begin where the first of its queries sees one."""
    case = Case(config=replace(CONFIG, w=37), group=6, queries=256, keys=256)
    x, parts = case.inputs(device), Parts("triton", device)
    upstream = case.noise(x.q[..., : case.dv])
    bits = []
    for queries in (256, 128):
        q = x.q[:, -queries:].detach().requires_grad_()
        piece = x._replace(q=q, gates=x.gates[:, -queries:])
        o = parts.forward(replace(case, queries=queries), piece, branch)
        (dq,) = torch.autograd.grad(o, q, upstream[:, -queries:])
        bits.append((o[:, -128:], dq[:, -128:]))
    assert all(torch.equal(*both) for both in zip(*bits, strict=True))


@pytest.mark.parametrize("group", GROUPS)
def test_values_and_gradients_stay_within_the_budget(device: torch.device, group: int) -> None:
    """Of 64 tokens in two sequences: no whole number of tiles but where a group is a power of two."""
    case = replace(STEADY, config=CONFIG, group=group, batch=2, num_kv_heads=1, dk=16)
    values_and_gradients_within_budget(Parts("triton", device), case, "all", steady=True)


@pytest.mark.parametrize("group", [3, 6])
def test_so_they_do_in_pieces(device: torch.device, group: int) -> None:
    case = Case(config=CONFIG, group=group, queries=33, keys=71)
    values_and_gradients_within_budget(Parts("triton", device), case, "selected")


@pytest.mark.parametrize("tokens", [1, 9, 10, 11, 20, 21, 22, 32, 33])
def test_the_last_tokens_have_rows(device: torch.device, tokens: int) -> None:
    """A tile has ten tokens, or ten and two thirds: the sequence ends inside one, with one, and a token behind one."""
    case = Case(config=CONFIG, group=6, queries=tokens, keys=tokens, dtype=torch.bfloat16)
    values_and_gradients_within_budget(Parts("triton", device), case, "all")


def run(backend: str, case: Case, device: torch.device, name: str, token: int, head: int) -> list[Tensor]:
    """Output and gradients of a whole call with a NaN in one token of q, k, v or the upstream gradient."""
    x = case.inputs(device)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "gates": x.gates, "do": case.noise(x.q[..., : case.dv])}
    tensors[name][0, token, head % tensors[name].shape[2], 3] = float("nan")
    leaves = [tensors[one].requires_grad_() for one in ("q", "k", "v", "gates")]
    o = nsa.nsa_attention(*leaves, case.config, backend=backend)
    return [o, *torch.autograd.grad(o, leaves, tensors["do"])]


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize(("token", "head"), [(9, 0), (10, 0), (10, 5), (11, 0)])
def test_what_is_not_finite_stays_in_its_token(device: torch.device, name: str, token: int, head: int) -> None:
    """The last whole token of a tile, the first of the next one, which it may share, and the one behind."""
    case = Case(config=replace(CONFIG, n_sel=5), num_kv_heads=1, group=6, queries=33, keys=33)
    (found, *gradients), (wanted, *_) = (
        run(backend, case, device, name, token, head) for backend in ("triton", "reference")
    )
    assert torch.equal(found.isfinite().all(-1), wanted.isfinite().all(-1))
    dq, dk, dv, _ = gradients
    assert dq[:, :token].isfinite().all()
    if name in ("q", "do"):
        assert all(x[:, token + 1 :].isfinite().all() for x in (dq, dk, dv))

"""Long truth in small: what is right passes, and each injected fault is found by the tensor that it is in."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import nsa
from benchmarks.cases.key import Key
from benchmarks.correctness import long_rows
from benchmarks.history import laws
from benchmarks.long_truth import __main__ as program
from benchmarks.long_truth import check, compression, positions, sizes
from benchmarks.long_truth.check import LongTruth
from nsa import Aux, NSAConfig, rope
from nsa.parallel import ContextParallel
from tests.benchmarks.synthetic import key
from tests.nsa.parallel.pool import Pool

CONFIG = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=24)
TOKENS = 400
CASE = key("prefill-forward-backward", length=TOKENS, config=dataclasses.asdict(CONFIG))
PAIRS = 8e4
"""Some rows of each tile."""
CPU = torch.device("cpu")
Attention = Callable[..., tuple[Tensor, Aux]]


def truth(case: Key = CASE, **more: Any) -> LongTruth:
    return check.check(case, CPU, most_pairs=PAIRS, say=lambda text: None, **more)


def wrong(found: LongTruth) -> set[str]:
    return {one.name for one in found.checks if not one.passed}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_right_passes(dtype: str) -> None:
    found = truth(dataclasses.replace(CASE, dtype=dtype, head_dim_v=24))
    assert wrong(found) == set()
    assert TOKENS // 8 < found.rows < TOKENS
    assert found.mass > long_rows.LEAST_MASS
    tensors = {name + kind for name in ("o", "dq", "dgates") for kind in ("", long_rows.FIRST_ROWS)}
    assert {one.name for one in found.checks} == {*tensors, "dk", "dv", "block_indices", "mass missed"}


def test_a_forward_pass_has_no_gradients() -> None:
    found = truth(dataclasses.replace(CASE, mode="prefill-forward"), backward=False)
    assert wrong(found) == set()
    assert {one.name for one in found.checks} == {"o", f"o{long_rows.FIRST_ROWS}", "block_indices", "mass missed"}


class Faulty(torch.autograd.Function):
    """The identity, whose gradient is spoilt."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spoil: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.spoil = spoil
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.spoil(gradients[0]), None


def changed(row: int, factor: float) -> Callable[[Tensor], Tensor]:
    """A function that multiplies one row of the first head."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[0, row, 0] *= factor
        return x

    return change


def wrapping(limit: int) -> Callable[[Tensor], Tensor]:
    """A function that reads or writes rows as offsets that wrap at `limit` elements would."""

    def wrap(x: Tensor) -> Tensor:
        rows = -(-limit // x[0, 0].numel())
        return torch.cat((x[:, :rows], x[:, : x.shape[1] - rows]), 1)

    return wrap


def with_fault(argument: int, spoil: Callable[[Tensor], Tensor], *, gradient: bool) -> Attention:
    """nsa_attention that gets one of q, k, v, gates spoilt, or returns its gradient so."""
    attention = nsa.nsa_attention

    def faulty(*inputs: Tensor | NSAConfig, **more: Any) -> tuple[Tensor, Aux]:
        given: list[Any] = list(inputs)
        given[argument] = Faulty.apply(given[argument], spoil) if gradient else spoil(given[argument])
        found: tuple[Tensor, Aux] = attention(*given, **more)
        return found

    return faulty


LAST = TOKENS - 1
"""Its row is always compared."""
HALF = 16 * TOKENS
"""Elements that q's half has, and that k and v have in all: q wraps in its middle, k and v with this over 2."""
FAULTS = {
    "a wrong row of q": (0, changed(LAST, 1.01), False, {"o", "dq"}),
    "a wrong row of v": (2, changed(5, 1.5), False, {"o"}),
    "a wrong row of dq": (0, changed(LAST, 1.01), True, {"dq"}),
    "a wrong row of dk": (1, changed(200, 1.01), True, {"dk"}),
    "a wrong row of dv": (2, changed(3, 1.01), True, {"dv"}),
    "a wrong row of dgates": (3, changed(LAST, 1.01), True, {"dgates"}),
    "q read past a wrapped offset": (0, wrapping(2 * HALF), False, {"o", "dq"}),
    "k read past a wrapped offset": (1, wrapping(HALF), False, {"o", "dk"}),
    "dq written past a wrapped offset": (0, wrapping(2 * HALF), True, {"dq"}),
    "dk written past a wrapped offset": (1, wrapping(HALF), True, {"dk"}),
    "dv written past a wrapped offset": (2, wrapping(HALF), True, {"dv"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argument, spoil, gradient, seen = FAULTS[name]
    monkeypatch.setattr(nsa, "nsa_attention", with_fault(argument, spoil, gradient=gradient))
    found = wrong(truth())
    assert seen <= found
    if gradient:
        assert found == seen


def test_a_choice_that_misses_mass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is right over blocks that are not the best: only the choice is wrong."""

    def attention(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, config: NSAConfig, **more: Any) -> tuple[Tensor, Aux]:
        k_cmp, v_cmp = (nsa.compress(x, config) for x in (k, v))
        blocks = nsa.select_blocks(-q, k_cmp, config, k.shape[1])
        branches = (
            nsa.compressed_attention(q, k_cmp, v_cmp, config, k.shape[1])[0],
            nsa.selected_attention(q, k, v, blocks, config)[0],
            nsa.window_attention(q, k, v, config)[0],
        )
        return nsa.combine(branches, gates), Aux(blocks, {}, {}, "torch")

    monkeypatch.setattr(nsa, "nsa_attention", attention)
    found = truth()
    assert wrong(found) == {"mass missed", "block_indices"}
    assert found.mass < long_rows.LEAST_MASS


def test_an_illegal_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row's blocks come in another order; attention over them is the same."""
    attention = nsa.nsa_attention

    def swapped(*inputs: Any, **more: Any) -> tuple[Tensor, Aux]:
        o, aux = attention(*inputs, **more)
        blocks = aux.block_indices.clone()
        blocks[0, -1] = blocks[0, -1].flip(-1)
        return o, dataclasses.replace(aux, block_indices=blocks)

    monkeypatch.setattr(nsa, "nsa_attention", swapped)
    assert wrong(truth()) == {"block_indices"}


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [True, False])
def test_what_is_right_passes_on_a_gpu(*, backward: bool) -> None:
    case = dataclasses.replace(
        CASE, dtype="bfloat16", num_queries=8192, num_keys=8192, heads=32, head_dim_k=128, head_dim_v=128,
        config=dataclasses.asdict(NSAConfig()), backend_asked="auto",
    )  # fmt: skip
    found = check.check(case, torch.device("cuda"), backward=backward, say=lambda text: None)
    assert wrong(found) == set()
    assert found.rows == 8192
    assert found.peak_gib is not None


def _shared(mesh: DeviceMesh, fault: bool) -> LongTruth:
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(check, "context_parallel_attention", _last_rank_doubles)
        return truth(context=ContextParallel(mesh))


def _last_rank_doubles(*inputs: Any, mesh: ContextParallel, **more: Any) -> tuple[Tensor, Aux]:
    found: tuple[Tensor, Aux] = nsa.parallel.context_parallel_attention(*inputs, mesh=mesh, **more)
    return found[0] * (1 if mesh.rank == 0 else 2), found[1]


def test_two_ranks_say_the_same(pool: Pool) -> None:
    for found in pool.run(2, _shared, False):
        assert wrong(found) == set()
        assert {"dk", "dv"} <= {one.name for one in found.checks}
    first, second = pool.run(2, _shared, True)
    assert "o" in wrong(first)
    assert wrong(first) == wrong(second)


def _whole_while_attending(mesh: DeviceMesh) -> list[bool]:
    """Whether the whole q and do are still on the device while ranks compute their parts."""
    drawn: list[weakref.ref[Tensor]] = []
    there: list[bool] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def drawing(*arguments: Any) -> Any:
            made = function(*arguments)
            drawn.append(weakref.ref(made if isinstance(made, Tensor) else made.q))
            return made

        return drawing

    def looked(*inputs: Any, **more: Any) -> tuple[Tensor, Aux]:
        there.extend(one() is not None for one in drawn)
        found: tuple[Tensor, Aux] = nsa.parallel.context_parallel_attention(*inputs, **more)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_on_host", Tensor.clone)  # on a CPU they are on the host already
        patch.setattr(check.inputs, "draw", noted(check.inputs.draw))
        patch.setattr(check.long_rows, "output_gradient", noted(check.long_rows.output_gradient))
        patch.setattr(check, "context_parallel_attention", looked)
        assert wrong(truth(context=ContextParallel(mesh))) == set()
    return there


def test_what_there_is_of_each_query_waits_on_the_host(pool: Pool) -> None:
    for there in pool.run(2, _whole_while_attending):
        assert there == [False, False]


def test_tensors_that_cross() -> None:
    """64 heads of 128 at 512k tokens: what has a row per query head has 2^32 elements."""
    case = dataclasses.replace(
        CASE, num_queries=524288, num_keys=524288, heads=64, num_kv_heads=4, head_dim_k=128, head_dim_v=128,
        dtype="bfloat16", config=dataclasses.asdict(NSAConfig()),
    )  # fmt: skip
    assert sizes.elements(case, backward=True)["q"] == 2**32
    assert sizes.crossed(case, backward=True) == ["q", "o", "dq", "do"]
    assert sizes.crossed(case, backward=False) == ["q", "o"]
    half = dataclasses.replace(case, num_queries=262144, num_keys=262144)
    assert sizes.crossed(half, backward=True) == []  # its last element is at 2^31 - 1
    assert "block_indices" in sizes.crossed(case, backward=False, limit=2**24)
    assert sizes.least_gib(case, backward=False) == pytest.approx(2 * 8 + 2 * 0.5 + 0.1875 + 0.0625 + 0.125 + 0.125)


def test_float32_positions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert positions.rotary(CPU).passed
    rotation = rope.rotation
    monkeypatch.setattr(rope, "rotation", lambda at, *more: rotation(at.float().long(), *more))
    assert not positions.rotary(CPU).passed


def test_float32_bounds_of_documents_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that keep their upper bits alone, as float32 does past 2^24: the last documents lose or gain a token."""
    case, compared = positions.packed(CASE, 41, 300)
    assert compared == [(287, 328), (328, 369)]
    assert wrong(truth(case, compared=compared)) == set()
    attention = nsa.nsa_attention

    def rounded(*inputs: Any, cu_seqlens: Tensor, **more: Any) -> tuple[Tensor, Aux]:
        bounds = cu_seqlens // 2 * 2
        bounds[-1] = cu_seqlens[-1]
        found: tuple[Tensor, Aux] = attention(*inputs, cu_seqlens=bounds, **more)
        return found

    monkeypatch.setattr(nsa, "nsa_attention", rounded)
    assert {f"o{long_rows.FIRST_ROWS}", "dk", "dv"} <= wrong(truth(case, compared=compared))


def test_wrong_compressed_keys_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(one.passed for one in compression.check(CPU, torch.bfloat16))
    compress = nsa.compress
    monkeypatch.setattr(nsa, "compress", lambda x, config: compress(x, config).roll(1, dims=1))
    assert not any(one.passed for one in compression.check(CPU, torch.bfloat16))


def _asked(*words: str) -> Any:
    return program.parser().parse_args(["--device", "cpu", "--dtype", "float32", "--pairs", "2e4", *words])


def test_the_summary_is_one_of_laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _asked("--tokens", "300", "--shapes", "2x1x16", "--out", str(tmp_path))
    said: list[str] = []
    summary = program.run(asked, [program.case(asked, "2x1x16", 300)], say=said.append)
    program._write(asked, summary)
    (path,) = (tmp_path / "laws").iterdir()
    assert laws.NAME.fullmatch(path.stem)
    read = laws.decode(path.read_bytes())
    assert (read.counts.passed, read.counts.failed) == (summary["passed"], 0)
    assert read.counts.passed > 15
    assert sum(counts.passed for counts in read.files.values()) == read.counts.passed
    first, second = json.loads(path.read_text())["cases"]
    assert first["checks"].keys() >= {"o, first rows", "dk", "dv", "mass missed"}
    assert "docs-129x18" in second["case"]
    assert any("by torch" in text for text in said)


def test_a_wrong_case_fails_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _asked("--no-positions")
    monkeypatch.setattr(nsa, "nsa_attention", with_fault(1, changed(200, 1.01), gradient=True))
    key = program.case(asked, "2x1x16", 300)
    summary = program.run(asked, [key], say=lambda text: None)
    assert summary["failures"] == ["prefill-forward-backward/2x1x16/b1/s300/float32::dk"]
    monkeypatch.undo()
    red, green = (laws.decode(json.dumps(one).encode()) for one in (summary, program.run(asked, [key], say=print)))
    assert green.shows_passed(summary["failures"][0], red)
    assert not red.shows_passed(summary["failures"][0], red)
    other = program.run(asked, [program.case(asked, "2x1x16", 301)], say=print)
    assert not laws.decode(json.dumps(other).encode()).shows_passed(summary["failures"][0], red)


def test_what_ends_with_an_error_fails_and_what_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([RuntimeError("an illegal\nmemory access"), torch.OutOfMemoryError("CUDA out of memory")])

    def ending(*inputs: Any, **more: Any) -> tuple[Tensor, Aux]:
        raise next(errors)

    monkeypatch.setattr(nsa, "nsa_attention", ending)
    asked = _asked("--no-positions")
    keys = [program.case(asked, "2x1x16", tokens) for tokens in (300, 400)]
    summary = program.run(asked, keys, say=lambda text: None)
    assert summary["failures"] == [f"{keys[0].case}::RuntimeError: an illegal"]
    assert summary["skipped_because"] == {keys[1].case: "OutOfMemoryError: CUDA out of memory"}
    assert summary["passed"] == 0


def test_shapes_by_name() -> None:
    asked = _asked()
    found = program.case(asked, "16x4x192:128", 64)
    assert (found.heads, found.num_kv_heads, found.head_dim_k, found.head_dim_v) == (16, 4, 192, 128)
    for text in ("16x4", "16x3x64"):
        with pytest.raises(ValueError, match="--shapes"):
            program.case(asked, text, 64)


def test_the_command_of_a_summary_names_no_folder_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["long_truth", "--tokens", "64", "--out", "/tmp/here", "--forward"])
    assert program._command(1) == "python -m benchmarks.long_truth --tokens 64 --forward"
    assert program._command(2).startswith("torchrun --nproc_per_node=2 -m benchmarks.long_truth --tokens 64")

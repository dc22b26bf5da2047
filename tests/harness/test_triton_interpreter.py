"""Triton's interpreter does less than it would, and computes the same; triton.language is as before after a launch."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness import triton_interpreter

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import interpreter

INT32_MAX = 2**31 - 1


@triton.jit
def double(x):
    return x + x + tl.zeros_like(x)


@triton.jit
def kernel(to, x, SIZE: tl.constexpr):
    tl.static_assert(SIZE > 1)
    tl.store(to + tl.arange(0, SIZE), double(tl.zeros([SIZE], dtype=tl.int32) + x))


def launched(x: int, size: int = 4) -> torch.Tensor:
    to = torch.full((4,), -1, dtype=torch.int32)
    kernel[(1,)](to, x, size)
    return to


def language() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)]


@triton.jit
def counted(to, bound, SIZE: tl.constexpr):
    count = 0
    for _ in range(tl.load(bound + tl.arange(0, SIZE))):
        count += 1
    for _ in range(tl.load(bound)):
        count += 10
    tl.store(to, count)


@pytest.mark.parametrize("triton_s_own", [None, lambda self: int(self.handle.data)], ids=["here", "of Triton 3.6"])
def test_a_bound_of_a_loop_is_one_number(triton_s_own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if triton_s_own is not None:
        older = SimpleNamespace(
            _patch_lang_tensor=lambda tensor: monkeypatch.setattr(tensor, "__index__", triton_s_own)
        )
        triton_interpreter.take_one_number_as_index(older)
        older._patch_lang_tensor(Bound := type("Bound", (), {"__index__": None}))
        Bound.handle = SimpleNamespace(data=np.array([3]))  # type: ignore[attr-defined]
        assert list(range(Bound())) == [0, 1, 2]  # type: ignore[arg-type]
    to = torch.zeros(1, dtype=torch.int32)
    counted[(1,)](to, torch.tensor([3, 4], dtype=torch.int32), 1)
    assert to.tolist() == [33]
    with pytest.raises(interpreter.InterpreterError, match=r"only (0-dimensional|length-1|size-1) arrays"):
        counted[(1,)](to, torch.tensor([3, 4], dtype=torch.int32), 2)


@pytest.mark.parametrize("size", [4, 1], ids=["a launch", "a launch that fails"])
def test_a_launch_leaves_the_language_as_it_was(size: int) -> None:
    launched(1)  # what an inherited member replaces stands in the class itself from the first launch on
    before = language()
    if size == 4:
        assert launched(3).tolist() == [6] * 4
    else:
        with pytest.raises(interpreter.InterpreterError):
            launched(3, size)
    for now, then in zip(language(), before, strict=True):
        assert {name for name in now if now[name] is not then.get(name)} == set()
    assert launched(5).tolist() == [10] * 4


@triton.jit
def reduced(to, x, SIZE: tl.constexpr):
    rows = tl.load(x + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    tl.store(to + tl.arange(0, SIZE), tl.xor_sum(rows, 0))
    tl.store(to + SIZE + tl.arange(0, SIZE)[:, None], tl.xor_sum(rows, 1, keep_dims=True))
    tl.store(to + 2 * SIZE, tl.xor_sum(rows))
    tl.store(to + 3 * SIZE + tl.arange(0, SIZE), tl.sort(tl.sum(rows, 0)))


def test_a_reduction_by_xor_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(0, 2**30, (8, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    plain, at_once = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    reduced[(1,)](at_once, x, 8)
    assert at_once[24:].tolist() == x.sum(0, dtype=torch.int32).sort().values.tolist()
    tritons_own = inspect.getclosurevars(interpreter.ReduceOps.generic_reduce).nonlocals["plain"]
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", tritons_own)
    reduced[(1,)](plain, x, 8)
    assert at_once.tolist() == plain.tolist()


def test_a_launch_does_not_search_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[object] = []
    monkeypatch.setattr(inspect, "getmembers", lambda owner, *_: searched.append(owner) or [])
    assert launched(3).tolist() == [6] * 4
    assert searched == []


def test_overflow_is_looked_for_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = interpreter.interpreter_builder
    assert launched(INT32_MAX).tolist() == [-2] * 4
    assert not builder.options.sanitize_overflow
    options = interpreter.InterpreterOptions()
    monkeypatch.setattr(builder, "options", dataclasses.replace(options, debug=True))
    triton_interpreter.drop_unread_overflow_checks(interpreter)
    with pytest.raises(interpreter.InterpreterError, match="int32 overflow"):
        launched(INT32_MAX)


def test_each_type_has_its_own_of_numpy() -> None:
    pointer = tl.pointer_type(tl.float16)
    wanted = {
        np.uint64: [tl.block_type(pointer, [4]), pointer, tl.uint64],
        np.uint16: [tl.block_type(tl.bfloat16, [2, 2]), tl.bfloat16],
        np.float16: [tl.float16, tl.block_type(tl.float16, [4])],
        np.bool_: [tl.int1],
    }
    for found, types in wanted.items():
        assert [interpreter._get_np_dtype(dtype) for dtype in types] == [found] * len(types)
    assert interpreter._get_np_dtype.__module__ == triton_interpreter.__name__


def attributes(one: Any) -> list[tuple[str, str]]:
    return sorted((name, repr(value)) for name, value in vars(one).items())


def test_types_and_tensors_that_are_known_are_as_new_ones() -> None:
    def made() -> list[list[tuple[str, str]]]:
        blocks = [tl.block_type(dtype, shape) for dtype, shape in types]
        return [attributes(one) for one in (*blocks, *(tl.tensor(None, dtype) for dtype in (*blocks, tl.int32)))]

    types = [(tl.float32, [4]), (tl.int64, [4]), (tl.int64, [8]), (tl.float32, [2, tl.constexpr(8)])]
    new = made()
    scope = interpreter._patch_lang(kernel.fn)  # as a launch does
    try:
        assert {one.__init__.__module__ for one in (tl.block_type, tl.tensor)} == {triton_interpreter.__name__}
        for _ in range(2):
            assert made() == new
            with pytest.raises(ValueError, match="must be a power of 2"):
                tl.block_type(tl.float32, [3])
    finally:
        scope.restore()


def described(one: Any) -> tuple[Any, ...]:
    numbers = repr(one.handle.data.tolist())  # as text -0.0 is not 0.0
    return one.type.name, one.handle.dtype.name, one.handle.data.dtype, numbers


DTYPES = (
    tl.int1, tl.int32, tl.int64, tl.uint32, tl.float16, tl.bfloat16, tl.float32, tl.pointer_type(tl.float32)
)  # fmt: skip
CAST_TYPES = (*DTYPES, tl.int8, tl.int16, tl.uint8, tl.uint16, tl.uint64, tl.float64)
SHAPES: tuple[list[int], ...] = ([], [4], [8], [1, 4], [4, 1], [4, 4], [1, 1, 4])


def operand(dtype: Any, shape: list[int], numbers: Any) -> Any:
    """The language is a launch's."""
    data = np.resize(numbers, shape or [1]).astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)


def operands() -> list[Any]:
    """Of every type and shape."""
    return [operand(dtype, shape, np.arange(np.prod(shape or [1]))) for dtype in DTYPES for shape in SHAPES]


def outcome(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        made = function(*given, **named)
    except Exception as error:
        return type(error), str(error)
    return [*map(described, made)] if isinstance(made, tuple) else described(made)


@pytest.fixture
def plain() -> Iterator[Any]:
    """Triton's own semantic, in the language of a launch."""
    scope = interpreter._patch_lang(kernel.fn)
    try:
        yield interpreter.TritonSemantic(interpreter.interpreter_builder)
    finally:
        scope.restore()


def test_operands_become_what_triton_makes_of_them(plain: Any) -> None:
    """Every pair of types and shapes, with its error where it has one."""
    found, numbers = operands(), (2, -1, 2**40, 0.5, 0.0, -0.0, 0, 1, 1.0, True, float("nan"))
    pairs = [(a, b) for a in found for b in (*found, *numbers)]
    checked = [semantic.binary_op_type_checking_impl for semantic in (interpreter.interpreter_semantic, plain)]
    differ = [
        (described(a), b)
        for division in (False, True)
        for a, b in pairs * 2  # the second time as something known
        if len({repr(outcome(each, a, b, True, True, div_or_mod=division)) for each in checked}) > 1
    ]
    assert differ == []


def test_casts_are_tritons(plain: Any) -> None:
    """Of numbers below zero too, and of ones that the other type does not hold: NumPy warns, which is no error here."""
    extremes = {tl.float32: [-1.5, float("nan"), -float("inf"), 3e38], tl.float64: [-1.5, 1e300, float("nan"), -0.0]}
    drawn = [operand(dtype, shape, [-3, 2, 0, 1]) for dtype in CAST_TYPES for shape in ([], [4], [4, 1])]
    drawn += [operand(dtype, [4], numbers) for dtype, numbers in extremes.items()]
    for x in drawn:
        for to in CAST_TYPES:
            for rounding in (None, "rtne", ""):
                found = outcome(interpreter.interpreter_semantic.cast, x, to, rounding)
                assert found == outcome(plain.cast, x, to, rounding)


def test_new_axes_are_tritons(plain: Any) -> None:
    for x in operands():
        for axis in (*range(-1, len(x.shape) + 2), tl.constexpr(0)):
            found = outcome(interpreter.interpreter_semantic.expand_dims, x, axis)
            assert found == outcome(plain.expand_dims, x, axis)


def test_a_number_in_a_shape_points_where_it_points(plain: Any) -> None:
    """Pointers of other address spaces have the same name."""
    for space in (1, 3, 1):
        pointer = operand(tl.pointer_type(tl.float32, space), [], [8])
        block, _ = interpreter.interpreter_semantic.broadcast_impl_value(pointer, operand(tl.int32, [4], [0]))
        assert (block.type.scalar.address_space, described(block)[-1]) == (space, "[8, 8, 8, 8]")


def test_constants_are_made_once_and_are_those_of_their_type() -> None:
    wanted = [(0.0, tl.float32), (-0.0, tl.float32), (0, tl.int32), (1, tl.int32), (True, tl.int1), (1.0, tl.float16)]
    plain = interpreter.TritonSemantic(interpreter.interpreter_builder)
    for value, dtype in wanted * 2:
        made = interpreter.interpreter_semantic.scalar_constant(value, dtype)
        assert described(made) == described(plain.scalar_constant(value, dtype))
        with pytest.raises(ValueError, match="read-only"):
            made.handle.data[:] = 7
    with pytest.raises(ValueError, match="dtype must be specified"):
        interpreter.interpreter_semantic.scalar_constant(1, None)


def test_a_handle_whose_numbers_are_wider_than_its_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"64 bits.* exceeds dtype primitive_bitwidth \(32 bits\)"):
        interpreter.TensorHandle(np.zeros(4), tl.float32)
    assert interpreter.TensorHandle(np.zeros(4, np.uint64), tl.pointer_type(tl.float16)).attr == {}
    assert interpreter.TensorHandle(np.zeros(4, np.bool_), tl.int1).dtype is tl.int1

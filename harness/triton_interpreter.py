"""Triton's interpreter on a CPU, made exact enough for the laws and the incidents, and faster."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch

_OF_NUMPY = {"int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp32", "fp64"}
"""Triton's types that NumPy has too, and casts alike."""


def prepare() -> None:
    """All of this module, where Triton is installed. Once in a process, before a kernel is launched."""
    if importlib.util.find_spec("triton") is None:
        return
    compute_in_bfloat16()
    interpreter = importlib.import_module("triton.runtime.interpreter")
    take_one_number_as_index(interpreter)
    if hasattr(interpreter, "_LangPatchScope"):  # since Triton 3.6; an earlier one stays as slow as it is
        drop_unread_overflow_checks(interpreter)
        look_up_types_by_name(interpreter)
        make_handles_directly(interpreter)
        settle_equal_operands_first(interpreter)
        change_the_language_once_a_launch(interpreter)
        reduce_by_xor_at_once(interpreter)


def compute_in_bfloat16() -> None:
    """Teach the interpreter bfloat16 as a GPU has it.

    It keeps the bits as integers, knows no literal, multiplies the integers in a product, and cuts float32 off where a
    GPU rounds to nearest.
    """
    interpreter, tl = (importlib.import_module(f"triton.{name}") for name in ("runtime.interpreter", "language"))
    builder, np = interpreter.InterpreterBuilder, interpreter.np
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(x: Any) -> Any:
        bits = torch.from_numpy(np.array(x, dtype=np.float32)).to(torch.bfloat16).view(torch.int16)
        return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    def get_bf16(self: Any, value: float) -> Any:
        return rounded([value])

    def cast_impl(self: Any, x: Any, dtype: Any) -> Any:
        to_bfloat16 = (x.dtype.scalar, dtype.scalar) == (tl.float32, tl.bfloat16)
        return rounded(x.data) if to_bfloat16 else cast(self, x, dtype)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *more)

    builder.get_bf16, builder.cast_impl, builder.create_dot = get_bf16, cast_impl, create_dot


def take_one_number_as_index(interpreter: Any) -> None:
    """A bound of a loop is an array of one number, which NumPy 2.4 does not take for one. Triton 3.7 does so itself."""
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = with_index


def drop_unread_overflow_checks(interpreter: Any) -> None:
    """Without its `debug` it computes each sum of integers once more in 64 bits, compares, and drops the answer."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def look_up_types_by_name(interpreter: Any) -> None:
    """NumPy's type of each of Triton's is found once; the interpreter makes a table of all of them at each look-up."""
    find, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name  # a pointer's and a block's too
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = get_np_dtype


def make_handles_directly(interpreter: Any) -> None:
    """A handle, which each operation makes, is checked where its numbers are wider than its type, without calls."""

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        bits = vars(dtype).get("primitive_bitwidth")  # None: a pointer, which holds 64 of any type
        if bits is not None and 8 * data.itemsize > bits:
            self.__post_init__()

    interpreter.TensorHandle.__init__ = handle


def settle_equal_operands_first(interpreter: Any) -> None:
    """Two operands of one type and shape, as most are, are neither cast nor broadcast: that is seen at once.

    Which type a pair of types computes in is found once, and each constant is made once, in each shape. Casts between
    types that NumPy has too, new axes and numbers in a shape go without the calls around one call of NumPy. What is
    wrong is left to Triton, whose words it has.
    """
    tl, np = interpreter.tl, interpreter.np
    plain: Any = type(interpreter.interpreter_semantic)
    types: dict[tuple[Any, ...], Any] = {}
    constants: dict[tuple[Any, ...], Any] = {}
    unchanged: set[tuple[Any, ...]] = set()
    filled: dict[tuple[Any, ...], Any] = {}
    computed_in: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[Any, ...], Any] = {}

    def block(scalar: Any, shape: list[int]) -> Any:
        """`tl.block_type`, made once. A pointer's name does not say all of it."""
        if scalar.is_ptr():
            return tl.block_type(scalar, shape)
        key = (scalar.name, *shape)
        if key not in blocks:
            blocks[key] = tl.block_type(scalar, shape)
        return blocks[key]

    def written(value: float) -> Any:
        """A key of a number: 0.0 equals -0.0, which is another, and NaN not even itself."""
        return value if value and value == value else repr(value)

    class Semantic(plain):  # type: ignore[misc]
        def scalar_constant(self, value: Any, dtype: Any) -> Any:
            key = (written(value), type(value), getattr(dtype, "name", None))
            if key not in constants:
                made = super().scalar_constant(value, dtype)
                made.handle.data.flags.writeable = False  # it is in use wherever this number is written
                constants[key] = made.handle
            return self.tensor(constants[key], dtype)

        def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *how: Any, **named: Any) -> tuple[Any, Any]:
            if type(lhs) is not self.tensor:
                return super().binary_op_type_checking_impl(lhs, rhs, *how, **named)
            number = type(rhs) in (int, float, bool)
            if not number and type(rhs) is not self.tensor:
                return super().binary_op_type_checking_impl(lhs, rhs, *how, **named)
            other = (written(rhs), type(rhs)) if number else rhs.type.name
            key = (lhs.type.name, other, how, *named.items())
            if key in unchanged:
                return lhs, rhs
            if key in filled:
                return lhs, self.tensor(*filled[key])
            if key in computed_in:
                left, right = computed_in[key]
                return self.broadcast_impl_value(self.cast(lhs, left), self.cast(rhs, right))
            left, right = super().binary_op_type_checking_impl(lhs, rhs, *how, **named)
            if left is lhs and right is rhs:
                unchanged.add(key)
            elif left is lhs and number:
                right.handle.data.flags.writeable = False  # it is in use wherever this number is written
                filled[key] = right.handle, right.type
            elif not number:
                computed_in[key] = left.type.scalar, right.type.scalar
            return left, right

        def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
            source, to = input.type.scalar, dst_ty.scalar
            if source is to:
                return input
            of_both = source.name in _OF_NUMPY and to.name in _OF_NUMPY and to is not tl.int1 and source.name != to.name
            if fp_downcast_rounding is not None or not of_both:
                return super().cast(input, dst_ty, fp_downcast_rounding)
            cast = self.builder.cast_impl(input.handle, to)
            return self.tensor(cast, block(to, input.type.shape.values) if input.type.is_block() else dst_ty)

        def expand_dims(self, input: Any, axis: int) -> Any:
            if not input.type.is_block() or type(axis) is not int or not 0 <= axis <= len(input.type.shape.values):
                return super().expand_dims(input, axis)
            shape = [*input.type.shape.values[:axis], 1, *input.type.shape.values[axis:]]
            expanded = input.handle.data[(slice(None),) * axis + (None,)]
            handle = interpreter.TensorHandle(expanded, input.handle.dtype.scalar)
            return self.tensor(handle, block(input.type.scalar, shape))

        def computation_type_impl(self, a_ty: Any, a_is_scalar: bool, b_ty: Any, *more: bool) -> Any:
            key = (a_ty.name, a_is_scalar, b_ty.name, *more)
            if key not in types:
                types[key] = super().computation_type_impl(a_ty, a_is_scalar, b_ty, *more)
            return types[key]

        def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
            of_blocks = lhs.type.is_block(), rhs.type.is_block()
            if of_blocks == (True, False):
                return lhs, self._filled(lhs, rhs)
            if of_blocks == (False, True):
                return self._filled(rhs, lhs), rhs
            if of_blocks == (False, False):
                return lhs, rhs
            left, right = lhs.type.shape.values, rhs.type.shape.values
            if left == right:
                return lhs, rhs
            if len(left) != len(right) or any(1 != a != b != 1 for a, b in zip(left, right, strict=True)):
                return super().broadcast_impl_value(lhs, rhs)
            shape = [max(pair) for pair in zip(left, right, strict=True)]
            return self._broadcast(lhs, shape), self._broadcast(rhs, shape)

        def _filled(self, like: Any, number: Any) -> Any:
            shape = like.type.shape.values
            data = np.empty(shape, interpreter._get_np_dtype(number.handle.dtype))
            data[...] = number.handle.data
            return self.tensor(interpreter.TensorHandle(data, number.handle.dtype), block(number.type.scalar, shape))

        def _broadcast(self, x: Any, shape: list[int]) -> Any:
            if x.type.shape.values == shape:
                return x
            return self.tensor(self.builder.create_broadcast(x.handle, shape), block(x.type.scalar, shape))

    interpreter.interpreter_semantic = Semantic(interpreter.interpreter_builder)


def builtin(value: Any, tl: Any, semantic: Any) -> Any:
    """`value`, which the interpreter calls in place of a built-in function, without the two calls around the latter."""
    member: Any = (getattr(value, "__kwdefaults__", None) or {}).get("member")
    if getattr(member, "__code__", None) is not tl.arange.__code__:  # `tl.core.builtin` has not made it
        return value
    function = member.__wrapped__

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    return call


def dtype_equal(tl: Any) -> Any:
    """`tl.dtype.__eq__`, which sees first whether it is the same one."""
    equal = tl.dtype.__eq__

    def same_or_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    return same_or_equal


def block_type_init(tl: Any) -> Any:
    """`tl.block_type.__init__`, which checks each shape and writes each name once."""
    init = tl.block_type.__init__
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            init(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name

    return block_type


def tensor_init(tl: Any) -> Any:
    """`tl.tensor.__init__`, which makes the constants of each shape once."""
    init = tl.tensor.__init__
    known: dict[str, tuple[Any, ...]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[type.name]
        else:
            init(self, handle, type)
            known[type.name] = self.shape, self.numel

    return tensor


def change_the_language_once_a_launch(interpreter: Any) -> None:
    """Its own functions in the place of triton.language's are found once, and set and taken back at each launch.

    The interpreter searches both modules for them at each launch and at each call of a device function, and leaves what
    it set for the latter.
    """
    tl = interpreter.tl
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    changes = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
    scope.restore()
    semantic = interpreter.interpreter_semantic
    changes = [(owner, name, builtin(value, tl, semantic)) for owner, name, value in changes]
    changes += [(tl.block_type, "__init__", block_type_init(tl)), (tl.tensor, "__init__", tensor_init(tl))]
    changes += [(tl.dtype, "__eq__", dtype_equal(tl)), (tl.block_type, "to_ir", lambda self, _: self)]
    launched = False

    class Launch(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            nonlocal launched
            super().restore()
            launched = False

    def patch_lang(function: Any) -> Any:
        nonlocal launched
        scope = Launch()
        if not launched:
            for owner, name, value in changes:
                scope.set_attr(owner, name, value)
            launched = True
        return scope

    interpreter._patch_lang = patch_lang


def reduce_by_xor_at_once(interpreter: Any) -> None:
    """`tl.sort` reduces by xor in each of its steps, which the interpreter does element by element, in Python."""
    plain, xor = interpreter.ReduceOps.generic_reduce, interpreter.tl.standard._xor_combine

    def generic_reduce(self: Any, given: tuple[Any, ...]) -> Any:
        x = given[0]
        if self.combine_fn is not xor or self.axis is None or not x.dtype.scalar.is_int():
            return plain(self, given)
        reduced = interpreter.np.bitwise_xor.reduce(x.handle.data, self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(reduced, x.dtype)]

    interpreter.ReduceOps.generic_reduce = generic_reduce

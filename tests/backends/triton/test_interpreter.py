"""tests/support/pelton_interpreter_ops.py: a value, its type and its shape are those of Triton's own interpreter."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the device")

TYPES = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
SHAPES = ((), (1,), (4,), (2, 1), (1, 4), (2, 4), (1, 1), (8,))
NUMBERS = (0, 1, -3, 300, 2**31, 2**40, 0.0, -0.0, 0.5, 1e-50, float("inf"), float("nan"), True, False)
NOTHING = object()


@pytest.fixture(scope="module")
def ways() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Functions by name: Triton's own, and the quick ones."""
    import pelton_interpreter_ops as ops

    scope = interpreter._LangPatchScope()
    for place in (tl, tl.core, tl.tensor, tl.math):
        interpreter._patch_builtin(place, interpreter.interpreter_builder, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
    interpreter._patch_lang_core(tl, scope)
    operators, functions = ops.quick_operators(), ops.quick_functions()
    slow = {name: getattr(tl.tensor, name) for name in operators} | {name: getattr(tl, name) for name in functions}
    yield slow, operators | functions
    scope.restore()


def value(dtype: Any, shape: tuple[int, ...]) -> Any:
    numbers = np.random.default_rng(len(shape)).integers(
        0 if dtype == tl.int1 or "uint" in dtype.name else -5, 6, shape or (1,)
    )
    data = (numbers > 0) if dtype == tl.int1 else numbers.astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def told(function: Any, *arguments: Any) -> Any:
    """The result, in words that can be compared; or that it is refused."""
    fresh = [tl.tensor(interpreter.TensorHandle(one.handle.data.copy(), one.handle.dtype), one.type) if isinstance(one, tl.tensor)
             else one for one in arguments]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = function(*fresh)
        except Exception as error:
            return type(error)
    if not isinstance(made, tl.tensor):
        return made
    data = made.handle.data.astype(np.bool_) if made.dtype == tl.int1 else made.handle.data
    return str(made.type), str(made.shape), made.numel.value, data.dtype, data.shape, data.tobytes()


def same(ways: Any, name: str, *arguments: Any) -> None:
    expected, found = (told(way[name], *arguments) for way in ways)
    again = told(ways[1][name], *arguments)
    given = [getattr(one, "type", one) for one in arguments]
    assert found == expected and again == expected, f"{name} of {given}"


BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)


@pytest.mark.parametrize("name", BINARY)
def test_operators_of_any_two_types_and_of_a_number(ways: Any, name: str) -> None:
    """Any two types with two kinds of shapes in turn, and any two shapes of int32."""
    kinds = (((4,), (4,)), ((), (4,)), ((2, 1), (1, 4)), ((), ()))
    for turn, (left, right) in enumerate(itertools.product(TYPES, repeat=2)):
        for shapes in kinds[turn % 2 :: 2]:
            same(ways, f"__{name}__", value(left, shapes[0]), value(right, shapes[1]))
    for shapes in itertools.product(SHAPES, repeat=2):
        same(ways, f"__{name}__", value(tl.int32, shapes[0]), value(tl.int32, shapes[1]))
    for dtype, number in itertools.product(TYPES, NUMBERS):
        for shape in ((), (2, 4)):
            same(ways, f"__{name}__", value(dtype, shape), number)
            if f"__r{name}__" in ways[1]:
                same(ways, f"__r{name}__", value(dtype, shape), number)


def test_pointers_and_distances(ways: Any) -> None:
    for element, distance in itertools.product((tl.int1, tl.int8, tl.bfloat16, tl.float32), TYPES):
        pointer = tl.pointer_type(element)
        for left, right in (((), ()), ((4,), ()), ((), (4,)), ((2, 1), (1, 4))):
            data = np.arange(1000, 1000 + int(np.prod(left)), dtype=np.uint64).reshape(left or (1,))
            places = tl.tensor(
                interpreter.TensorHandle(data, pointer), tl.block_type(pointer, list(left)) if left else pointer
            )
            same(ways, "__add__", places, value(distance, right))
            same(ways, "__sub__", places, value(distance, right))
    for number in NUMBERS:
        same(ways, "__add__", places, number)


def test_casts(ways: Any) -> None:
    for source, target in itertools.product(TYPES, repeat=2):
        for shape in ((), (2, 4)):
            same(ways, "to", value(source, shape), target)


def test_bfloat16_from_and_to_float32_is_as_torch_has_it(ways: Any) -> None:
    """All numbers, those below the least normal one and NaN too, and the middles between them."""
    bits = np.arange(2**16, dtype=np.uint16)
    exact = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    for way in ways:
        narrow = tl.tensor(interpreter.TensorHandle(bits, tl.bfloat16), tl.block_type(tl.bfloat16, [len(bits)]))
        wide = way["to"](narrow, tl.float32)
        assert np.array_equal(wide.handle.data.view(np.uint32), exact.view(torch.int32).numpy().view(np.uint32))
        middles = (bits.astype(np.uint32) << 16) + 0x8000
        wide = tl.tensor(
            interpreter.TensorHandle(middles.view(np.float32), tl.float32), tl.block_type(tl.float32, [len(bits)])
        )
        rounded = torch.from_numpy(way["to"](wide, tl.bfloat16).handle.data.view(np.int16)).view(torch.bfloat16)
        expected = torch.from_numpy(middles.view(np.float32)).bfloat16()
        torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "index", [None, (None, slice(None)), (slice(None), None), (slice(None), None, None), (slice(None),) * 2, 0]
)
def test_views(ways: Any, index: Any) -> None:
    for shape in SHAPES:
        same(ways, "__getitem__", value(tl.float32, shape), index)


def test_choices(ways: Any) -> None:
    for left, right in itertools.product(TYPES, repeat=2):
        for condition, shape in (((4,), (4,)), ((), (4,)), ((4,), ()), ((2, 1), (1, 4)), ((), ())):
            same(ways, "where", value(tl.int1, condition), value(left, shape), value(right, shape))
        same(ways, "where", value(left, (4,)), value(right, (4,)), 0.0)
    for dtype, number in itertools.product(TYPES, NUMBERS):
        same(ways, "where", value(tl.int1, (2, 4)), value(dtype, (1, 4)), number)
        same(ways, "where", value(tl.int1, (2, 4)), number, value(dtype, ()))
        same(ways, "where", value(tl.int1, (2, 4)), number, 2)


@pytest.mark.parametrize("other", [NOTHING, 0, 1, 2.5, -1.0])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64]
)
def test_loads(ways: Any, dtype: torch.dtype, other: Any) -> None:
    memory = torch.arange(8).to(dtype)
    element = tl.str_to_ty(triton.runtime.jit.mangle_type(memory), None)
    for shape, masks in (
        ((), (None, ())),
        ((8,), (None, (8,), (), (1,))),
        ((2, 4), (None, (2, 4), (2, 1), (1, 4), ())),
    ):
        count = int(np.prod(shape))
        data = memory.data_ptr() + memory.element_size() * np.arange(count, dtype=np.uint64).reshape(shape or (1,))
        places = tl.tensor(
            interpreter.TensorHandle(data, element), tl.block_type(element, list(shape)) if shape else element
        )
        for mask in masks:
            rest = () if mask is None else (value(tl.int1, mask),)
            if other is not NOTHING:
                rest = (*(rest or (None,)), other)
            if dtype != torch.float8_e4m3fn or other is NOTHING:
                same(ways, "load", places, *rest)


def test_types_are_one_object_each() -> None:
    assert tl.block_type(tl.int32, [4]) is tl.block_type(tl.int32, (4,)) is tl.block_type(tl.int32, [tl.constexpr(4)])
    assert tl.block_type(tl.int32, [4]) is not tl.block_type(tl.int64, [4])
    assert (
        tl.pointer_type(tl.int32) is tl.pointer_type(element_ty=tl.int32) is not tl.pointer_type(tl.int32, const=True)
    )

"""Accesses outside of all tensors are faults in the interpreter (pelton_interpreter_bounds.py)."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")


@triton.jit
def copy_kernel(source, target, first, count, SIZE: tl.constexpr):
    at = first + tl.arange(0, SIZE)
    tl.store(target + tl.arange(0, SIZE), tl.load(source + at, mask=at < count, other=0))


@triton.jit
def follow_kernel(table, target, first, SIZE: tl.constexpr):
    source = tl.load(table).to(tl.pointer_type(tl.int32))
    tl.store(target + tl.arange(0, SIZE), tl.load(source + first + tl.arange(0, SIZE)))


@triton.jit
def count_kernel(counters, at):
    tl.atomic_add(counters + at, 1)


def test_places_that_a_mask_leaves_out_may_be_anywhere():
    source, target = torch.arange(5, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    copy_kernel[(1,)](source, target, 0, 5, SIZE=8)
    assert target.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


@pytest.mark.parametrize(
    "first, count, size, told",
    [
        (0, 6, 8, r"copy_kernel: load of 4 bytes at \+20 of source, 0 behind the end of its storage of 20 bytes"),
        (-1, 5, 8, r"copy_kernel: load of 4 bytes at -4 of source, 4 before the beginning of its storage of 20 bytes"),
        (0, 5, 16, r"copy_kernel: store of 4 bytes at \+32 of target, 0 behind the end of its storage of 32 bytes"),
    ],
)
def test_the_kernel_the_argument_and_the_place_are_told(first, count, size, told):
    source, target = torch.arange(5, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with pytest.raises(Exception, match=told):
        copy_kernel[(1,)](source, target, first, count, SIZE=size)


def test_atomics_are_looked_at():
    counters = torch.zeros(2, dtype=torch.int32)
    count_kernel[(1,)](counters, 1)
    with pytest.raises(Exception, match=r"count_kernel: atomic of 4 bytes at \+8 of counters"):
        count_kernel[(1,)](counters, 2)


def test_a_table_names_tensors():
    source, target = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    table = torch.tensor([source.data_ptr()])
    follow_kernel[(1,)](table, target, 0, SIZE=8)
    assert target.tolist() == source.tolist()
    with pytest.raises(Exception, match="follow_kernel: load of 4 bytes"):
        follow_kernel[(1,)](table, target, 1, SIZE=8)

"""Layer norms in C, with the sum before them, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pelton.ops.interface import AddNormNeeds, AddNormTensors, NormSpec
from pelton_backends.native.layer_norm import NativeAddNorm
from pelton_backends.reference.ops import ReferenceAddNorm

pytestmark = pytest.mark.covering(3)


def needs(size=8, **changes):
    given = {"dtype": "float32", "norm": NormSpec(size=size, eps=1e-5, is_centered=True)}
    return AddNormNeeds(**given | changes)


@pytest.mark.parametrize("size", [1, 5, 8, 20, 64, 67, 384])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 16, 17, 90])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_equals_float64(isa, size, num_rows, has_bias, has_residual):
    hidden, residual = 3 * torch.randn(2, num_rows, size) + 1
    weight = torch.randn(2, size) if has_bias else torch.randn(size)
    call = NativeAddNorm.bind(needs(size), AddNormTensors(weight))
    total = hidden.double() + residual.double() if has_residual else hidden.double()
    factor, bias = weight.double() if has_bias else (weight.double(), None)
    before = hidden.clone()
    result, kept = call(hidden, residual if has_residual else None)
    torch.testing.assert_close(result.double(), F.layer_norm(total, (size,), factor, bias, 1e-5), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept.double(), total, atol=1e-6, rtol=1e-6)
    assert kept is (residual if has_residual else hidden) and torch.equal(hidden, before)


def test_far_from_zero_the_deviation_is_that_of_the_numbers(isa):
    """One pass over sums of squares would lose it."""
    hidden = torch.randn(4, 384) + 1000
    weight = torch.ones(384)
    got, _ = NativeAddNorm.bind(needs(384), AddNormTensors(weight))(hidden, None)
    want, _ = ReferenceAddNorm.bind(needs(384), AddNormTensors(weight))(hidden.double(), None)
    torch.testing.assert_close(got, want.float(), atol=1e-3, rtol=1e-3)


def test_rows_are_each_their_own(isa):
    hidden, residual = torch.randn(2, 70, 96)
    call = NativeAddNorm.bind(needs(96), AddNormTensors(torch.randn(2, 96)))
    together, _ = call(hidden, residual.clone())
    alone = torch.cat([call(hidden[i : i + 1], residual[i : i + 1].clone())[0] for i in range(70)])
    assert torch.equal(alone, together)


def test_rows_that_do_not_lie_behind_each_other(isa):
    hidden, residual = torch.randn(2, 5, 40)[..., ::2].unbind()
    call, weight = NativeAddNorm.bind, torch.randn(20)
    want = ReferenceAddNorm.bind(needs(20), AddNormTensors(weight))(hidden.clone(), residual.clone())
    got = call(needs(20), AddNormTensors(weight))(hidden, residual)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": "bfloat16"}, "dtype bfloat16, only float32"),
    ({"norm": NormSpec(size=8, eps=1e-5)}, "an RMS norm, only layer norms"),
])  # fmt: skip
def test_what_it_refuses(changes, reason):
    assert NativeAddNorm.unsupported(needs(**changes)) == [reason]

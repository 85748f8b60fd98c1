"""The C products against a float64 oracle with the reference's roundings, by each instruction set that this CPU has."""

import pytest
import torch
from pelton_linear_oracle import check, make_case

from pelton.ops.interface import (
    AddNormLinearNeeds,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    LinearSpec,
    LinearWeights,
    NormSpec,
)
from pelton.ops.reference import ReferenceAddNormLogits
from pelton_backends.native.linear import (
    NativeAddNormGatedLinear,
    NativeAddNormLinear,
    NativeAddNormLogits,
    NativeLinear,
)

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
SHAPES = [(64, 96), (66, 10), (130, 33), (576, 960), (7, 5)]  # in, out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 13, 65])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_norm_linear(isa, dtype, num_rows, shape):
    check(make_case(num_rows, *shape, dtype, CPU), NativeAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{"residual": False}, {"post_norm": True}, {"post_norm": True, "residual": False}, {"bias": True},
     {"unit_offset": True, "post_norm": True}, {"row_gap": 6}],
    ids=str,
)  # fmt: skip
def test_add_norm_linear_in_every_form(isa, dtype, num_rows, changes):
    check(make_case(num_rows, 96, 70, dtype, CPU, **changes), NativeAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 26])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_add_norm_gated_linear(isa, dtype, num_rows, activation):
    for half in (8, 19, 160):
        check(
            make_case(num_rows, 64, 2 * half, dtype, CPU, activation=activation, bias=half == 19),
            NativeAddNormGatedLinear,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 12, 300])
def test_linear(isa, dtype, num_rows):
    for bias in (False, True):
        check(make_case(num_rows, 98, 70, dtype, CPU, norm=False, bias=bias, row_gap=2), NativeLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[], [3], [0, 4, 2]], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_add_norm_logits_equal_the_reference(isa, dtype, rows, soft_cap):
    case = make_case(5, 64, 75, dtype, CPU)
    spec = LinearSpec(in_features=64, out_features=75)
    needs = AddNormLogitsNeeds(
        dtype=str(dtype).removeprefix("torch."), norm=case.norm_spec, linear=spec, vocab_size=73, soft_cap=soft_cap
    )
    tensors = AddNormLogitsTensors(case.norm, LinearWeights(spec, {"weight": case.weight}))
    before = case.hidden.clone(), case.residual.clone()
    index = torch.tensor(rows, dtype=torch.int64)
    got = NativeAddNormLogits.bind(needs, tensors)(case.hidden, case.residual, index)
    want = ReferenceAddNormLogits.bind(needs, tensors)(case.hidden, case.residual, index)
    assert got.dtype == torch.float32 and torch.equal(case.hidden, before[0]) and torch.equal(case.residual, before[1])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "float16"}, "dtype float16"),
        ({"tp_size": 2}, "tp_size 2"),
        ({"linear": LinearSpec(in_features=8, out_features=8, weight_format="q4")}, "weight format 'q4'"),
    ],
    ids=str,
)
def test_what_they_refuse(changes, reason):
    given = {
        "dtype": "float32",
        "norm": NormSpec(size=8, eps=1e-5),
        "linear": LinearSpec(in_features=8, out_features=8),
    }
    (why,) = NativeAddNormLinear.unsupported(AddNormLinearNeeds(**given | changes))
    assert reason in why

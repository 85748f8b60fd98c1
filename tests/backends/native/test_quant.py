"""The C products with packed blocks against a float64 oracle of the same roundings, by each instruction set of this CPU."""

from dataclasses import replace

import pytest
import torch
from pelton_isas import AVAILABLE, in_use
from pelton_linear_oracle import assert_close, check, make_case

from pelton.ops.interface import (
    AddNormGatedLinearNeeds,
    AddNormLinearNeeds,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    EmbedNeeds,
    EmbedTensors,
    LinearSpec,
    LinearWeights,
    NormSpec,
)
from pelton.ops.packed_blocks import KINDS, dense, panels_shape, weight_format
from pelton_backends.native.quant import (
    QuantAddNormLinear,
    QuantAddNormLogits,
    QuantEmbedding,
    QuantLinear,
)
from pelton_backends.reference.ops import ReferenceAddNormLogits, ReferenceEmbed
from pelton_plugins.weight_forms.block_writing import pack, quantize

pytestmark = pytest.mark.covering(3)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


@pytest.fixture(params=AVAILABLE)
def isa(request):
    """Each instruction set: they add products of bytes in ways of their own."""
    yield from in_use(request.param)


def packed_weights(weight, kinds, parts, bias=None):
    """`weight` rounded to blocks, part after part."""
    tensors = {}
    for index, (name, rows) in enumerate(zip(kinds, weight.float().split(parts), strict=True)):
        panels = torch.full(panels_shape(KINDS[name], *rows.shape), 0xA5, dtype=torch.uint8)
        pack(quantize(rows, KINDS[name]), KINDS[name], panels)
        tensors[f"part{index}"] = panels
    spec = LinearSpec(
        in_features=weight.shape[1], out_features=weight.shape[0], has_bias=bias is not None, parts=tuple(parts),
        weight_format=weight_format([KINDS[name] for name in kinds]),
    )  # fmt: skip
    return LinearWeights(spec, tensors, bias)


def make_packed(num_rows, in_features, kinds, parts, dtype, **changes):
    case = make_case(num_rows, in_features, sum(parts), dtype, CPU, **changes)
    packed = packed_weights(case.weight, kinds, parts, case.bias)
    return replace(case, packed=packed, weight=dense(packed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 9, 13, 131])
@pytest.mark.parametrize("kind", KINDS)
def test_add_norm_linear(isa, dtype, num_rows, kind):
    check(make_packed(num_rows, 96, [kind] * 3, [48, 16, 19], dtype), QuantAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 20])
@pytest.mark.parametrize("parts", [[1, 2, 3], [16, 17, 15], [64, 32, 32], [32, 64, 9], [32, 32, 50]], ids=str)
def test_parts_of_different_kinds(isa, dtype, num_rows, parts):
    for kinds in (["q8_0", "q4_1", "q4_0"], ["q4_0", "q8_0", "q4_1"]):
        check(make_packed(num_rows, 64, kinds, parts, dtype), QuantAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 11])
@pytest.mark.parametrize(
    "changes",
    [
        {"residual": False},
        {"post_norm": True},
        {"bias": True},
        {"unit_offset": True, "post_norm": True},
        {"row_gap": 6},
    ],
    ids=str,
)
def test_add_norm_linear_in_every_form(isa, dtype, num_rows, changes):
    check(make_packed(num_rows, 96, ["q4_1", "q8_0"], [50, 20], dtype, **changes), QuantAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 26])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_add_norm_gated_linear(isa, dtype, num_rows, activation):
    for half, kinds in ((8, ["q4_0", "q4_0"]), (19, ["q8_0", "q4_1"]), (160, ["q4_1", "q4_1"])):
        case = make_packed(num_rows, 64, kinds, [half, half], dtype, activation=activation, bias=half == 19)
        check(case, QuantAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 12, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_linear(isa, dtype, num_rows, kind):
    for bias in (False, True):
        check(make_packed(num_rows, 160, [kind], [70], dtype, norm=False, bias=bias, row_gap=2), QuantLinear)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_numbers_do_not_overflow(isa, kind):
    """Every weight at an end of its range, every input at one of its."""
    signs = torch.where(torch.arange(64) % 3 == 0, -1.0, 1.0)
    for weight in (torch.ones(16, 64), -torch.ones(16, 64), signs.expand(16, 64).contiguous()):
        for hidden in (torch.ones(1, 64), -torch.ones(1, 64), signs[None]):
            case = make_case(1, 64, 16, torch.float32, CPU, norm=False)
            packed = packed_weights(weight, [kind], [16])
            check(replace(case, hidden=hidden, packed=packed, weight=dense(packed)), QuantLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_result_does_not_depend_on_the_others(isa, dtype, kind):
    case = make_packed(150, 128, [kind, kind], [32, 32], dtype, activation="silu")
    call = QuantAddNormLinear.bind(case.needs, case.tensors)

    def results(first, last):
        return call(case.hidden[first:last].clone(), case.residual[first:last].clone())[0]

    # From 9 rows on by dequantized panels.
    is_two_ways = (dtype == torch.bfloat16 and isa == "avx512_bf16") or (dtype != torch.float32 and isa == "plain")
    for most, size in ((8, 1), (150, 9)) if is_two_ways else ((150, 1),):
        together = results(0, most)
        for row in {0, 5, most - size}:
            assert torch.equal(results(row, row + size), together[row : row + size])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_inputs_hardly_move_results(isa, dtype, kind):
    """In bfloat16 what is seen is the result's own rounding."""
    case = make_packed(40, 576, [kind], [64], dtype, norm=False)
    result, _ = case.run(QuantLinear)
    exact = case.hidden.double() @ case.weight.double().T
    assert (result.double() - exact).norm() < {torch.float32: 5e-5, torch.bfloat16: 3e-3, torch.float16: 4e-4}[
        dtype
    ] * exact.norm()


@pytest.mark.parametrize("num_rows", [3, 12])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_stays_in_its_row(isa, num_rows, kind, bad):
    case = make_packed(num_rows, 64, [kind], [20], torch.bfloat16, norm=False)
    call = QuantLinear.bind(case.needs, case.tensors)
    hidden = case.hidden.clone()
    hidden[1, 40] = bad
    result = call(hidden)
    others = [row for row in range(num_rows) if row != 1]
    assert not result[1].isfinite().any() and result[others].isfinite().all()
    assert torch.equal(result[others], call(case.hidden.clone())[others])


def test_rows_of_zeros_give_zeros(isa):
    case = make_packed(2, 64, ["q4_1"], [20], torch.float32, norm=False)
    assert not QuantLinear.bind(case.needs, case.tensors)(torch.zeros(2, 64)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[], [3], [0, 4, 2]], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_add_norm_logits_of_rows(isa, dtype, rows, soft_cap):
    case = make_packed(5, 64, ["q8_0"], [75], dtype)
    needs = AddNormLogitsNeeds(
        dtype=case.needs.dtype, norm=case.norm_spec, linear=case.packed.spec, vocab_size=73, soft_cap=soft_cap
    )
    tensors = AddNormLogitsTensors(case.norm, case.packed)
    before = case.hidden.clone(), case.residual.clone()
    index = torch.tensor(rows, dtype=torch.int64)
    got = QuantAddNormLogits.bind(needs, tensors)(case.hidden, case.residual, index)
    assert got.dtype == torch.float32 and torch.equal(case.hidden, before[0]) and torch.equal(case.residual, before[1])
    wanted = case.expected()[0][index, :73].float()
    wanted = wanted if soft_cap is None else soft_cap * torch.tanh(wanted / soft_cap)
    assert_close(got.to(dtype), wanted.to(dtype), "logits", factor=10.0 if dtype == torch.float32 else 1.0)
    near = ReferenceAddNormLogits.bind(needs, tensors)(case.hidden, case.residual, index)
    torch.testing.assert_close(got, near, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 45.254834])
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_equals_the_reference(isa, dtype, scale, kind):
    matrix = packed_weights(torch.randn(43, 96), [kind], [43]).tensors["part0"]
    name = str(dtype).removeprefix("torch.")
    needs = EmbedNeeds(dtype=name, num_rows=43, hidden_size=96, scale=scale, weight_format=kind)
    for ids in ([], [42], [0, 42, 7, 7, 16, 15, 31, 1, 2, 3]):
        ids = torch.tensor(ids, dtype=torch.int64)
        got = QuantEmbedding.bind(needs, EmbedTensors(matrix, 0))(ids)
        wanted = ReferenceEmbed.bind(needs, EmbedTensors(matrix, 0))(ids)
        torch.testing.assert_close(got, wanted, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "float64"}, "dtype float64, only float32, bfloat16, float16"),
        ({"linear": LinearSpec(in_features=32, out_features=8)}, "weight format 'plain', only q8_0, q4_0, q4_1"),
        ({"linear": LinearSpec(in_features=32, out_features=8, weight_format="q4_1", parts=(2, 2, 2, 2))}, "4 parts"),
    ],
    ids=str,
)
def test_what_they_refuse(changes, reason):
    given = {
        "dtype": "float32",
        "norm": NormSpec(size=32, eps=1e-5),
        "linear": LinearSpec(in_features=32, out_features=8, weight_format="q4_1+q8_0", parts=(4, 4)),
    }
    assert QuantAddNormLinear.unsupported(AddNormLinearNeeds(**given)) == []
    (why,) = QuantAddNormLinear.unsupported(AddNormLinearNeeds(**given | changes))
    assert reason in why


@pytest.mark.parametrize("parts, is_refused", [((8, 8), False), ((16,), True), ((9, 7), True)], ids=str)
def test_a_gate_and_up_are_two_parts_of_one_size(parts, is_refused):
    spec = LinearSpec(in_features=32, out_features=16, weight_format="q8_0", parts=parts)
    needs = AddNormGatedLinearNeeds(dtype="float32", norm=NormSpec(size=32, eps=1e-5), linear=spec, activation="silu")
    assert bool(QuantAddNormLinear.unsupported(needs)) == is_refused
    assert all("only two of one size" in why for why in QuantAddNormLinear.unsupported(needs))

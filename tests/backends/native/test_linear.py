"""The C products against a float64 oracle with the reference's roundings, by each instruction set that this CPU has."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pelton_linear_oracle import ACTIVATIONS, TOLERANCES, check, make_case

from pelton.ops.interface import (
    AddNormLinearNeeds,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    EmbedNeeds,
    EmbedTensors,
    LinearNeeds,
    LinearSpec,
    LinearTensors,
    LinearWeights,
    NormSpec,
)
from pelton.ops.selector import pack_weights
from pelton_backends.native.embed import NativeEmbed
from pelton_backends.native.linear import (
    NativeAddNormLinear,
    NativeAddNormLogits,
    NativeLinear,
)
from pelton_backends.reference.ops import ReferenceAddNormLogits, ReferenceEmbed

pytestmark = pytest.mark.covering(3)


class Loaded:
    """An implementation whose ops are told that their weights, copies of the case's, are in place."""

    def __init__(self, implementation):
        self.unsupported = implementation.unsupported
        self.implementation = implementation

    def bind(self, needs, tensors):
        copies = {name: tensor.clone() for name, tensor in tensors.linear.tensors.items()}
        op = self.implementation.bind(needs, replace(tensors, linear=replace(tensors.linear, tensors=copies)))
        pack_weights([op])
        return op


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
SHAPES = [(64, 96), (66, 10), (130, 33), (576, 960), (7, 5)]  # in, out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 13, 65])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", [NativeAddNormLinear, Loaded(NativeAddNormLinear)], ids=["plain", "loaded"])
def test_add_norm_linear(isa, dtype, num_rows, shape, form):
    check(make_case(num_rows, *shape, dtype, CPU), form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [*range(1, 15), 24, 25, 26])
def test_every_number_of_rows_in_a_block(isa, dtype, num_rows):
    check(make_case(num_rows, 70, 64, dtype, CPU), Loaded(NativeAddNormLinear))
    check(make_case(num_rows, 70, 64, dtype, CPU, norm=False), Loaded(NativeLinear))
    check(make_case(num_rows, 70, 37, dtype, CPU), NativeAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_than_meet_a_panel_at_once(isa, dtype):
    """The packed rows of a task have half a MiB."""
    check(make_case(300, 1536, 96, dtype, CPU, norm=False), Loaded(NativeLinear))
    check(make_case(300, 1536, 40, dtype, CPU, norm=False), NativeLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_loaded_product_does_not_depend_on_the_others(isa, dtype):
    case = make_case(70, 300, 96, dtype, CPU)
    op = Loaded(NativeAddNormLinear).bind(case.needs, case.tensors)
    together = op(case.hidden.clone(), case.residual.clone())[0]
    for num_rows in [*range(1, 15), 63, 64]:
        alone = op(case.hidden[-num_rows:].clone(), case.residual[-num_rows:].clone())[0]
        assert torch.equal(alone, together[-num_rows:])
    case.hidden[3, 5], case.residual[40, 7] = torch.nan, torch.inf
    spoilt = op(case.hidden.clone(), case.residual.clone())[0]
    others = [row for row in range(70) if row not in (3, 40)]
    assert torch.equal(spoilt[others], together[others])
    assert spoilt[3].isnan().all() and spoilt[40].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [126, 128, 130, 300])
@pytest.mark.parametrize("form", [NativeLinear, Loaded(NativeLinear)], ids=["plain", "loaded"])
def test_a_row_among_many_groups_is_what_it_is_among_few(isa, dtype, in_features, form):
    """Many rows meet a panel part by part; few meet it whole."""
    case = make_case(1030, in_features, 70, dtype, CPU, norm=False, bias=True)
    op = form.bind(case.needs, case.tensors)
    together = op(case.hidden.clone())
    for first in (0, 255, 512, 997):
        alone = op(case.hidden[first : first + 33].clone())
        assert torch.equal(alone, together[first : first + 33])


@pytest.mark.parametrize("num_ids", [0, 1, 7, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 1.7])
@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_of_an_embedding_equal_the_reference(isa, num_ids, dtype, scale, is_tied):
    weight = torch.randn(96, 70).to(dtype)
    given, spec = weight.clone(), LinearSpec(in_features=70, out_features=96)
    needs = EmbedNeeds(dtype=str(dtype).removeprefix("torch."), num_rows=96, hidden_size=70, scale=scale)
    weights = LinearWeights(spec, {"weight": given})
    embed = NativeEmbed.bind(needs, EmbedTensors(given, 0, weights))
    if is_tied:
        product = NativeLinear.bind(LinearNeeds(dtype=needs.dtype, linear=spec), LinearTensors(weights))
        x = torch.randn(3, 70).to(dtype)
        before = product(x)
        pack_weights([embed, product])
        assert not torch.equal(given, weight)
        torch.testing.assert_close(product(x), before, atol=3e-2, rtol=3e-2)
    ids = torch.randint(0, 96, (2 * num_ids,))[::2]
    got, wanted = embed(ids), ReferenceEmbed.bind(needs, EmbedTensors(weight, 0))(ids)
    assert got.dtype == dtype and torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loaded_weight_keeps_its_memory_and_its_order_where_a_reader_does_not_follow(isa, dtype):
    spec, name = LinearSpec(in_features=64, out_features=96), str(dtype).removeprefix("torch.")
    weight = torch.randn(96, 64).to(dtype)
    for is_shared in (True, False):
        given = weight.clone()
        weights = LinearWeights(spec, {"weight": given})
        op = NativeLinear.bind(LinearNeeds(dtype=name, linear=spec), LinearTensors(weights))
        x = torch.randn(3, 64).to(dtype)
        before = op(x)
        for _ in range(2):  # once is enough
            pack_weights([op, lambda x: x] if is_shared else [op])
        assert torch.equal(op(x), before) or not is_shared
        torch.testing.assert_close(op(x), before, atol=2e-2, rtol=2e-2)
        assert torch.equal(given, weight) == is_shared
        assert torch.equal(given.flatten().sort().values, weight.flatten().sort().values)


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
        for bias in (False, True):
            case = make_case(num_rows, 64, 2 * half, dtype, CPU, activation=activation, bias=bias)
            check(case, NativeAddNormLinear)
            check(case, Loaded(NativeAddNormLinear))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 12, 300])
def test_linear(isa, dtype, num_rows):
    for bias in (False, True):
        for out_features in (70, 96):
            case = make_case(num_rows, 98, out_features, dtype, CPU, norm=False, bias=bias, row_gap=2)
            check(case, NativeLinear)
            check(case, Loaded(NativeLinear))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 13, 90])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_its_activation(isa, dtype, num_rows, activation, bias):
    for out_features in (70, 96):
        case = make_case(num_rows, 98, out_features, dtype, CPU, norm=False, bias=bias)
        bare, _ = case.expected()
        relative, absolute = TOLERANCES[dtype]
        for form in (NativeLinear, Loaded(NativeLinear)):
            op = form.bind(case.needs, case.tensors)
            assert op.take_activation(activation)
            wanted = ACTIVATIONS[activation](bare.double()).to(dtype)
            torch.testing.assert_close(op(case.hidden.clone()), wanted, rtol=relative, atol=absolute)


def test_gelu_over_all_of_its_range(isa):
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, 3e38, -3e38]))).unsqueeze(0)
    spec = LinearSpec(in_features=1, out_features=x.shape[1])
    op = NativeLinear.bind(
        LinearNeeds(dtype="float32", linear=spec), LinearTensors(LinearWeights(spec, {"weight": x.T.contiguous()}))
    )
    assert op.take_activation("gelu")
    torch.testing.assert_close(op(torch.ones(1, 1)), F.gelu(x.double()).float(), atol=2e-6, rtol=1e-6)
    assert op(torch.full((1, 1), torch.nan)).isnan().all()


@pytest.mark.parametrize("name", ["relu", None])
def test_an_activation_that_it_has_not_is_left_to_others(isa, name):
    case = make_case(3, 64, 96, torch.float32, CPU, norm=False)
    op = NativeLinear.bind(case.needs, case.tensors)
    before = op(case.hidden)
    assert not op.take_activation(name) and torch.equal(op(case.hidden), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[], [3], [0, 4, 2], [4, 4, 1, 0, 2, 3, 3]], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("num_columns", [75, 96])
def test_add_norm_logits_equal_the_reference(isa, dtype, rows, soft_cap, num_columns):
    case = make_case(5, 64, num_columns, dtype, CPU)
    spec = LinearSpec(in_features=64, out_features=num_columns)
    needs = AddNormLogitsNeeds(
        dtype=str(dtype).removeprefix("torch."), norm=case.norm_spec, linear=spec, vocab_size=73, soft_cap=soft_cap
    )
    tensors = AddNormLogitsTensors(case.norm, LinearWeights(spec, {"weight": case.weight}))
    before = case.hidden.clone(), case.residual.clone()
    index = torch.tensor(rows, dtype=torch.int64)
    want = ReferenceAddNormLogits.bind(needs, tensors)(case.hidden, case.residual, index)
    got = Loaded(NativeAddNormLogits).bind(needs, tensors)(case.hidden, case.residual, index)
    assert got.dtype == torch.float32 and torch.equal(case.hidden, before[0]) and torch.equal(case.residual, before[1])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "float64"}, "dtype float64"),
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

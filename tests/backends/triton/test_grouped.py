"""Products with weights of 4 and 8 bits in groups against the float64 oracle with the dequantized weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pelton_assembly import as_number, run_assembly
from pelton_linear_oracle import TOLERANCES, Case, make_case

from pelton.ops.interface import LinearTensors, LinearWeights
from pelton_backends.triton.ops.linear import decoded, grouped, hopper_grouped
from pelton_backends.triton.ops.linear.grouped import GroupedAddNormGatedLinear, GroupedAddNormLinear, GroupedLinear
from pelton_plugins.weight_forms.groups import (
    FORMATS,
    MINIMA,
    dequantize,
    pack_codes,
    pack_minima,
    pack_scales,
    unpack_scales,
)

OPS = {
    "linear": (GroupedLinear, {"norm": False}),
    "add_norm_linear": (GroupedAddNormLinear, {}),
    "add_norm_gated_linear": (GroupedAddNormGatedLinear, {"activation": "silu"}),
}


def quantized(weight, bits, group, *, is_symmetric=False, order=None, spec=None, bias=None) -> LinearWeights:
    """Rounded to nearest, columns in `order`."""
    group = weight.shape[1] if group == -1 else group
    columns = weight.float() if order is None else weight.float()[:, order]
    groups = columns.view(weight.shape[0], -1, group)
    most = 2**bits - 1
    if is_symmetric:
        zero = torch.full_like(groups[..., :1], 2 ** (bits - 1))
        scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    else:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / most
        zero = (-low / scale).round()
    scale = scale.half().float()
    codes = ((groups / scale).round() + zero).clamp(0, most).flatten(1)
    tensors = {"codes": pack_codes(codes, bits), "scales": pack_scales(scale[..., 0], zero[..., 0])}
    if order is not None:
        tensors["order"] = order.to(torch.int32)
    return LinearWeights(replace(spec, weight_format=FORMATS[bits], is_ordered=order is not None), tensors, bias)


def with_minima(weights: LinearWeights, bits: int) -> LinearWeights:
    """The same codes, and minima by chance near what their zero points say."""
    scales, zeros = unpack_scales(weights.tensors["scales"])
    minima = (-scales * (zeros + torch.rand_like(zeros))).half()
    tensors = {**weights.tensors, "scales": pack_minima(scales.half(), minima)}
    return replace(weights, spec=replace(weights.spec, weight_format=MINIMA[bits]), tensors=tensors)


def make(num_rows, in_features, out_features, device, bits=4, group=128, dtype=torch.float16, *, is_ordered=False,
         has_minima=False, **options) -> Case:  # fmt: skip
    """Its weight is what the groups say, rounded to the dtype as kernels for several rows do."""
    case = make_case(num_rows, in_features, out_features, dtype, device, **options)
    order = torch.randperm(in_features, device=device) if is_ordered else None
    packed = quantized(case.weight, bits, group, order=order, spec=case.needs.linear, bias=case.bias)
    packed = with_minima(packed, bits) if has_minima else packed
    weight = dequantize(packed)
    if order is not None:
        weight = torch.empty_like(weight).index_copy_(1, order, weight)
    case.weight, case.grouped = weight.to(dtype), packed
    return case


def check(case: Case, implementation, **options) -> None:
    want, want_total = case.expected()
    needs, tensors = case.needs, case.tensors
    needs = replace(needs, linear=case.grouped.spec)
    tensors.linear = case.grouped
    assert implementation.unsupported(needs) == []
    got, total = case.call(implementation.bind(needs, tensors))
    relative, absolute = TOLERANCES[got.dtype]
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=relative, atol=absolute)
    if want_total is not None:
        torch.testing.assert_close(total, want_total, rtol=relative, atol=absolute)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 19])
def test_four_bits_in_groups_of_128(op, num_rows, device):
    implementation, kind = OPS[op]
    check(make(num_rows, 256, 64, device, **kind), implementation)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_other_groups(bits, group, device):
    for num_rows in (1, 3):
        check(make(num_rows, 384, 48, device, bits, group, norm=False), GroupedLinear)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("op", OPS)
def test_minima_in_place_of_zero_points(op, bits, device, monkeypatch):
    implementation, kind = OPS[op]
    for num_rows in (1, 3):
        check(make(num_rows, 160, 48, device, bits, 32, has_minima=True, **kind), implementation)
    monkeypatch.setattr(grouped, "MAX_TOKENS", 2)  # dequantized
    check(make(3, 160, 48, device, bits, 32, has_minima=True, **kind), implementation)


@pytest.mark.parametrize("num_bytes, bits, is_summed, is_brought", [
    pytest.param(grouped._LARGE_BYTES, 4, False, True, id="of 4 bits"),
    pytest.param(grouped._LARGE_BYTES - 4, 4, False, False, id="small"),
    pytest.param(grouped._LARGE_BYTES, 8, False, False, id="of 8 bits"),
    pytest.param(grouped._LARGE_BYTES, 4, True, False, id="behind a sum over ranks"),
])  # fmt: skip
def test_what_is_read_next_is_brought_near_where_that_was_faster(num_bytes, bits, is_summed, is_brought, monkeypatch):
    """By the launch of one row, and no other; of its halves."""
    launched = []
    monkeypatch.setattr(grouped, "has_pdl", lambda device: True)
    monkeypatch.setattr(grouped, "launch", lambda kernel, *args, **options: launched.append((kernel, options)))
    case = make(1, 256, 64, torch.device("cpu"), bits, norm=False)
    tensors = LinearTensors(case.grouped, (lambda partial: partial) if is_summed else None)
    op = GroupedLinear.bind(replace(case.needs, linear=case.grouped.spec), tensors)
    codes = torch.empty(num_bytes // 4, dtype=torch.int32, device="meta")
    op.read_next({"scales": torch.empty(1), "codes": codes})
    for num_rows in (1, 2):
        op(torch.zeros(num_rows, 256, dtype=torch.float16))
    near = [(options.get("near"), options.get("HALF")) for _, options in launched]
    assert near == [(codes, num_bytes // 2) if is_brought else (None, None), (None, None)]
    op.read_next({"weight": torch.empty(1)})  # a plain one


def test_columns_that_fill_no_block_and_rows_that_fill_no_tile(device):
    for num_rows in (1, 3):
        check(make(num_rows, 96, 36, device, 4, 32, norm=False, bias=True, row_gap=8), GroupedLinear)
        check(make(num_rows, 160, 52, device, 8, 32), GroupedAddNormLinear)


def test_several_pieces_of_a_long_row(device):
    for bits, size in ((4, 9216), (4, 2304), (8, 5120)):
        check(make(1, size, 16, device, bits, 128, norm=False), GroupedLinear)
    check(make(1, 256, 1100, device, 4, 128, norm=False), GroupedLinear)  # 32 rows a program


@pytest.mark.parametrize("bits, group, size, tile", [
    (4, 128, 3584, grouped.RowTile(2, 32, 4, 2, SPLIT=4)),
    (4, 32, 896, grouped.RowTile(2, 16, 2, 2, SPLIT=2)),
    (8, 128, 992, grouped.RowTile(1, 32, 3, 3, SPLIT=3)),
])  # fmt: skip
def test_programs_share_a_long_row(bits, group, size, tile, device, monkeypatch):
    monkeypatch.setattr(grouped, "choose_row_tile", lambda *_, **__: tile)
    group = -1 if size % group else group
    for is_ordered in (False, True):
        case = make(1, size, 52, device, bits, group, norm=False, bias=True, is_ordered=is_ordered)
        check(case, GroupedLinear)


OPTIONS = [
    pytest.param({"residual": False}, id="first-layer"),
    pytest.param({"bias": True, "is_ordered": True}, id="ordered-bias"),
    pytest.param({"post_norm": True, "unit_offset": True}, id="norms"),
    pytest.param({"post_norm": True, "residual": False, "is_ordered": True}, id="post-norm-first-layer"),
]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, num_rows, device):
    for op in ("add_norm_linear", "add_norm_gated_linear"):
        implementation, kind = OPS[op]
        check(make(num_rows, 256, 48, device, 4, 64, **kind, **options), implementation)
    check(make(num_rows, 256, 48, device, 4, 64, norm=False, is_ordered=True), GroupedLinear)


def test_many_rows_take_the_dequantized_matrix_in_parts(device, monkeypatch):
    monkeypatch.setattr(decoded, "NUMBERS_AT_ONCE", 2**14)
    for op in ("linear", "add_norm_gated_linear"):
        implementation, kind = OPS[op]
        check(make(grouped.MAX_TOKENS + 1, 128, 160, device, bias=True, **kind), implementation)


def test_refuses_with_reasons(device):
    needs = make(1, 128, 64, device, norm=False).needs
    needs = replace(needs, linear=replace(needs.linear, weight_format="int4_grouped"))
    assert GroupedLinear.unsupported(needs) == []
    plain = replace(needs, linear=replace(needs.linear, weight_format="plain"))
    assert GroupedLinear.unsupported(plain) == [
        "weight format 'plain', only int4_grouped, int8_grouped, int4_minima, int8_minima"
    ]
    assert GroupedLinear.unsupported(replace(needs, dtype="float32")) == ["dtype float32, only bfloat16, float16"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 17, 100, 256, 300])
@pytest.mark.parametrize("op", OPS)
def test_large_matrices(op, num_rows, device):
    implementation, kind = OPS[op]
    for bits, group, has_minima in ((4, 128, False), (4, 32, True), (8, 128, False)):
        options = {**kind, "has_minima": has_minima}
        check(make(num_rows, 4096, 1024, device, bits, group, torch.bfloat16, **options), implementation)


# In registers, on Hopper.


@pytest.mark.gpu
@pytest.mark.parametrize(
    "num_rows, size", [(2, (3840, 1160)), (31, (2048, 4096)), (64, (2048, 328)), (129, (1024, 2304))], ids=str
)
@pytest.mark.parametrize("group, dtype", [
    (128, torch.bfloat16), (64, torch.bfloat16), (-1, torch.bfloat16), (128, torch.float16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("op", OPS)
def test_products_of_some_rows_are_those_of_float64(op, group, dtype, num_rows, size, device):
    """Weights are not rounded; tiles that the weight's rows or those of x do not fill, and K in equal parts or whole."""
    implementation, kind = OPS[op]
    case = make(num_rows, *size, device, 4, group, dtype, bias=op == "linear", **kind)
    assert grouped.GroupedMatrix(case.grouped, str(dtype).removeprefix("torch.")).on_hopper is not None
    case.weight = dequantize(case.grouped)
    check(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_options_on_hopper(options, device):
    check(make(40, 1024, 256, device, dtype=torch.bfloat16, **options), GroupedAddNormLinear)


def operand_of(words: torch.Tensor, scale: int, dtype: torch.dtype) -> list[float]:
    """A block's words [16] as tensor cores take them with scale and zero point `scale`, times what they are too small by."""
    is_bfloat16 = dtype == torch.bfloat16
    text = hopper_grouped._BFLOAT16_ASM if is_bfloat16 else hopper_grouped._FLOAT16_ASM
    text_of_zeros = hopper_grouped._BFLOAT16_ZEROS_ASM if is_bfloat16 else hopper_grouped._FLOAT16_ZEROS_ASM
    less = hopper_grouped._BFLOAT16_LESS if is_bfloat16 else hopper_grouped._FLOAT16_LESS
    zeros = run_assembly(text_of_zeros.value, {"$1": scale & 0xFFFFFFFF})["$0"]
    numbers = [0.0] * 128
    for place, word in enumerate(words.tolist()):
        t, u, v = place // 4, place // 2 % 2, place % 2
        for half in range(2):
            found = run_assembly(text.value, {"$4": (word & 0xFFFFFFFF) >> 8 * half, "$5": zeros})
            for i in range(4):  # neighbours, of two products
                column = 64 * half + i // 2 * 32 + u * 16 + v * 8 + t * 2 + i % 2
                numbers[column] = as_number(found[f"${i}"], dtype) * less.value
    return numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_words_become_numbers_in_the_order_of_columns(dtype):
    """Every code with every zero point, and at every place of a word."""
    generator = torch.Generator().manual_seed(0)
    for zero in (*range(17), 255):
        codes = torch.randint(0, 16, (1, 128), generator=generator)
        codes[0, zero % 16 :: 2] = torch.arange(128)[: codes[0, zero % 16 :: 2].numel()] % 16
        scale = int(pack_scales(torch.tensor([[0.75]]), torch.tensor([[zero]])).item())
        assert operand_of(pack_codes(codes, 4)[0], scale, dtype) == (codes - zero)[0].tolist()


@pytest.mark.parametrize("num_rows", [2, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256])
def test_tilings_on_hopper_cover_a_matrix_and_fit(num_rows):
    for out_features, in_features in (
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (128, 256),
        (1160, 3840),
    ):
        tiling = hopper_grouped.choose_grouped_tiling(num_rows, out_features, in_features)
        assert in_features % (hopper_grouped.STEP * tiling.split) == 0
        assert 1 <= tiling.stages <= in_features // (hopper_grouped.STEP * tiling.split)
        assert tiling.stages * (tiling.rows + 4 * tiling.tokens) * 128 < 226 * 1024
        assert 16 <= tiling.tokens <= 128 and (tiling.tokens >= num_rows or tiling.tokens == 128)


@pytest.mark.gpu
def test_rows_that_share_their_memory_are_taken(device):
    case = make(4, 256, 64, device, norm=False)
    case.hidden = case.hidden[:1].expand(4, -1)
    check(case, GroupedLinear)


@pytest.mark.parametrize("in_features, groups, is_taken", [
    (1024, 8, True), (1024, 16, True), (1024, 1, True), (1024, 32, False), (1152, 9, False), (1280, 4, False),
])  # fmt: skip
def test_which_matrices_are_decoded_in_registers(in_features, groups, is_taken, monkeypatch):
    monkeypatch.setattr(hopper_grouped, "is_hopper", lambda device: True)
    codes, scales = torch.empty(64, in_features // 8, dtype=torch.int32), torch.empty(64, groups, dtype=torch.int32)
    assert hopper_grouped.can_multiply(codes, scales, in_features) == is_taken
    assert not hopper_grouped.can_multiply(codes.t().contiguous().t(), scales, in_features)

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pelton_linear_oracle import ACTIVATIONS, assert_close, check, make_case, rms_norm

from pelton.builtin import pelton_fused_ops
from pelton.errors import ConfigError
from pelton.ops.interface import AddNormGatedLinearNeeds, LinearNeeds, LinearSpec, NormSpec, RowsToSend
from pelton.ops.selector import OpSelector
from pelton_backends.reference.ops import ReferenceAddNormGatedLinear, ReferenceAddNormLinear
from pelton_backends.triton.ops.linear.hopper_matmul import can_multiply_many, hopper_matmul, share_of_work
from pelton_backends.triton.ops.linear.large_batch import (
    LargeBatchAddNormGatedLinear,
    LargeBatchAddNormLinear,
    LargeBatchLinear,
    add_norm,
    gated,
)
from pelton_backends.triton.ops.linear.refusals import MAX_HIDDEN_SIZE
from pelton_backends.triton.ops.linear.small_batch import SmallBatchAddNormGatedLinear
from pelton_backends.triton.plugin import pelton_ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"residual": False}, id="first-layer"),
        pytest.param({"post_norm": True, "row_gap": 7}, id="post-norm"),
        pytest.param({"post_norm": True, "residual": False, "unit_offset": True}, id="post-norm-first-layer"),
        pytest.param({"unit_offset": True, "bias": True, "row_gap": 16}, id="unit-offset-bias"),
    ],
)
def test_add_norm_linear_follows_the_oracle(options, dtype, device):
    for rows, size in ((1, 64), (5, 100), (3, 257)):
        check(make_case(rows, size, 48, dtype, device, **options), LargeBatchAddNormLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_add_norm_gated_linear_follows_the_oracle(activation, dtype, device):
    check(make_case(5, 96, 2 * 75, dtype, device, activation=activation), LargeBatchAddNormGatedLinear)
    check(make_case(3, 64, 2 * 1030, dtype, device, activation=activation, bias=True), LargeBatchAddNormGatedLinear)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_follows_the_oracle(bias, dtype, device):
    check(make_case(5, 96, 50, dtype, device, norm=False, bias=bias, row_gap=8), LargeBatchLinear)


@pytest.mark.gpu  # Gluon has no interpreter
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("activation", [None, *sorted(ACTIVATIONS)], ids=str)
def test_hopper_matmul_follows_the_oracle(activation, dtype, device):
    halves = 1 if activation is None else 2
    for rows, size, out in (
        (1, 8, 16), (5, 64, 128), (193, 72, 144), (400, 200, 528), (64, 192, 256), (3000, 264, 1680)  # cut in all directions
    ):  # fmt: skip
        case = make_case(rows, size, halves * out, dtype, device, norm=False, row_gap=8 if rows == 400 else 0)
        if not can_multiply_many(case.weight):
            pytest.skip("Hopper only")
        result = hopper_matmul(case.hidden, case.weight, activation)
        assert_close(result, replace(case, activation=activation).expected()[0], "result", factor=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_many_rows(dtype, device):
    """2,112 rows are 11 tiles, by 12 columns of them one for each of 132 multiprocessors: `hopper_matmul` serves them."""
    assert share_of_work(2112, 3072, 320, 132) == share_of_work(2112, 3072, 320, 132, "silu") == 1.0
    check(make_case(2112, 320, 3072, dtype, device, activation="silu"), LargeBatchAddNormGatedLinear)
    check(make_case(2112, 320, 3072, dtype, device, post_norm=True), LargeBatchAddNormLinear)
    check(make_case(2112, 320, 3072, dtype, device, norm=False, row_gap=8), LargeBatchLinear)
    check(
        make_case(2112, 320, 3072, dtype, device, norm=False, row_gap=7), LargeBatchLinear
    )  # no rows for the copy engine


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
@pytest.mark.parametrize("rows", [193, 2600])
def test_last_tiles_with_two_programs_each(rows, activation, device):
    """Fewer tiles than half of 132 multiprocessors; a full round of them and 36 more."""
    columns = 528 if rows == 193 else 3072
    case = make_case(rows, 1224, columns, torch.bfloat16, device, norm=False)
    if not can_multiply_many(case.weight):
        pytest.skip("Hopper only")
    for _ in range(3):
        result = hopper_matmul(case.hidden, case.weight, activation)
        assert_close(result, replace(case, activation=activation).expected()[0], "result", factor=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("rows", [70, 1000, 2600])
def test_rows_are_sent_while_others_are_computed(rows, rank, device):
    """Here to the same device's memory. Every block of 64 rows that the other rank adds up has all its parts, in one of two places in turn,
    and no other has any; those of the next call are cleared."""
    case = make_case(rows, 1224, 3072, torch.bfloat16, device, norm=False)
    if not can_multiply_many(case.weight):
        pytest.skip("Hopper only")
    copies = [torch.zeros(2624, 3072, dtype=torch.bfloat16, device=device) for _ in range(2)]
    counts, own_counts = (
        torch.zeros(2, 64, dtype=torch.int32, device=device),
        torch.ones(2, 64, dtype=torch.int32, device=device),
    )
    calls = torch.zeros(2, dtype=torch.int32, device=device)
    sent = RowsToSend((copies[0][:rows], copies[1][:rows]), counts, own_counts, calls, rank, 384)
    is_theirs = torch.arange(2624, device=device) // 384 % 2 != rank
    is_sent = is_theirs & (torch.arange(2624, device=device) < rows)
    for call in range(3):
        counts.zero_()
        copies[call % 2].zero_()
        result = hopper_matmul(case.hidden, case.weight, None, sent)
        assert result.pelton_parts == 12 and calls.tolist() == [call + 1, 0]
        assert torch.equal(copies[call % 2][is_sent], result[is_theirs[:rows]]) and not copies[call % 2][~is_sent].any()
        blocks = -(-rows // 64)
        assert (
            torch.equal(counts[call % 2, :blocks], 12 * is_theirs[: 64 * blocks : 64])
            and not counts[1 - call % 2].any()
        )
        assert not own_counts[1 - call % 2].any()
        assert_close(result, case.expected()[0], "result", factor=2.0)


def test_share_of_work_counts_what_is_computed_for_nothing():
    assert share_of_work(192, 256, 512, 1) == 1.0
    assert share_of_work(96, 256, 512, 1) == 0.5  # half of the tile's rows
    assert share_of_work(192, 3 * 256, 512, 2) == 0.75  # three tiles in two rounds of two
    assert share_of_work(192, 3 * 256, 512, 2, "silu") == 0.75  # 384 columns, 128 a tile
    assert share_of_work(192, 3 * 256, 1024, 2) == 1.0  # the third tile's rows are long enough for a half each
    assert share_of_work(192, 6 * 256, 1024, 4) == 1.0
    assert share_of_work(192, 7 * 256, 1024, 4) == 7 / 8  # three tiles are too many for that


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations_hold_far_from_zero(activation, device):
    gate = torch.tensor([-1e4, -90.0, -20.0, -5.5, -1e-3, 0.0, 1e-3, 5.5, 20.0, 90.0, 1e4], device=device)
    out = gated(torch.cat([gate, torch.ones_like(gate)])[None], activation)[0]
    expected = ACTIVATIONS[activation](gate.cpu().double()).float()
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_exact_and_written_in_place(dtype, device):
    case = make_case(4, 200, 8, dtype, device, row_gap=3)
    residual = case.residual.clone()
    total, rows = add_norm(case.hidden, residual, case.norm, case.norm_spec)
    assert total.data_ptr() == residual.data_ptr()
    if dtype != torch.bfloat16 or device.type == "cuda":  # Triton's interpreter cuts bfloat16 off
        assert torch.equal(total.cpu(), case.hidden.cpu() + case.residual.cpu())
    assert_close(rows, rms_norm(total.cpu(), case.norm.cpu(), case.norm_spec), "normed rows")


def test_without_residual_and_post_norm_hidden_is_the_residual(device):
    case = make_case(4, 64, 8, torch.float32, device, residual=False)
    before = case.hidden.clone()
    total, _ = add_norm(case.hidden, None, case.norm, case.norm_spec)
    assert total is case.hidden
    assert torch.equal(total, before)


def test_no_rows(device):
    case = make_case(0, 64, 32, torch.float32, device, activation="silu")
    out, total = case.run(LargeBatchAddNormGatedLinear)
    assert out.shape == (0, 16) and total.shape == (0, 64)


def test_reduces_before_it_adds(device):
    """Over ranks the sum is `add_norm`'s, and the products behind it are those of one rank."""
    case = make_case(3, 64, 32, torch.float32, device)
    needs = replace(case.needs, tp_size=2)
    assert LargeBatchAddNormLinear.unsupported(needs) == ["tp_size 2: the sum over ranks is `add_norm`'s"]
    tensors = replace(case.tensors, reduce=lambda partial: partial.mul_(2))
    selector = OpSelector(pelton_ops("cuda"), pelton_fused_ops())
    with pytest.raises(ConfigError, match="No op for 'add_norm_linear' fits"):
        selector.bind("add_norm_linear", needs, tensors)
    out, total = case.call(ReferenceAddNormLinear.compose(needs, tensors, selector.bind))
    wanted, wanted_total = replace(case, hidden=case.hidden * 2).expected()
    assert_close(total, wanted_total, "residual'")
    assert_close(out, wanted, "result")
    assert [choice.names for choice in selector.choices] == [
        ("triton.add_norm",), ("triton_gemv.linear", "triton_cublas.linear"),
    ]  # fmt: skip


@pytest.mark.parametrize("in_one_launch", [False, True])
@pytest.mark.parametrize("implementation", [SmallBatchAddNormGatedLinear, LargeBatchAddNormGatedLinear])
def test_gated_products_of_several_ranks(implementation, in_one_launch, device):
    """One rank's product and activation, behind the sum over ranks: in a launch of its own, or in one with the norm. One row of a large
    matrix, and up to eight of a small one, are left to the ops that they are composed of."""
    case = make_case(9, 96, 2 * 75, torch.float16, device, activation="silu")
    needs = replace(case.needs, tp_size=2)
    assert implementation.unsupported(needs) == []
    assert implementation.token_range(needs)[0] == 9
    assert (
        implementation.token_range(replace(needs, linear=replace(needs.linear, in_features=4096, out_features=14336)))[
            0
        ]
        == 2
    )
    assert implementation.token_range(case.needs)[0] <= 1

    def reduce(partial):
        return partial * 2

    def sum_add_norm(hidden, residual, norm, spec, post_norm, post_spec):
        total, rows = add_norm(hidden * 2, residual, norm, spec, post_norm, post_spec)
        return rows, total

    if in_one_launch:
        reduce.add_norm = sum_add_norm
    out, total = case.call(implementation.bind(needs, replace(case.tensors, reduce=reduce)))
    wanted, wanted_total = replace(case, hidden=case.hidden * 2).expected()
    assert_close(total, wanted_total, "residual'")
    assert_close(out, wanted, "result", factor=2.0)


@pytest.mark.parametrize("options", [{}, {"post_norm": True}, {"residual": False}], ids=["plain", "post", "first"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_composed_of_its_parts_equals_float64(dtype, options, device):
    case = make_case(5, 64, 48, dtype, device, activation="silu", **options)
    selector = OpSelector(pelton_ops("cuda"), pelton_fused_ops())
    out, total = case.call(ReferenceAddNormGatedLinear.compose(case.needs, case.tensors, selector.bind))
    wanted, wanted_total = case.expected()
    assert_close(total, wanted_total, "residual'")
    assert_close(out, wanted, "result")


def test_refuses_with_reasons():
    spec = LinearSpec(in_features=2 * MAX_HIDDEN_SIZE, out_features=8, weight_format="int4")
    assert LargeBatchLinear.unsupported(LinearNeeds(dtype="float16", linear=spec)) == [
        "weight format 'int4', only 'plain'"
    ]
    needs = AddNormGatedLinearNeeds(
        dtype="float16", norm=NormSpec(size=2 * MAX_HIDDEN_SIZE, eps=1e-6), linear=spec, activation="relu"
    )
    assert len(LargeBatchAddNormGatedLinear.unsupported(needs)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden, out", [(1024, 6144), (4096, 4096), (5120, 2000), (16384, 512)])
def test_real_sizes(hidden, out, dtype, device):
    # cuBLAS may add up float32 in its own order over 16,384 terms.
    check(make_case(300, hidden, out, dtype, device, activation="silu", post_norm=True), LargeBatchAddNormGatedLinear)
    check(make_case(300, hidden, out, dtype, device, residual=False), LargeBatchAddNormLinear)


@pytest.mark.gpu
def test_rows_past_the_int32_range_of_elements(device):
    """Offsets are 64-bit: 2^31 numbers lie before the last rows."""
    gate_up = torch.empty((70_000, 2 * 16384), dtype=torch.bfloat16, device=device)
    gate_up[-3:] = torch.randn((3, 2 * 16384), device=device)
    out = gated(gate_up, "silu")
    assert torch.equal(out[-3:], gated(gate_up[-3:].clone(), "silu"))

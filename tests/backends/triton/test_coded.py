"""Products with codes of a table (nf4, fp4) against the float64 oracle with what the codes say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pelton_linear_oracle import TOLERANCES, Case, make_case

from pelton.ops.interface import LinearSpec, LinearWeights
from pelton_backends import code_tables
from pelton_backends.triton.ops.linear import coded, decoded
from pelton_backends.triton.ops.linear.coded import (
    FORMATS,
    CodedLinear,
    RowTile,
    Tiling,
)
from pelton_plugins.weight_forms import tables
from pelton_plugins.weight_forms.groups import GroupedLinearReference, dequantize

GROUP = 64


def packed(
    num_rows: int, num_cols: int, form: str, device: torch.device, bias: torch.Tensor | None = None
) -> LinearWeights:
    """Codes and scales by chance."""
    codes = torch.randint(0, 256, (num_rows, num_cols // 2), device=device).to(torch.uint8)
    scales = (torch.rand(num_rows, num_cols // GROUP, device=device) + 0.5) * num_cols**-0.5
    spec = LinearSpec(in_features=num_cols, out_features=num_rows, weight_format=form, has_bias=bias is not None)
    return LinearWeights(spec, {"codes": codes, "scales": scales}, bias)


def make(
    num_rows, in_features, out_features, device, form, dtype=torch.float16, **options
) -> tuple[Case, LinearWeights]:
    case = make_case(num_rows, in_features, out_features, dtype, device, norm=False, **options)
    weights = packed(out_features, in_features, form, device, case.bias)
    case.weight = dequantize(weights).to(dtype)
    return case, weights


def check(case: Case, weights: LinearWeights, implementation=CodedLinear) -> None:
    want, _ = case.expected()
    needs, arguments = replace(case.needs, linear=weights.spec), case.tensors
    arguments.linear = weights
    assert implementation.unsupported(needs) == []
    got, _ = case.call(implementation.bind(needs, arguments))
    relative, absolute = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, want, rtol=relative, atol=absolute)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 19])
def test_products_match_float64(form, num_rows, device):
    check(*make(num_rows, 256, 72, device, form))
    check(*make(num_rows, 192, 36, device, form, bias=True))  # blocks that fill no step


@pytest.mark.parametrize("form", FORMATS)
def test_the_reference_says_the_same(form, device):
    for num_rows in (1, 3):
        check(*make(num_rows, 128, 20, device, form, bias=True), GroupedLinearReference)


@pytest.mark.parametrize("form", FORMATS)
def test_programs_share_a_row_and_a_tile(form, device, monkeypatch):
    monkeypatch.setattr(coded, "choose_row_tile", lambda *_: RowTile(4, 128, 3))
    monkeypatch.setattr(coded, "choose_tiling", lambda *_: Tiling(16, 64, 128, 3, 2, 4))
    for num_rows in (1, 18):
        check(*make(num_rows, 832, 70, device, form, bias=True))


@pytest.mark.parametrize("form", FORMATS)
def test_many_rows_take_the_dequantized_matrix_in_parts(form, device, monkeypatch):
    monkeypatch.setattr(decoded, "NUMBERS_AT_ONCE", 2**13)
    monkeypatch.setattr(coded, "MAX_TOKENS", 4)
    check(*make(5, 128, 150, device, form, bias=True))


def test_numbers_are_decoded_to_the_bit(device):
    """By way of the matrix that is handed to cuBLAS: in float32."""
    for form in ("nf4", "fp4"):
        weights = packed(48, 320, form, device)
        assert torch.equal(coded.CodedMatrix(weights).dequantized(slice(0, 48), torch.float32), dequantize(weights))


def test_tables_of_backends_and_plugins_are_one():
    assert code_tables.TABLES == tables.TABLES
    assert all(len(set(table)) == 16 - (name == "fp4") for name, table in tables.TABLES.items())  # fp4 has two zeros


def test_refuses_with_reasons(device):
    needs = make(1, 128, 64, device, "nf4")[0].needs
    assert CodedLinear.unsupported(needs) == ["weight format 'plain', only nf4, fp4"]
    needs = replace(needs, dtype="float32", linear=replace(needs.linear, weight_format="nf4"))
    assert CodedLinear.unsupported(needs) == ["dtype float32, only bfloat16, float16"]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 2, 17, 100, 256, 300])
def test_large_matrices(form, num_rows, device):
    check(*make(num_rows, 4096, 1024, device, form, torch.bfloat16))

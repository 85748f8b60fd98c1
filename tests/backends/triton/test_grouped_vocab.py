"""Embedding and head in groups of 4 and 8 bits against what their codes say."""

from __future__ import annotations

import pytest
import torch
from pelton_linear_oracle import TOLERANCES, make_case, rms_norm

from pelton.ops.interface import (
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    EmbedNeeds,
    EmbedTensors,
    LinearSpec,
    LinearWeights,
)
from pelton_backends.triton.ops.linear.grouped_vocab import GroupedAddNormLogits, GroupedEmbed
from pelton_plugins.weight_forms.groups import (
    BITS,
    GroupedEmbedReference,
    dequantize,
    pack_codes,
    pack_minima,
    pack_scales,
)

FORMATS = list(BITS)


def packed(num_rows: int, num_cols: int, form: str, group: int, device: torch.device) -> LinearWeights:
    """Codes, scales, and zero points or minima by chance."""
    bits, shape = BITS[form], (num_rows, num_cols // group)
    codes = torch.randint(0, 2**bits, (num_rows, num_cols), device=device)
    scales = ((torch.rand(shape, device=device) + 0.5) * 2.0**-bits * num_cols**-0.5).half()
    if form.endswith("_minima"):
        words = pack_minima(scales, -scales * 2 ** (bits - 1) * torch.rand_like(scales))
    else:
        words = pack_scales(scales, torch.randint(0, 2**bits, shape, device=device))
    spec = LinearSpec(in_features=num_cols, out_features=num_rows, weight_format=form)
    return LinearWeights(spec, {"codes": pack_codes(codes, bits), "scales": words})


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_cols, group, scale", [(160, 32, None), (1280, 128, 33.941)])
def test_rows_of_the_embedding(form, num_cols, group, scale, device):
    weights = packed(19, num_cols, form, group, device)
    needs = EmbedNeeds(dtype="float16", num_rows=19, hidden_size=num_cols, weight_format=form, scale=scale)
    tensors = EmbedTensors(weights.tensors["codes"], 0, weights)
    ids = torch.tensor([18, 0, 3, 3, 7], device=device)
    want = dequantize(weights)[ids].half()
    want = want if scale is None else want * torch.tensor(scale).half().item()
    for op in (GroupedEmbed, GroupedEmbedReference):
        assert op.unsupported(needs) == []
        torch.testing.assert_close(op.bind(needs, tensors)(ids), want, rtol=1e-3, atol=1e-6)


def test_the_embeddings_reference_gives_zeros_for_rows_of_other_ranks(device):
    weights = packed(10, 64, "int8_minima", 32, device)
    needs = EmbedNeeds(dtype="float32", num_rows=10, hidden_size=64, weight_format="int8_minima", tp_size=2)
    found = GroupedEmbedReference.bind(needs, EmbedTensors(weights.tensors["codes"], 10, weights))(
        torch.tensor([3, 10, 19], device=device)
    )
    assert not found[0].any()
    torch.testing.assert_close(found[1:], dequantize(weights)[[0, 9]])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 3, 300])
def test_logits_match_float64(form, num_rows, device):
    soft_cap = 3.0 if num_rows == 3 else None
    case = make_case(num_rows + 4, 160, 96, torch.float16, device, post_norm=num_rows == 3)
    weights = packed(96, 160, form, 32, device)
    needs = AddNormLogitsNeeds(
        dtype="float16",
        norm=case.norm_spec,
        linear=weights.spec,
        vocab_size=90,
        post_norm=case.post_spec,
        soft_cap=soft_cap,
    )
    assert GroupedAddNormLogits.unsupported(needs) == []
    op = GroupedAddNormLogits.bind(needs, AddNormLogitsTensors(case.norm, weights, case.post_norm))
    rows = torch.randperm(num_rows + 4, device=device)[:num_rows]
    logits = op(case.hidden, case.residual, rows)
    assert logits.dtype == torch.float32 and logits.shape == (num_rows, 90)
    weight, case, rows = dequantize(weights).cpu().double(), case.to("cpu"), rows.cpu()
    x = case.hidden[rows]
    if case.post_norm is not None:
        x = rms_norm(x, case.post_norm, case.post_spec)
    x = (x.double() + case.residual[rows].double()).half()
    want = rms_norm(x, case.norm, case.norm_spec).double() @ weight[:90].T
    want = want if soft_cap is None else soft_cap * torch.tanh(want / soft_cap)
    relative, absolute = TOLERANCES[torch.float16]
    torch.testing.assert_close(logits.cpu().double(), want, rtol=relative, atol=absolute)

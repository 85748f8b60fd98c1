from __future__ import annotations

import pytest
import torch

from pelton.ops.interface import EmbedNeeds, EmbedTensors
from pelton_backends.reference.ops import ReferenceEmbed
from pelton_backends.triton.ops.embed import TritonEmbed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(implementation, weight, input_ids, scale=None):
    needs = EmbedNeeds(
        dtype=str(weight.dtype).removeprefix("torch."),
        num_rows=weight.shape[0],
        hidden_size=weight.shape[1],
        scale=scale,
    )
    assert implementation.unsupported(needs) == []
    return implementation.bind(needs, EmbedTensors(weight, 0))(input_ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, hidden_size", [(1, 64), (7, 33), (3, 1100)])
def test_gathers_rows_bit_for_bit(num_tokens, hidden_size, dtype, device):
    weight = torch.randn(19, hidden_size, device=device).to(dtype)
    input_ids = torch.randint(19, (num_tokens,), device=device)
    assert torch.equal(run(TritonEmbed, weight, input_ids), weight[input_ids])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_is_rounded_like_the_reference(dtype, device):
    weight = torch.randn(19, 65, device=device).to(dtype)
    input_ids = torch.tensor([18, 0, 3], device=device)
    actual, expected = (run(op, weight, input_ids, scale=33.941) for op in (TritonEmbed, ReferenceEmbed))
    if device.type == "cuda" or dtype != torch.bfloat16:
        assert torch.equal(actual, expected)
    else:  # Triton's interpreter cuts bfloat16 off where the device rounds
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)


def test_no_tokens(device):
    weight = torch.randn(4, 8, device=device)
    assert run(TritonEmbed, weight, torch.empty(0, dtype=torch.int64, device=device)).shape == (0, 8)


def test_ids_outside_stay_in_the_matrix(device):
    weight = torch.randn(4, 8, device=device)
    input_ids = torch.tensor([-1, 2**40], device=device)
    assert torch.equal(run(TritonEmbed, weight, input_ids), weight[[0, 3]])


def test_refuses_a_vocabulary_of_several_ranks():
    needs = EmbedNeeds(dtype="bfloat16", num_rows=4, hidden_size=8, tp_size=2)
    assert TritonEmbed.unsupported(needs) == ["a vocabulary split over ranks"]
    assert TritonEmbed.unsupported(EmbedNeeds(dtype="float8", num_rows=4, hidden_size=8))

"""Linear seams of one to eight rows against a float64 oracle."""

from __future__ import annotations

import pelton_linear_oracle as oracle
import pytest
import torch

from pelton_backends.triton.ops.gemv import GemvAddNormGatedLinear, GemvAddNormLinear, GemvLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEAMS = {
    "linear": (GemvLinear, {"norm": False}),
    "add_norm_linear": (GemvAddNormLinear, {}),
    "add_norm_gated_linear": (GemvAddNormGatedLinear, {"activation": "silu"}),
}
seams = pytest.mark.parametrize("seam", SEAMS)


@seams
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
def test_matches_float64(seam, dtype, num_rows, device):
    implementation, kind = SEAMS[seam]
    oracle.check(oracle.make_case(num_rows, 64, 40, dtype, device, **kind), implementation)


@seams
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(
    "in_features, out_features",
    [
        pytest.param(200, 6, id="inputs-not-whole-pieces"),
        pytest.param(33, 26, id="odd-row-length"),
        pytest.param(1, 2, id="one-column"),
        pytest.param(2052, 22, id="several-pieces"),
    ],
)
def test_odd_sizes(seam, num_rows, in_features, out_features, device):
    implementation, kind = SEAMS[seam]
    oracle.check(oracle.make_case(num_rows, in_features, out_features, torch.float32, device, **kind), implementation)

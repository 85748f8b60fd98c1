"""Linear seams of one to eight rows against a float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pelton_linear_oracle as oracle
import pytest
import torch

from pelton_backends.triton.ops.linear import gemv
from pelton_backends.triton.ops.linear.gemv import GemvAddNormGatedLinear, GemvAddNormLinear, GemvLinear, choose_tile

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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_row_of_a_large_matrix(seam, dtype, device, monkeypatch):
    monkeypatch.setattr(gemv, "LARGE_BYTES", 0)
    implementation, kind = SEAMS[seam]
    assert not gemv.choose_tile(40, 96, 1, 2).DOT
    oracle.check(oracle.make_case(1, 96, 40, dtype, device, **kind), implementation)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"residual": False}, id="first-layer"),
        pytest.param({"bias": True}, id="bias"),
        pytest.param({"unit_offset": True, "row_gap": 8}, id="unit-offset-strided"),
        pytest.param({"post_norm": True, "row_gap": 3}, id="post-norm-strided"),
        pytest.param({"post_norm": True, "residual": False, "unit_offset": True}, id="post-norm-first-layer"),
    ],
)
def test_options(options, dtype, device):
    for seam in ("add_norm_linear", "add_norm_gated_linear"):
        implementation, kind = SEAMS[seam]
        oracle.check(oracle.make_case(3, 96, 20, dtype, device, **kind, **options), implementation)


@pytest.mark.parametrize("activation", sorted(oracle.ACTIVATIONS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(activation, dtype, device):
    case = oracle.make_case(2, 64, 34, dtype, device, activation=activation, bias=True)
    case.bias *= 4  # into the tails
    oracle.check(case, GemvAddNormGatedLinear)


def test_linear_with_bias_of_strided_rows(device):
    oracle.check(oracle.make_case(3, 64, 40, torch.float32, device, norm=False, bias=True, row_gap=5), GemvLinear)


@seams
def test_inputs_are_left_as_they_are(seam, device):
    """Programs read the old residual while the first of them stores the new one."""
    implementation, kind = SEAMS[seam]
    case = oracle.make_case(4, 64, 40, torch.float32, device, **kind)
    before = [t.clone() for t in (case.hidden, case.residual, case.weight) if t is not None]
    call = implementation.bind(case.needs, case.tensors)
    call(case.hidden) if seam == "linear" else call(case.hidden, case.residual)
    for after, old in zip([t for t in (case.hidden, case.residual, case.weight) if t is not None], before, strict=True):
        assert torch.equal(after, old)


@seams
def test_serves_few_rows_of_one_rank(seam, device):
    implementation, kind = SEAMS[seam]
    needs = oracle.make_case(1, 64, 40, torch.bfloat16, device, **kind).needs
    assert implementation.token_range(needs) == (1, 8)
    large = replace(needs.linear, in_features=4096, out_features=28672)
    assert implementation.token_range(replace(needs, linear=large)) == (1, 1)
    assert implementation.unsupported(needs) == []
    assert implementation.unsupported(replace(needs, dtype="float64"))
    assert implementation.unsupported(replace(needs, linear=replace(needs.linear, weight_format="fp8")))
    if seam != "linear":
        assert implementation.unsupported(replace(needs, tp_size=2)) == [
            "tp_size 2: the sum over ranks is `add_norm`'s"
        ]
    if seam == "add_norm_gated_linear":
        assert implementation.unsupported(replace(needs, activation="relu")) == ["activation 'relu'"]


@pytest.mark.parametrize("in_features", [896, 1024, 2048, 3072, 4096, 5120, 8192, 14336, 16384, 53248])
@pytest.mark.parametrize("num_rows", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_cover_the_columns_once(dtype, num_rows, in_features):
    for out_features in (64, 1024, 4096, 14336, 151936):
        for num_matrices in (1, 2):
            tile = choose_tile(out_features, in_features, num_rows, dtype.itemsize, num_matrices)
            chunk = tile.W * tile.C * 32
            assert (tile.NUM - 1) * chunk < in_features <= tile.NUM * chunk
            assert 1 <= tile.AHEAD <= tile.NUM
            assert tile.R % num_matrices == 0
            assert tile.R % 8 == 0 or not tile.DOT


LARGE = [
    pytest.param(GemvAddNormLinear, 1024, 4096, {}, id="0.6B-qkv"),
    pytest.param(GemvLinear, 2048, 1024, {"norm": False}, id="0.6B-o"),
    pytest.param(GemvAddNormGatedLinear, 1024, 6144, {"activation": "silu"}, id="0.6B-gate-up"),
    pytest.param(GemvLinear, 3072, 1024, {"norm": False}, id="0.6B-down"),
    pytest.param(GemvAddNormLinear, 4096, 6144, {}, id="8B-qkv"),
    pytest.param(GemvLinear, 4096, 4096, {"norm": False}, id="8B-o"),
    pytest.param(GemvAddNormGatedLinear, 4096, 28672, {"activation": "silu"}, id="8B-gate-up"),
    pytest.param(GemvLinear, 14336, 4096, {"norm": False}, id="8B-down"),
    pytest.param(GemvAddNormLinear, 8192, 10240, {"bias": True}, id="70B-qkv"),
    pytest.param(GemvAddNormLinear, 2304, 4096, {"post_norm": True, "unit_offset": True}, id="gemma-2b-qkv"),
    pytest.param(GemvAddNormGatedLinear, 896, 9728, {"activation": "gelu_tanh", "row_gap": 64}, id="0.5B-gate-up"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation, in_features, out_features, options", LARGE)
@pytest.mark.parametrize(
    "num_rows, dtype", [(1, torch.bfloat16), (2, torch.bfloat16), (3, torch.float16), (8, torch.bfloat16)]
)
def test_large_shapes(implementation, in_features, out_features, options, num_rows, dtype, device):
    oracle.check(oracle.make_case(num_rows, in_features, out_features, dtype, device, **options), implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_a_captured_chain_repeats_bit_for_bit(num_rows, device):
    """Four kernels a layer in a CUDA graph with dependent launch: a read or write too early would show as a change."""
    layers = []
    for index in range(12):
        options = {"num_rows": num_rows, "dtype": torch.bfloat16, "device": device, "seed": index}
        cases = (
            oracle.make_case(in_features=1024, out_features=2048, **options),
            oracle.make_case(in_features=2048, out_features=1024, norm=False, **options),
            oracle.make_case(in_features=1024, out_features=6144, activation="silu", **options),
            oracle.make_case(in_features=3072, out_features=1024, norm=False, **options),
        )
        kinds = (GemvAddNormLinear, GemvLinear, GemvAddNormGatedLinear, GemvLinear)
        layers.append([kind.bind(case.needs, case.tensors) for kind, case in zip(kinds, cases, strict=True)])
    start = torch.randn(num_rows, 1024, dtype=torch.bfloat16, device=device)

    def step():
        hidden, residual = start, None
        for qkv, o, gate_up, down in layers:
            mixed, residual = qkv(hidden, residual)
            gated, residual = gate_up(o(mixed), residual)
            hidden = down(gated)
        return hidden, residual

    expected = []
    hidden, residual = start, None
    for qkv, o, gate_up, down in layers:  # one kernel at a time
        mixed, residual = qkv(hidden, residual)
        torch.cuda.synchronize()
        attended = o(mixed)
        torch.cuda.synchronize()
        gated, residual = gate_up(attended, residual)
        torch.cuda.synchronize()
        hidden = down(gated)
        torch.cuda.synchronize()
    expected = [hidden.clone(), residual.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(200):
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(result, wanted) for result, wanted in zip(results, expected, strict=True))

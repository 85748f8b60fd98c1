"""Triton's ops of a dense layer by the suite that strangers' ops are tested with, and e4m3 weights by a reference of their own."""

from __future__ import annotations

import pytest
import torch

from pelton.ops.interface import FUSED_OPS, InputRounding, LinearSpec, LinearWeights
from pelton.testing.ops import OpConformance, op_cases
from pelton_backends.triton.ops import embed, logits
from pelton_backends.triton.ops.linear import fp8, gemv, large_batch, small_batch
from pelton_plugins.quantization.numbers import round_rows, row_scales
from pelton_plugins.quantization.reference import Fp8LinearReference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class OnDevice(OpConformance):
    dtype = "float16"
    device = DEVICE


def conformance(op_name, implementation_class, least):
    class Suite(OnDevice):
        op = FUSED_OPS[op_name]
        implementation = implementation_class
        least_served = least

    return Suite


TestEmbed = conformance("embed", embed.TritonEmbed, 3)
TestAddNorm = conformance("add_norm", large_batch.TritonAddNorm, 6)
TestGated = conformance("gated", large_batch.TritonGated, 3)
TestGemvLinear = conformance("linear", gemv.GemvLinear, 4)
TestSmallBatchAddNormLinear = conformance("add_norm_linear", small_batch.SmallBatchAddNormLinear, 6)
TestLargeBatchAddNormGatedLinear = conformance("add_norm_gated_linear", large_batch.LargeBatchAddNormGatedLinear, 12)
TestLogits = conformance("add_norm_logits", logits.TritonAddNormLogits, 12)


def e4m3_weights(in_features, out_features, has_bias):
    generator = torch.Generator().manual_seed(in_features + out_features)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    scales = row_scales(weight)
    inputs = InputRounding(dtype="float8_e4m3fn")
    spec = LinearSpec(
        in_features=in_features, out_features=out_features, weight_format="fp8_e4m3", has_bias=has_bias, inputs=inputs
    )
    tensors = {"weight": round_rows(weight, scales).to(DEVICE), "weight_scale": scales.to(DEVICE)}
    bias = torch.randn(out_features, generator=generator).half().to(DEVICE) if has_bias else None
    return LinearWeights(spec, tensors, bias)


class TestFp8Linear(OnDevice):
    op = FUSED_OPS["linear"]
    implementation = fp8.Fp8Linear
    least_served = 6

    def cases(self):
        return op_cases("linear", self.dtype, self.device, weights=e4m3_weights)

    def reference(self):
        return Fp8LinearReference


class Wrong(gemv.GemvLinear):
    """Forgets the bias, and says that it does not."""

    @staticmethod
    def bind(needs, tensors):
        return lambda x: x @ tensors.linear.tensors["weight"].T


def test_the_suite_finds_what_is_wrong():
    suite = conformance("linear", Wrong, 4)()
    with pytest.raises(AssertionError, match=r"1 x 96 x 64, bias True, first call"):
        suite.test_gives_what_the_reference_gives()

    class Misspelt(gemv.GemvLinear):
        handles = frozenset(["has_bais"])

    with pytest.raises(AssertionError, match=r"\['has_bais'\], which no need is called"):
        conformance("linear", Misspelt, 1)().test_names_only_needs_that_there_are()
    with pytest.raises(AssertionError, match="0 cases are served, at least 1"):
        type("Refusing", (conformance("linear", Wrong, 1),), {"dtype": "float64"})().served()

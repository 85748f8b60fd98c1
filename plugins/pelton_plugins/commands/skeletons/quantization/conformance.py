"""Conformance of this package's quantization method."""

from __future__ import annotations

from pelton.testing.model import QuantizationConformance

from pelton_skeleton.method import SkeletonWeights


class TestSkeletonWeights(QuantizationConformance):
    factory = SkeletonWeights
    tolerance = 0.1

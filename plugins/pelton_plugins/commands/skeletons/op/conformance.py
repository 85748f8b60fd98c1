"""Conformance of this package's op."""

from __future__ import annotations

from pelton.ops.interface import FUSED_OPS
from pelton.testing.ops import OpConformance

from pelton_skeleton.ops import SkeletonGated


class TestSkeletonGated(OpConformance):
    op = FUSED_OPS["gated"]
    implementation = SkeletonGated

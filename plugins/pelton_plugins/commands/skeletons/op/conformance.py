"""Conformance of this package's op and its settings."""

from __future__ import annotations

from pelton.ops.interface import FUSED_OPS
from pelton.testing.ops import OpConformance
from pelton.testing.settings import SettingsConformance

from pelton_skeleton.ops import SkeletonGated
from pelton_skeleton.settings import SkeletonSettings


class TestSkeletonGated(OpConformance):
    op = FUSED_OPS["gated"]
    implementation = SkeletonGated(SkeletonSettings())


class TestSkeletonGatedOfSmallSteps(OpConformance):
    op = FUSED_OPS["gated"]
    implementation = SkeletonGated(SkeletonSettings(most_tokens=1))


class TestSkeletonSettings(SettingsConformance):
    settings_class = SkeletonSettings

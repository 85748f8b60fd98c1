"""Conformance of this package's platform."""

from __future__ import annotations

from pelton.testing.platform import PlatformConformance

from pelton_skeleton.platform import SkeletonPlatform


class TestSkeletonPlatform(PlatformConformance):
    platform_class = SkeletonPlatform

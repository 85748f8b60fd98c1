"""Conformance of this package's settings."""

from __future__ import annotations

from pelton.testing.settings import SettingsConformance

from pelton_skeleton.settings import SkeletonSettings


class TestSkeletonSettings(SettingsConformance):
    settings_class = SkeletonSettings

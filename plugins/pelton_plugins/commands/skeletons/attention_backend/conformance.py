"""Conformance of this package's attention backend and its settings."""

from __future__ import annotations

from pelton.config import EngineConfig
from pelton.testing.attention import AttentionBackendConformance
from pelton.testing.settings import SettingsConformance

from pelton_skeleton.attention import SkeletonBackend
from pelton_skeleton.settings import SkeletonSettings


class TestSkeletonBackend(AttentionBackendConformance):
    backend = SkeletonBackend


class TestSkeletonBackendInPieces(AttentionBackendConformance):
    backend = SkeletonBackend.configured(EngineConfig.from_flat(plugin_config={"skeleton": {"scores_kib": 1}}))


class TestSkeletonSettings(SettingsConformance):
    settings_class = SkeletonSettings

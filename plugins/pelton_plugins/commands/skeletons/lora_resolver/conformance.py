"""Conformance of this package's LoRA resolver and its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pelton.config import EngineConfig
from pelton.lora.resolver import LoRAResolver, ResolverContext
from pelton.testing.lora_resolver import LoRAResolverConformance
from pelton.testing.settings import SettingsConformance

from pelton_skeleton.resolver import SkeletonResolver, SkeletonSettings


class TestSkeletonResolver(LoRAResolverConformance):
    known_name = "sql"

    def make_resolver(self, context: ResolverContext, folder: Path) -> LoRAResolver:
        config = EngineConfig.from_flat(plugin_config={"skeleton": {"adapters": {"sql": str(folder)}}})
        return SkeletonResolver(replace(context, config=config))


class TestSkeletonSettings(SettingsConformance):
    settings_class = SkeletonSettings

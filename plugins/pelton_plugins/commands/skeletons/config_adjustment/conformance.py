"""Conformance of this package's adjustments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pelton.config import EngineConfig
from pelton.testing.settings import AdjustmentConformance

from pelton_skeleton.plugin import pelton_config_adjustments


class TestSkeletonAdjustments(AdjustmentConformance):
    settings = {"enable_prefix_caching": False}  # noqa: RUF012

    def adjustments(self, config: EngineConfig) -> Mapping[str, tuple[Any, str]]:
        return pelton_config_adjustments(config)

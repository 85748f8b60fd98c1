"""Conformance of this package's client of several engines."""

from __future__ import annotations

from pelton.testing.engine_client import EngineClientConformance


class TestSkeletonClient(EngineClientConformance):
    load = "pelton_skeleton.client:SkeletonClient"

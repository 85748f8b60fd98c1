"""Conformance of this package's model source."""

from __future__ import annotations

from pathlib import Path

from pelton.testing.model_source import ModelSourceConformance

from pelton_skeleton.source import find


class TestSkeletonSource(ModelSourceConformance):
    source = staticmethod(find)

    def known(self, folder: Path) -> str:
        return f"skeleton://{folder}"

    def refused(self, folder: Path) -> str:
        return f"skeleton://{folder}/not-there"

"""Conformance of this package's command."""

from __future__ import annotations

from pelton.testing.command import CommandConformance

from pelton_skeleton.command import run


class TestSkeletonCommand(CommandConformance):
    run = staticmethod(run)
    good = ("you", "--times", "2")

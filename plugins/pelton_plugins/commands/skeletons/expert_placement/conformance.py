"""Conformance of this package's placement of experts."""

from __future__ import annotations

from pelton.testing.expert_placement import ExpertPlacementConformance

from pelton_skeleton.placement import SkeletonPlacement


class TestSkeletonPlacement(ExpertPlacementConformance):
    policy_class = SkeletonPlacement

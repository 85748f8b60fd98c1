"""Conformance of this package's scheduling policy."""

from __future__ import annotations

from pelton.testing.scheduling_policy import SchedulingPolicyConformance

from pelton_skeleton.policy import SkeletonPolicy


class TestSkeletonPolicy(SchedulingPolicyConformance):
    policy_class = SkeletonPolicy

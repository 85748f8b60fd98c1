"""Conformance of this package's executor."""

from __future__ import annotations

from pelton.testing.executor import ExecutorConformance

from pelton_skeleton.executor import SkeletonExecutor


class TestSkeletonExecutor(ExecutorConformance):
    executor_class = SkeletonExecutor

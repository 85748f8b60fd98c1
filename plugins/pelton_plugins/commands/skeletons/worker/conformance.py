"""Conformance of this package's worker."""

from __future__ import annotations

from pelton.testing.worker import WorkerConformance

from pelton_skeleton.worker import SkeletonWorker


class TestSkeletonWorker(WorkerConformance):
    worker_class = SkeletonWorker

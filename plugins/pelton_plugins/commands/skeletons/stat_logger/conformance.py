"""Conformance of this package's stat logger."""

from __future__ import annotations

from pelton.testing.stat_logger import StatLoggerConformance

from pelton_skeleton.logger import SkeletonLogger


class TestSkeletonLogger(StatLoggerConformance):
    logger_class = SkeletonLogger

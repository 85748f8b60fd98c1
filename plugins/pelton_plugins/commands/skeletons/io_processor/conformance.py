"""Conformance of this package's IO processor."""

from __future__ import annotations

from typing import Any

from pelton.pooling.io_processor import IOProcessor, IOProcessorContext
from pelton.testing.io_processor import IOProcessorConformance

from pelton_skeleton.processor import SkeletonProcessor


class TestSkeletonProcessor(IOProcessorConformance):
    good_data = {"token_ids": [5, 6, 7]}  # noqa: RUF012
    bad_data = (None, {}, {"token_ids": []}, {"token_ids": [-1]}, {"token_ids": [10**9]}, {"token_ids": ["x"]})

    def make_processor(self, context: IOProcessorContext) -> IOProcessor[Any, Any]:
        return SkeletonProcessor(context)

"""Conformance of this package's logits processor."""

from __future__ import annotations

from pelton.testing.logits_processor import LogitsProcessorConformance

from pelton_skeleton.processor import SkeletonProcessor


class TestSkeletonProcessor(LogitsProcessorConformance):
    processor_class = SkeletonProcessor
    good_args = ({"token_ids": [1, 2]}, {"token_ids": [3], "count": 4})
    bad_args = (
        None,
        {},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [1], "count": 0},
        {"token_ids": [1], "n": 2},
    )

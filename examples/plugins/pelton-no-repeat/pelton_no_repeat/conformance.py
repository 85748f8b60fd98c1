"""Conformance of this package's logits processor."""

from __future__ import annotations

from pelton.testing.logits_processor import LogitsProcessorConformance
from pelton_no_repeat.processor import NoRepeat


class TestNoRepeat(LogitsProcessorConformance):
    processor_class = NoRepeat
    good_args = (1, 2, 3)
    bad_args = (0, -1, 65, "2", None, 1.5, True, [2])

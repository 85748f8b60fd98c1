"""Conformance of this package's structured-output backend."""

from __future__ import annotations

from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.structured_output import StructuredOutputConformance

from pelton_skeleton.grammar import SkeletonBackend


class TestSkeletonBackend(StructuredOutputConformance):
    backend = SkeletonBackend
    good = (StructuredOutputsParams(choice=["yes", "no", "not sure"]), StructuredOutputsParams(choice=["The server"]))
    bad = (StructuredOutputsParams(regex="[a-z]+"),)

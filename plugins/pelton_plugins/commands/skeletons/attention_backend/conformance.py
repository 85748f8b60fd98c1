"""Conformance of this package's attention backend."""

from __future__ import annotations

from pelton.testing.attention import AttentionBackendConformance

from pelton_skeleton.attention import SkeletonBackend


class TestSkeletonBackend(AttentionBackendConformance):
    backend = SkeletonBackend

"""Conformance of this package's kind of KV cache."""

from __future__ import annotations

from pelton.testing.cache_specs import CacheSpecConformance

from pelton_skeleton.cache import KIND, SkeletonSpec


class TestSkeletonSpec(CacheSpecConformance):
    specs = (SkeletonSpec(block_size=4, num_kv_heads=2, head_dim=8, dtype="float32", sliding_window=6),)
    managers = (KIND,)

"""Conformance of KV-cache specs: what any kind of cache has to keep, with the manager of its blocks, run with pytest.

Subclass `CacheSpecConformance` in a test module and set `specs`; a plugin sets `managers` too, to what its
`pelton_kv_cache_specs` entries load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from pelton.config.kv_cache import KVCacheConfig
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import NULL_BLOCK, KVManagerContext
from pelton.kv_cache.planner import plan_kv_cache
from pelton.kv_cache.spec import KVCacheSpec
from pelton.kv_cache.views import KVLayout
from pelton.testing.kv_cache import SimulatedRequest
from pelton.testing.plugins import built_in

NUM_BLOCKS = 5


class CacheSpecConformance:
    """The suite. Set `specs`, small ones of the kind."""

    specs: ClassVar[Sequence[KVCacheSpec]]
    managers: ClassVar[Sequence[tuple[type[KVCacheSpec], type[Any]]]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", self.specs, ids=lambda spec: type(spec).__name__)

    def test_it_is_a_value(self, spec: KVCacheSpec) -> None:
        """Layers with equal needs share a group."""
        assert spec == spec.with_block_size(spec.block_size) and hash(spec) == hash(
            spec.with_block_size(spec.block_size)
        )
        assert spec.page_size_bytes > 0

    def test_a_page_follows_the_block_size_or_is_padded(self, spec: KVCacheSpec) -> None:
        if spec.has_fixed_page:
            assert spec.with_page_size(spec.page_size_bytes + 64).page_size_bytes == spec.page_size_bytes + 64
        else:
            assert spec.with_block_size(3 * spec.block_size).page_size_bytes == 3 * spec.page_size_bytes

    @pytest.mark.parametrize("heads_first", [False, True])
    def test_views_of_a_block_lie_in_its_page_and_apart(self, spec: KVCacheSpec, heads_first: bool) -> None:
        memory = torch.zeros(NUM_BLOCKS * spec.page_size_bytes, dtype=torch.uint8)
        views = spec.views(memory, NUM_BLOCKS, KVLayout(heads_first=heads_first))
        assert isinstance(views, tuple) and views
        written = torch.zeros_like(memory, dtype=torch.bool)
        for view in views:
            assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr(), "a copy, not a view"
            per_block, left = divmod(view.shape[0], NUM_BLOCKS)
            assert per_block and not left, "the first axis is of blocks"
            for block in range(NUM_BLOCKS):
                memory.zero_()
                view[block * per_block : (block + 1) * per_block].copy_(torch.ones((), dtype=view.dtype))
                touched = memory != 0
                page = touched[block * spec.page_size_bytes : (block + 1) * spec.page_size_bytes]
                assert page.any() and page.sum() == touched.sum(), f"block {block} is written outside its page"
                assert not (written & touched).any(), "two views share bytes"
                written |= touched

    def test_requests_hold_no_more_blocks_than_it_says(self, spec: KVCacheSpec) -> None:
        manager, most, chunk = self._manager(spec), 6 * spec.block_size, max(spec.block_size // 2, 1)
        assert spec.max_blocks(0) == 0
        request = SimulatedRequest("a", list(range(most)), most)
        num_free = manager.num_free_blocks
        for computed in range(0, most, chunk):
            request.num_computed_tokens = request.num_confirmed_tokens = computed
            assert manager.allocate(request, min(chunk, most - computed)) is not None
            held = num_free - manager.num_free_blocks
            assert held <= spec.max_blocks(most, chunk) <= spec.max_blocks(most)
        manager.free("a")
        assert manager.num_free_blocks == num_free

    def test_what_is_found_again_is_what_was_written(self, spec: KVCacheSpec) -> None:
        """The blocks that the next token reads are those that the first request filled."""
        manager, num_tokens = self._manager(spec), 4 * spec.block_size
        hasher = BlockHasher("sha256", manager.plan.hash_block_size)
        first, second = (SimulatedRequest(name, [7] * (num_tokens + 1), num_tokens + 1) for name in "ab")
        for request in (first, second):
            hasher.extend(request.block_hashes, request.token_ids)
        assert manager.allocate(first, num_tokens + 1) is not None
        (written,) = manager.block_ids("a")
        (found,), num_found = manager.lookup(second)
        assert num_found <= num_tokens, "the last token is computed"
        if num_found:
            places = [place for place, block in enumerate(found) if block != NULL_BLOCK]
            assert [found[place] for place in places] == [written[place] for place in places]
            assert len(found) == num_found // spec.block_size
        assert manager.allocate(
            second, num_tokens + 1 - num_found, cached_blocks=(found,), num_cached_tokens=num_found
        ) is not None  # fmt: skip
        manager.free("a")
        manager.free("b")

    def _manager(self, spec: KVCacheSpec) -> Any:
        max_model_len = 8 * spec.block_size
        plan = plan_kv_cache({"layer": spec}, 0, num_blocks_override=64, max_model_len=max_model_len)
        return built_in("pelton_kv_cache_managers")(
            KVManagerContext(
                plan=plan, config=KVCacheConfig(), max_model_len=max_model_len, extra_managers=self.managers
            )
        )

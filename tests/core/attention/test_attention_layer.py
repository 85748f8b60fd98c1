"""What an attention layer binds when it is made and when the pool is."""

import pytest
import torch

import pelton_backends.sdpa.plugin
from pelton.attention.kv_cache import bind_kv_cache
from pelton.errors import ConfigError
from pelton.kv_cache.spec import FullAttentionSpec, KVCacheGroup, KVCachePlan, KVCacheTensor, SlidingWindowSpec
from pelton.layers.attention import AttentionLayer
from pelton.testing.model_driver import make_test_build
from pelton.testing.plugins import plugins_of

PLUGINS = plugins_of(pelton_backends.sdpa.plugin)


@pytest.fixture
def build():
    return make_test_build({}, PLUGINS, block_size=8, kv_dtype="bfloat16")


def layer(build, name, **fields):
    return AttentionLayer(4, 2, 16, config=build, prefix=name, rope=None, **fields)


def test_it_registers_under_its_name_and_says_what_it_needs_of_the_cache(build):
    full, local = layer(build, "l0"), layer(build, "l1", sliding_window=32)
    assert build.attention_layers == {"l0": full, "l1": local}
    assert full.kv_spec() == FullAttentionSpec(block_size=8, num_kv_heads=2, head_dim=16, dtype="bfloat16")
    assert local.kv_spec() == SlidingWindowSpec(
        block_size=8, num_kv_heads=2, head_dim=16, dtype="bfloat16", sliding_window=32
    )
    assert (full.scale, full.needs.kv_dtype, local.needs.sliding_window) == (0.25, "bfloat16", 32)
    with pytest.raises(ConfigError, match="Two attention layers are named 'l0'"):
        layer(build, "l0")


def test_layers_of_different_groups_share_a_buffer_and_each_group_has_one_backend(build):
    layers = [layer(build, "full.0"), layer(build, "sw.0", sliding_window=32), layer(build, "sw.1", sliding_window=32)]
    specs = [each.kv_spec() for each in layers]
    size = 6 * specs[0].page_size_bytes
    plan = KVCachePlan(
        6,
        (KVCacheTensor(size, ("full.0", "sw.0")), KVCacheTensor(size, ("sw.1",))),
        (KVCacheGroup(("full.0",), specs[0]), KVCacheGroup(("sw.0", "sw.1"), specs[1])),
    )
    backends = bind_kv_cache(plan, build)
    full, first, second = layers
    assert [each.group_id for each in layers] == [0, 1, 1]
    assert full.backend is backends[0] and first.backend is second.backend is backends[1]
    assert full.k_cache.data_ptr() == first.k_cache.data_ptr() != second.k_cache.data_ptr()
    assert not full.k_cache.any() and full.k_cache.dtype == torch.bfloat16


def test_a_planner_may_raise_the_block_size_of_a_group(build):
    one = layer(build, "l0")
    spec = one.kv_spec().with_block_size(24)
    plan = KVCachePlan(4, (KVCacheTensor(4 * spec.page_size_bytes, ("l0",)),), (KVCacheGroup(("l0",), spec),))
    (backend,) = bind_kv_cache(plan, build)
    assert one.k_cache.shape == (4, 24, 2, 16) and backend.needs.block_size == 24


def test_unknown_kv_dtype_is_refused_with_the_backends_reason():
    with pytest.raises(ConfigError, match=r"sdpa \(priority 10\): kv dtype int4"):
        layer(make_test_build({}, PLUGINS, kv_dtype="int4"), "l0")

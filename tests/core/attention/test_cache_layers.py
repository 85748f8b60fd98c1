"""Layers with a cache: sets of metadata, shared caches, and what is said of layers that do not fit."""

from __future__ import annotations

import pytest
import torch

import pelton_backends.sdpa.plugin
from pelton.attention.cache_layer import CacheLayer
from pelton.attention.interface import KVLayout
from pelton.attention.kv_cache import bind_caches, cache_specs
from pelton.attention.metadata import ForwardBatch
from pelton.attention.selector import AttentionSelector
from pelton.entries import BackendEntry
from pelton.errors import ConfigError
from pelton.kv_cache.planner import plan_kv_cache
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.layers.attention import AttentionLayer
from pelton.testing.graphs import StaticAttention
from pelton.testing.model_driver import make_test_build
from pelton.testing.paged_rows import step_metadata
from pelton.testing.plugins import plugins_of

PLUGINS = plugins_of(pelton_backends.sdpa.plugin)


@pytest.fixture
def build():
    return make_test_build({}, PLUGINS, block_size=8)


def layer(build, name, num_kv_heads=2, **fields):
    return AttentionLayer(4, num_kv_heads, 16, config=build, prefix=name, rope=None, **fields)


def bind(build, num_blocks=6, **options):
    plan = plan_kv_cache(
        cache_specs(build), 0, num_blocks_override=num_blocks, max_model_len=build.block_size, **options
    )
    return plan, bind_caches(plan, build)


def test_layers_of_one_group_have_metadata_by_what_their_builders_read(build):
    layers = [layer(build, "a"), layer(build, "b"), layer(build, "draft", num_kv_heads=1), layer(build, "c")]
    plan, bound = bind(build)
    assert len(plan.groups) == 1
    assert [one.metadata_index for one in layers] == [0, 0, 1, 0]
    assert [(backend.group_id, backend.needs.num_kv_heads) for backend in bound.backends] == [(0, 2), (0, 1)]
    assert layers[2].k_cache.shape == (6, 8, 1, 16) and layers[3].k_cache.shape == (6, 8, 2, 16)
    assert all(isinstance(one, CacheLayer) for one in layers)


def test_windowed_and_full_layers_of_one_group_have_metadata_of_their_own(build):
    full, local = layer(build, "full"), layer(build, "local", sliding_window=8)
    plan, bound = bind(build, disable_hybrid=True)
    assert len(plan.groups) == 1 and [backend.needs.sliding_window for backend in bound.backends] == [None, 8]
    assert (full.metadata_index, local.metadata_index) == (0, 1)


def test_a_layer_that_shares_a_cache_reads_it_and_writes_nothing(build):
    own, reader = layer(build, "own"), layer(build, "reader", shares="own")
    assert set(cache_specs(build)) == {"own"}
    _, bound = bind(build)
    assert reader.k_cache.data_ptr() == own.k_cache.data_ptr() and reader.v_cache.data_ptr() == own.v_cache.data_ptr()
    assert [one.name for one in bound.layers] == ["own"] and reader.metadata_index == own.metadata_index
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 8 * 16, generator=generator)
    (backend,) = bound.backends
    common = step_metadata([(5, 0)], [[3]], 8)
    batch = ForwardBatch(
        torch.zeros(5, dtype=torch.int64), torch.arange(5), (backend.build(common),), 5,
        slot_mappings=(common.slot_mapping,),
    )  # fmt: skip
    want = own(qkv, batch)
    before = own.k_cache.clone(), own.v_cache.clone()
    assert before[0][3, :5].any()
    torch.testing.assert_close(reader(qkv[:, : 4 * 16].contiguous(), batch), want)
    assert torch.equal(own.k_cache, before[0]) and torch.equal(own.v_cache, before[1])


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"shares": "nobody"}, "no layer made before it has that name"),
        ({"shares": "reader"}, "itself shares that of 'own'. Name 'own'"),
        ({"shares": "own", "num_kv_heads": 1}, "num_kv_heads is 1 and that layer's 2"),
        ({"shares": "own", "sliding_window": 4}, "sliding_window is 4 and that layer's None"),
    ],
)
def test_a_cache_that_cannot_be_shared_is_told(build, fields, reason):
    layer(build, "own"), layer(build, "reader", shares="own")
    with pytest.raises(ConfigError, match=reason):
        layer(build, "late", **fields)


def test_a_layer_that_gives_no_spec_is_named(build, monkeypatch):
    monkeypatch.setattr(layer(build, "odd"), "cache_spec", lambda: 16)
    with pytest.raises(ConfigError, match=r"Layer 'odd' \(AttentionLayer\) gives 16 as its cache_spec\(\)"):
        cache_specs(build)


@pytest.mark.parametrize(
    "views, reason",
    [
        (lambda self, memory, num_blocks, layout: [memory], "gives list; expected tensors"),
        (lambda self, memory, num_blocks, layout: (memory.clone(),), "a tensor with memory of its own"),
    ],
)
def test_views_that_are_none_of_the_memory_are_refused(build, monkeypatch, views, reason):
    layer(build, "odd")
    monkeypatch.setattr(FullAttentionSpec, "views", views)
    with pytest.raises(ConfigError, match=rf"FullAttentionSpec.views of layer 'odd' .*{reason}"):
        bind(build)


class SmallBlocks(StaticAttention):
    name = "small_blocks"

    @classmethod
    def kv_layout(cls, needs):
        return KVLayout(kernel_block_size=4)

    @classmethod
    def unsupported(cls, needs, capability=None):
        return [] if needs.num_kv_heads == 1 else ["several kv heads"]


def test_backends_that_count_blocks_otherwise_do_not_share_a_group(monkeypatch):
    import sys
    from types import ModuleType

    module = ModuleType("cache_layer_backends")
    module.SmallBlocks, module.StaticAttention = SmallBlocks, StaticAttention
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = [
        BackendEntry(name=name, load=f"{module.__name__}:{cls}", priority=priority)
        for name, cls, priority in (("small_blocks", "SmallBlocks", 90), ("static", "StaticAttention", 10))
    ]
    build = make_test_build({}, PLUGINS, block_size=8, attention=AttentionSelector(entries))
    layer(build, "a"), layer(build, "b", num_kv_heads=1)
    with pytest.raises(ConfigError, match=r"a and b share a KV group.*kernel blocks of 8 and of 4 tokens"):
        bind(build)

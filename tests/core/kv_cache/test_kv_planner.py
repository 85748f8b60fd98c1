from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import ConfigError
from pelton.kv_cache.planner import plan_kv_cache, with_num_blocks
from pelton.kv_cache.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32", sliding_window=32)
LLAMA_8B = FullAttentionSpec(block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
GIB = 2**30


def layers(**kinds):
    """layers(full=(10, FULL)) -> {"full.0": FULL, ...}"""
    return {f"{name}.{i}": spec for name, (count, spec) in kinds.items() for i in range(count)}


def plan_for(specs, num_blocks=1000, max_model_len=1, **kwargs):
    return plan_kv_cache(specs, 0, num_blocks_override=num_blocks, max_model_len=max_model_len, **kwargs)


def shape(plan):
    return [(len(group.layer_names), group.num_padding_layers) for group in plan.groups]


def test_equal_layers_make_one_group_with_a_buffer_each():
    plan = plan_for(layers(full=(4, FULL)), num_blocks=10)
    assert shape(plan) == [(4, 0)]
    assert [tensor.shared_by for tensor in plan.tensors] == [("full.0",), ("full.1",), ("full.2",), ("full.3",)]
    assert {tensor.size_bytes for tensor in plan.tensors} == {10 * FULL.page_size_bytes}
    assert plan.bytes_per_block == 4 * FULL.page_size_bytes


def test_10_full_and_20_window_layers_make_3_groups_of_10():
    plan = plan_for(layers(full=(10, FULL), sw=(20, WINDOW)))
    assert shape(plan) == [(10, 0)] * 3
    assert len(plan.tensors) == 10
    assert plan.tensors[0].shared_by == ("full.0", "sw.0", "sw.10")
    assert plan.groups[1].layer_names == tuple(f"sw.{i}" for i in range(10))


def test_1_full_and_3_window_layers_make_4_groups_of_1():
    plan = plan_for(layers(full=(1, FULL), sw=(3, WINDOW)))
    assert shape(plan) == [(1, 0)] * 4
    assert [tensor.shared_by for tensor in plan.tensors] == [("full.0", "sw.0", "sw.1", "sw.2")]


def test_52_window_and_10_full_layers_make_7_groups_the_last_padded_by_8():
    plan = plan_for(layers(sw=(52, WINDOW), full=(10, FULL)))
    assert shape(plan) == [(10, 0)] * 6 + [(2, 8)]
    assert plan.groups[0].layer_names[0] == "full.0"
    assert plan.groups[6].layer_names == ("sw.50", "sw.51")
    assert plan.num_padding_layers == 8
    assert len(plan.tensors[0].shared_by) == 7
    assert len(plan.tensors[9].shared_by) == 6


def test_20_full_and_30_window_layers_make_5_groups_of_10_without_padding():
    plan = plan_for(layers(full=(20, FULL), sw=(30, WINDOW)))
    assert shape(plan) == [(10, 0)] * 5


def test_8_groups_without_padding_are_not_too_many_and_9_are():
    assert shape(plan_for(layers(full=(6, FULL), sw=(10, WINDOW)))) == [(2, 0)] * 8
    assert shape(plan_for(layers(full=(4, FULL), sw=(5, WINDOW)))) == [(4, 0), (4, 0), (1, 3)]


def test_an_extra_full_layer_costs_padding_that_is_reported():
    plan = plan_for(layers(full=(11, FULL), sw=(20, WINDOW)))
    assert shape(plan) == [(11, 0), (11, 0), (9, 2)]
    assert plan.num_padding_layers == 2


def test_full_attention_layers_come_first_whatever_the_model_begins_with():
    plan = plan_for({"a": WINDOW, "b": FULL, "c": WINDOW})
    assert [group.layer_names for group in plan.groups] == [("b",), ("a",), ("c",)]


def test_windows_of_different_sizes_are_different_kinds():
    other = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32", sliding_window=64)
    assert shape(plan_for(layers(full=(2, FULL), a=(2, WINDOW), b=(2, other)))) == [(2, 0)] * 3


def test_layers_without_a_spec_of_their_own_get_no_place():
    """A layer that shares another's cache is left out of the specs."""
    plan = plan_for(layers(full=(2, FULL)))
    assert {name for tensor in plan.tensors for name in tensor.shared_by} == {"full.0", "full.1"}


def test_hybrid_can_be_switched_off():
    chunked = ChunkedLocalSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32", attention_chunk_size=32)
    plan = plan_for(layers(full=(2, FULL), sw=(3, WINDOW), local=(1, chunked)), disable_hybrid=True)
    assert shape(plan) == [(6, 0)]
    assert plan.groups[0].spec == FULL


def test_a_larger_state_raises_the_block_size_and_is_padded_to_the_page():
    bytes_a_token = FULL.page_size_bytes // 16  # 64
    state = MambaSpec(block_size=1024, state_bytes=64 * 400 + 1)
    plan = plan_for(layers(full=(2, FULL), mamba=(6, state)))
    attention, mamba = plan.groups[0].spec, plan.groups[1].spec
    assert attention.block_size == 416  # the next multiple of 16 whose page holds the state; no power of two
    assert attention.page_size_bytes == mamba.page_size_bytes == 416 * bytes_a_token
    assert mamba.state_bytes == state.state_bytes
    assert shape(plan) == [(2, 0)] * 4
    assert plan.hash_block_size == 416


def test_a_state_that_just_fits_a_page_changes_no_block_size():
    plan = plan_for(layers(full=(1, FULL), mamba=(1, MambaSpec(block_size=1, state_bytes=FULL.page_size_bytes))))
    assert plan.groups[0].spec == FULL
    plan = plan_for(layers(full=(1, FULL), mamba=(1, MambaSpec(block_size=1, state_bytes=100))))
    assert plan.groups[0].spec == FULL
    assert plan.groups[1].spec.page_size_bytes == FULL.page_size_bytes


def test_states_alone_are_padded_to_the_largest():
    plan = plan_for(
        {"a": MambaSpec(block_size=1, state_bytes=100), "b": MambaSpec(block_size=1, state_bytes=300)}, num_blocks=3
    )
    assert {group.spec.page_size_bytes for group in plan.groups} == {300}


def test_different_kv_sizes_get_block_sizes_of_one_page():
    wide = FullAttentionSpec(block_size=16, num_kv_heads=3, head_dim=8, dtype="float32")
    narrow = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", sliding_window=32)
    plan = plan_for({"wide": wide, "narrow": narrow})
    assert [group.spec.block_size for group in plan.groups] == [32, 48]
    assert len({group.spec.page_size_bytes for group in plan.groups}) == 1
    assert plan.hash_block_size == 16


def test_sizes_without_a_common_page_are_refused_with_the_layer():
    odd = FullAttentionSpec(block_size=16, num_kv_heads=7919, head_dim=8, dtype="float32")
    with pytest.raises(ConfigError, match=r"Layer narrow would need block_size 126704 \(at most 65536\)"):
        plan_for({"wide": odd, "narrow": WINDOW})


HALF = FullAttentionSpec(block_size=16, num_kv_heads=4, head_dim=128, dtype="bfloat16")
LATENT = MLASpec(block_size=16, latent_dim=576, dtype="bfloat16")


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(layers(target=(36, LLAMA_8B), draft=(1, HALF)), id="a-draft-head-with-half-the-kv-heads"),
        pytest.param(
            layers(target=(36, LLAMA_8B), draft=(28, replace(LLAMA_8B, head_dim=80))), id="a-draft-model-of-other-size"
        ),
        pytest.param(
            layers(mla=(61, LATENT), indexer=(61, MLASpec(block_size=16, latent_dim=132, dtype="fp8"))),
            id="latents-and-indexer-keys",
        ),
    ],
)
def test_layers_that_keep_every_token_are_one_group_whatever_their_pages_hold(specs):
    plan = plan_for(specs, num_blocks=10)
    (group,) = plan.groups
    assert group.spec.block_size == 16 and group.num_padding_layers == 0
    assert {name: group.spec_of(name) for name in group.layer_names} == specs
    assert {tensor.shared_by: tensor.size_bytes for tensor in plan.tensors} == {
        (name,): 10 * spec.page_size_bytes for name, spec in specs.items()
    }
    assert plan.bytes_per_block == sum(spec.page_size_bytes for spec in specs.values())
    assert with_num_blocks(plan, 3).tensors[-1].size_bytes == 3 * list(specs.values())[-1].page_size_bytes


def test_an_odd_layer_rides_along_with_the_full_layers_of_a_hybrid_model():
    window = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16", sliding_window=1024)
    specs = layers(sw=(52, window), full=(10, LLAMA_8B), draft=(1, HALF))
    plan, without = plan_for(specs), plan_for(layers(sw=(52, window), full=(10, LLAMA_8B)))
    assert shape(plan) == [(11, 0), *shape(without)[1:]]
    assert plan.groups[0].spec_of("draft.0") == HALF and plan.groups[0].spec_of("full.3") == LLAMA_8B
    assert plan.tensors[-1].shared_by == ("draft.0",)
    assert plan.bytes_per_block == without.bytes_per_block + HALF.page_size_bytes


def test_a_rider_has_blocks_of_as_many_tokens_as_its_group():
    window = SlidingWindowSpec(block_size=16, num_kv_heads=12, head_dim=128, dtype="bfloat16", sliding_window=1024)
    plan = plan_for(layers(sw=(5, window), full=(5, LLAMA_8B), draft=(1, HALF)))
    first = plan.groups[0]
    assert (first.spec.block_size, first.spec_of("draft.0").block_size, plan.groups[1].spec.block_size) == (48, 48, 32)
    assert plan.tensors[-1].size_bytes == plan.num_blocks * 3 * HALF.page_size_bytes


def test_many_odd_layers_of_a_hybrid_model_get_groups_of_their_own():
    """Their pages would be paid for in the blocks of every group."""
    window = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16", sliding_window=1024)
    plan = plan_for(layers(sw=(8, window), full=(4, LLAMA_8B), odd=(4, HALF)))
    assert shape(plan) == [(4, 0)] * 4
    assert [group.spec.block_size for group in plan.groups] == [16, 32, 16, 16]


def test_a_subclass_is_not_taken_for_its_parent():
    """Its manager may hold other blocks."""

    class Sink(FullAttentionSpec):
        pass

    other = Sink(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    assert shape(plan_for(layers(full=(2, FULL), sink=(2, other)))) == [(2, 0)] * 2


def test_the_pool_is_sized_by_the_bytes_there_are():
    specs = layers(full=(32, LLAMA_8B))
    assert plan_kv_cache(specs, 60 * GIB, max_model_len=2048).num_blocks == 30_720
    assert plan_kv_cache(specs, 60 * GIB - 1, max_model_len=2048).num_blocks == 30_719
    hybrid = layers(full=(10, FULL), sw=(20, WINDOW))
    assert plan_kv_cache(hybrid, 7 * 10 * FULL.page_size_bytes, max_model_len=16).num_blocks == 7
    assert plan_kv_cache(specs, 1, num_blocks_override=5, max_model_len=16).num_blocks == 5


def test_sizes_of_the_worked_example():
    assert LLAMA_8B.page_size_bytes == 16 * 4096
    plan = plan_kv_cache(layers(full=(32, LLAMA_8B)), 60 * GIB, max_model_len=2048)
    assert plan.bytes_per_block == 2 * 2**20 == 16 * 128 * 2**10
    assert MLASpec(block_size=16, latent_dim=576, dtype="bfloat16").page_size_bytes == 16 * 1152
    assert MambaSpec(block_size=1, state_bytes=64).page_size_bytes == 64


def test_a_context_that_does_not_fit_names_the_settings_and_what_would_fit():
    with pytest.raises(ConfigError) as caught:
        plan_kv_cache(layers(full=(32, LLAMA_8B)), 2 * GIB, max_model_len=131_072)
    message = str(caught.value)
    assert "max_model_len is 131072, which needs 8192 blocks" in message
    assert "there are 1023 (2048.0 MiB)" in message
    assert "Set max_model_len to at most 16368" in message  # 1,023 blocks of 16
    assert "kv_cache_memory_bytes" in message and "gpu_memory_utilization" in message
    assert plan_kv_cache(layers(full=(32, LLAMA_8B)), 2 * GIB, max_model_len=16_368).num_blocks == 1024
    with pytest.raises(ConfigError):
        plan_kv_cache(layers(full=(32, LLAMA_8B)), 2 * GIB, max_model_len=16_369)


@pytest.mark.parametrize("available", [0, 100, FULL.page_size_bytes])
def test_a_pool_without_a_usable_block_is_refused(available):
    with pytest.raises(ConfigError, match="No max_model_len fits: give the cache more memory"):
        plan_kv_cache(layers(full=(1, FULL)), available, max_model_len=16)


def test_a_window_needs_no_more_than_itself_and_a_chunk():
    specs = layers(full=(1, FULL), sw=(1, WINDOW))
    plan = plan_for(specs)
    assert plan.max_blocks_needed(1600) == 200  # a prompt may be computed in one step
    # 31 tokens before the chunk, 64 of it, 32 of open steps: 127 tokens touch at most 9 blocks.
    assert plan.max_blocks_needed(1600, max_chunk_tokens=64) == 100 + 9
    assert plan.max_blocks_needed(20, max_chunk_tokens=64) == 2 + 2
    plan_for(specs, num_blocks=110, max_model_len=1600, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="needs 109 blocks"):
        plan_for(specs, num_blocks=109, max_model_len=1600, max_num_batched_tokens=64)


def test_a_model_without_cache_needs_has_an_empty_plan():
    plan = plan_kv_cache({}, 0, max_model_len=100)
    assert (plan.groups, plan.tensors, plan.bytes_per_block) == ((), (), 0)


def test_pages_of_latents():
    assert MLASpec(block_size=16, latent_dim=576, dtype="bfloat16").page_size_bytes == 16 * 576 * 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(1, 50))
def test_any_mix_of_layers_is_placed_once_in_groups_of_one_size(counts, num_blocks):
    kinds = [
        FULL,
        WINDOW,
        SlidingWindowSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32", sliding_window=99),
    ]
    specs = {f"{kind}.{i}": kinds[kind] for kind, count in enumerate(counts) for i in range(count)}
    plan = plan_for(specs, num_blocks=num_blocks + 200)
    names = [name for group in plan.groups for name in group.layer_names]
    assert sorted(names) == sorted(specs)
    assert sorted(name for tensor in plan.tensors for name in tensor.shared_by) == sorted(specs)
    size = len(plan.tensors)
    for group in plan.groups:
        assert len(group.layer_names) + group.num_padding_layers == size
        assert {specs[name] for name in group.layer_names} == {group.spec}
        for i, name in enumerate(group.layer_names):
            assert name in plan.tensors[i].shared_by
    num_by_smallest = sum(-(-count // min(counts)) for count in counts)
    assert len(plan.groups) <= max(8, num_by_smallest)
    assert plan.num_padding_layers <= (len(counts) - 1) * (min(counts) - 1)

"""How a group's memory becomes each layer's views."""

import pytest
import torch

from pelton.attention.interface import KVLayout
from pelton.errors import ConfigError
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.testing.paged_rows import page_views

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=3, head_dim=8, dtype="float32")


def views(layout, spec=SPEC, num_blocks=5):
    memory = torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.uint8)
    return memory, *page_views(memory, num_blocks, spec, layout)


@pytest.mark.parametrize("heads_first", [False, True])
def test_views_have_one_logical_shape_whatever_the_order_in_memory(heads_first):
    memory, keys, values = views(KVLayout(heads_first=heads_first))
    assert keys.shape == values.shape == (5, 4, 3, 8)
    keys[2, 1, 2] = 1.0
    values[2, 1, 2] = 2.0
    floats = memory.view(torch.float32).view(5, 2, -1)
    token, head = 1, 2
    start = (head * 4 + token) * 8 if heads_first else (token * 3 + head) * 8
    assert (floats[2, 0, start : start + 8] == 1).all() and (floats[2, 1, start : start + 8] == 2).all()
    assert floats.sum() == 8 * 3


def test_a_page_is_one_contiguous_range_with_keys_and_values():
    memory, keys, values = views(KVLayout())
    keys[3], values[3] = 1.0, 1.0
    floats = memory.view(torch.float32)
    page = SPEC.page_size_bytes // 4
    assert (floats[3 * page : 4 * page] == 1).all() and floats.sum() == page


def test_the_cache_dtype_is_the_specs():
    spec = FullAttentionSpec(block_size=4, num_kv_heads=3, head_dim=8, dtype="bfloat16")
    assert views(KVLayout(), spec)[1].dtype == torch.bfloat16
    fp8 = FullAttentionSpec(block_size=4, num_kv_heads=3, head_dim=8, dtype="fp8_e5m2")
    assert views(KVLayout(), fp8)[1].dtype == torch.float8_e5m2


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_block_may_be_several_kernel_blocks_and_a_slot_keeps_its_number(heads_first):
    memory, keys, values = views(KVLayout(heads_first=heads_first, kernel_block_size=2))
    assert keys.shape == (10, 2, 3, 8)
    keys[13 // 2, 13 % 2] = 1.0  # slot 13: the second token of block 3
    values[13 // 2, 13 % 2] = 1.0
    floats = memory.view(torch.float32)
    page = SPEC.page_size_bytes // 4
    assert floats[3 * page : 4 * page].sum() == floats.sum() == 2 * 3 * 8


def test_kernel_blocks_that_do_not_fill_a_block_are_refused():
    with pytest.raises(
        ConfigError, match="kernel blocks of 3 tokens, and blocks have 4; set block_size to a multiple of 3"
    ):
        views(KVLayout(kernel_block_size=3))

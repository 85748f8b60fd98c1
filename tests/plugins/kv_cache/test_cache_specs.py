"""The built-in kinds of cache keep what every kind promises; what a plugin brings wrongly is told plainly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pelton.errors import ConfigError, PluginError
from pelton.kv_cache.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from pelton.kv_cache.views import KVLayout
from pelton.testing.cache_specs import CacheSpecConformance
from pelton_plugins.kv_cache.block_pool import BlockPool
from pelton_plugins.kv_cache.single_type import FullAttentionManager, make_managers

KEYS = {"block_size": 4, "num_kv_heads": 3, "head_dim": 8, "dtype": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesSpec(KVCacheSpec):
    """A stranger's kind without views of its own."""

    bytes_a_token: int

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.bytes_a_token


class TestBuiltIn(CacheSpecConformance):
    specs = (
        FullAttentionSpec(**KEYS),
        SlidingWindowSpec(**KEYS, sliding_window=6),
        ChunkedLocalSpec(**KEYS, attention_chunk_size=8),
        MLASpec(block_size=4, latent_dim=24, dtype="float32"),
        MambaSpec(block_size=4, state_bytes=96, states=(((4, 4), "float32"), ((8,), "float32"))),
    )


class TestStranger(CacheSpecConformance):
    specs = (BytesSpec(block_size=4, bytes_a_token=10),)
    managers = ((BytesSpec, FullAttentionManager),)


def test_states_lie_behind_each_other_and_padding_behind_them():
    spec = MambaSpec(block_size=1, state_bytes=12, states=(((2,), "float32"), ((4,), "uint8"))).with_page_size(16)
    memory = torch.zeros(3 * 16, dtype=torch.uint8)
    numbers, marks = spec.views(memory, 3, KVLayout())
    assert (numbers.shape, marks.shape) == ((3, 2), (3, 4))
    numbers[1], marks[1] = 1.0, 9
    assert memory[16:24].view(torch.float32).tolist() == [1.0, 1.0] and memory[24:].tolist()[:8] == [9] * 4 + [0] * 4


def test_a_kind_without_a_manager_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="BytesSpec, which no KV-cache manager handles"):
        make_managers([BytesSpec(block_size=4, bytes_a_token=1)], BlockPool(4, 1), 4)


@pytest.mark.parametrize("entry", [FullAttentionManager, (int, FullAttentionManager), (BytesSpec, BytesSpec)], ids=str)
def test_an_entry_that_is_no_pair_of_classes_is_refused(entry):
    with pytest.raises(PluginError, match="expected a pair of a KVCacheSpec class and a SingleTypeManager class"):
        make_managers([], BlockPool(4, 1), 4, [entry])

"""What a layer asks of its backend where ranks share its cache, and what cannot be shared."""

from types import SimpleNamespace

import pytest

from pelton.attention.interface import AttentionNeeds
from pelton.attention.parts import spread_needs
from pelton.errors import ConfigError
from pelton.kv_cache.spec import FullAttentionSpec, MambaSpec
from pelton.parallel.context import ParallelContext
from pelton_plugins.executors.multiproc.executor import check_spread

NEEDS = AttentionNeeds(head_dim=16, num_heads=4, num_kv_heads=1, block_size=16, dtype="float32")


def context(rank: int, size: int) -> ParallelContext:
    found = ParallelContext(rank, size)
    found.context = SimpleNamespace(rank=rank, size=size)
    return found


def test_a_backend_sees_the_heads_of_all_ranks() -> None:
    assert spread_needs(NEEDS, "layer", ParallelContext()) is NEEDS
    needs = spread_needs(NEEDS, "layer", context(1, 2))
    assert (needs.num_heads, needs.decode_context_parallel, needs.context_rank) == (8, 2, 1)


def test_a_window_is_refused() -> None:
    windowed = AttentionNeeds(
        head_dim=16, num_heads=4, num_kv_heads=1, block_size=16, dtype="float32", sliding_window=32
    )
    with pytest.raises(
        ConfigError, match="decode_context_parallel_size is 2, and layer attends to a window of 32 tokens"
    ):
        spread_needs(windowed, "layer", context(0, 2))


@pytest.mark.parametrize(
    "num_kv_heads, size, ranks, fits", [(1, 4, 4, True), (2, 4, 2, True), (2, 4, 4, False), (8, 4, 2, False)]
)
def test_ranks_that_share_have_the_same_head(num_kv_heads: int, size: int, ranks: int, fits: bool) -> None:
    found = ParallelContext(0, size)
    found.context = SimpleNamespace(rank=0, size=ranks)
    if fits:
        found.check_copies(num_kv_heads)
        return
    with pytest.raises(ConfigError, match="Use a size that divides the number of copies"):
        found.check_copies(num_kv_heads)


def test_a_cache_without_parts_is_refused() -> None:
    spread = FullAttentionSpec(block_size=32, num_ranks=2, num_kv_heads=1, head_dim=16, dtype="float32")
    assert spread.page_tokens == 16 and spread.page_size_bytes == 2 * 16 * 16 * 4
    check_spread({"a": spread}, 2)
    with pytest.raises(ConfigError, match="b keeps a MambaSpec, which has no parts for ranks"):
        check_spread({"a": spread, "b": MambaSpec(block_size=32, state_bytes=64)}, 2)

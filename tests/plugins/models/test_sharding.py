"""Two or more tensor-parallel ranks, each a thread with its own shards, give what one rank gives."""

import threading

import pytest
import torch
from pelton_ranks import ThreadContext, run_ranks

from pelton.errors import ConfigError
from pelton.parallel.context import ParallelContext
from pelton.testing.models import FAMILIES, make_tiny_checkpoint


@pytest.mark.parametrize("family", list(FAMILIES), indirect=True, scope="session")
def test_two_ranks_sum_to_one(checkpoint, make_driver, token_ids):
    steps = [token_ids[:50], token_ids[50:51], token_ids[51:60]]
    driver = make_driver(checkpoint)
    want = torch.cat([driver.step({"a": part})["a"] for part in steps])
    results, _ = run_ranks(2, make_driver, checkpoint, steps)
    for got in results:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("llama", 4), ("olmo2", 4)])
def test_kv_heads_are_copied_when_there_are_more_ranks_than_heads(tmp_path, make_driver, token_ids, family, size):
    """olmo2: keys are normed over all heads, of which each counts once."""
    fields = {"num_key_value_heads": 1, "vocab_size": 321, "attention_bias": True, "tie_word_embeddings": False}
    path = make_tiny_checkpoint(tmp_path, family, with_tokenizer=False, **fields)
    steps = [token_ids[:20], token_ids[20:21]]
    driver = make_driver(path)
    want = torch.cat([driver.step({"a": part})["a"] for part in steps])
    results, drivers = run_ranks(size, make_driver, path, steps)
    for rank, got in enumerate(results):
        assert got.shape[-1] == 321, "vocabulary padding is cut"
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        layer = next(iter(drivers[rank].build.attention_layers.values()))
        assert (layer.num_heads, layer.num_kv_heads) == (4 // size, 1)


def test_a_rank_holds_its_share_of_every_matrix(tmp_path, make_driver):
    path = make_tiny_checkpoint(tmp_path, "qwen2", with_tokenizer=False)
    shared, barrier = [None] * 2, threading.Barrier(2)
    whole, half = make_driver(path), make_driver(path, parallel=ThreadContext(1, 2, shared, barrier))
    sizes = [sum(p.numel() for p in driver.model.parameters() if p.dim() == 2) for driver in (whole, half)]
    assert sizes[1] * 2 == sizes[0]


def test_heads_that_do_not_divide_are_refused(tmp_path, make_driver):
    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False)
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which does not divide by tensor_parallel_size 3"):
        make_driver(path, parallel=ParallelContext(0, 3))


def test_collectives_without_a_group_say_so():
    with pytest.raises(ConfigError, match="all_reduce over 2 ranks needs a process group"):
        ParallelContext(0, 2).all_reduce(torch.zeros(1))
    with pytest.raises(ConfigError, match="rank is 2 of 2"):
        ParallelContext(2, 2)
    x = torch.ones(3)
    assert ParallelContext().all_reduce(x) is x and ParallelContext().all_gather(x) is x

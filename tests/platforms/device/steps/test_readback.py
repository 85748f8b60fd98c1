"""Pinned memory of results is used again, at once, and never by two results at a time."""

import numpy as np
import pytest
import torch

from pelton.sampling.logprobs import HostLogprobs
from pelton_platforms.device.steps.packed_logprobs import PackedResults
from pelton_platforms.device.steps.readback import HostCopies, HostPool


@pytest.fixture
def pool():
    """Without a device nothing can be pinned."""
    return HostPool(is_pinned=False)


def test_memory_is_used_again_by_size(pool):
    first, second = pool.take(100), pool.take(100)
    assert first.numel() == second.numel() == 4096 and first.data_ptr() != second.data_ptr()
    large = pool.take(5000)
    assert large.numel() == 8192
    pool.give(first)
    assert pool.take(4096).data_ptr() == first.data_ptr()
    assert pool.take(4096).data_ptr() not in (first.data_ptr(), second.data_ptr())


def test_nothing_of_a_dropped_result_is_freed(pool):
    """Its copies may still be under way, and freeing is what a capture does not stand."""
    address = pool.take(1).data_ptr()
    assert pool.take(1).data_ptr() != address


def test_on_a_cpu_results_are_the_tensors_themselves():
    tensors = [torch.arange(4), torch.ones(2, 2)]
    copies = HostCopies(tensors, HostPool(), torch.device("cpu"))
    assert copies.ready()
    assert all(np.array_equal(a, t.numpy()) for a, t in zip(copies.arrays(), tensors, strict=True))
    assert HostCopies([], HostPool(), torch.device("cpu")).arrays() == []


def test_what_a_step_has_written_itself_is_taken_before_its_place_is_given_on(pool):
    room = pool.take(16)
    result = torch.arange(4, dtype=torch.int32).view(2, 2)
    room[:16].view(torch.int32).copy_(result.view(-1) + 10)
    copies = HostCopies([result], pool, torch.device("cpu"), room)
    assert pool.take(16) is room
    room.zero_()
    assert copies.arrays()[0].tolist() == [[10, 11], [12, 13]]


def test_a_step_that_samples_nothing_is_done_when_the_device_is(monkeypatch):
    """Else a long prompt's chunks would all be launched at once, and later requests wait behind them."""
    done, waits = [], []

    class Event:
        def __init__(self, device):
            assert device.type == "cuda"

        def record(self):
            pass

        def query(self):
            return bool(done)

        def synchronize(self):
            waits.append(1)

    monkeypatch.setattr(torch, "Event", Event)
    copies = HostCopies([], HostPool(), torch.device("cuda"))
    assert not copies.ready()
    assert copies.arrays() == [] and waits == [1]
    done.append(1)
    assert copies.ready()


@pytest.mark.gpu
def test_copies_of_many_results_in_flight_do_not_mix():
    pool = HostPool()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            tensors = [
                [torch.full((n, 2), n, device="cuda", dtype=torch.int32), torch.full((n,), n / 2, device="cuda")]
                for n in (0, 1, 5, 2000)
            ]
            copies = [HostCopies(pair, pool, torch.device("cuda")) for pair in tensors]
            arrays = [copy.arrays() for copy in copies]
            for pair, (tokens, halves) in zip(tensors, arrays, strict=True):
                assert np.array_equal(tokens, pair[0].cpu().numpy()) and np.array_equal(halves, pair[1].cpu().numpy())
            assert copies[1].arrays() is arrays[1]
    assert len(pool._all) == 4


@pytest.mark.parametrize("most", [0, 1, 4, 5, 20])
def test_tokens_and_logprobs_of_a_step_are_one_copy(most):
    packed = PackedResults(6, most, torch.device("cpu"))
    tokens = torch.arange(12, dtype=torch.int32).view(6, 2) - 5
    parts = torch.arange(6 * (1 + most)).view(6, -1), torch.randn(6, 1 + most), torch.arange(6) - 3
    for column, part in zip((packed.result, *packed.logprobs.tensors()), (tokens, *parts), strict=True):
        assert column.shape == part.shape and column.dtype == part.dtype
        column.copy_(part)
    words = packed.words(3)
    assert words.is_contiguous()
    result, found = packed.on_host(words.numpy().copy(), 3)
    assert result.tolist() == tokens[:3].tolist()
    for column, part in zip((found.token_ids, found.logprobs, found.ranks), parts, strict=True):
        assert column.tolist() == part[:3].tolist()
    assert found.packed([2, 0], -1) == HostLogprobs(*(part.numpy() for part in parts)).packed([2, 0], -1)

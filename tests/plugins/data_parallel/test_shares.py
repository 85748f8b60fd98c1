"""Requests that come at once and whose lengths are certain: engines end together, after as few steps as can be."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from pelton.config import EngineConfig
from pelton.messages.report import DeviceReport, EngineInfo
from pelton.messages.request import EngineRequest, PoolingParams
from pelton.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pelton_plugins.data_parallel.router import EngineLoad, LoadRouter
from pelton_plugins.data_parallel.shares import ROW_COST, by_length, num_certain_tokens

FINAL = RequestOutputKind.FINAL_ONLY


def request(num_prompt_tokens: int = 4, pooling: PoolingParams | None = None, **params: Any) -> EngineRequest:
    sampling = SamplingParams(**{"output_kind": FINAL, "ignore_eos": True, **params})
    return EngineRequest(
        request_id="r", prompt_token_ids=[1] * num_prompt_tokens, sampling_params=sampling, pooling_params=pooling
    )


def cost(share: list[tuple[int, int]], max_num_seqs: int, step_cost: float) -> float:
    rows = sum(count for _, count in share)
    num_steps = max(max((count for _, count in share), default=0), rows / max_num_seqs)
    return sum(size for size, _ in share) + ROW_COST * rows + step_cost * num_steps


@pytest.mark.parametrize("seed", range(12))
def test_shares_end_as_early_as_any_cuts_of_the_answers_by_length_do(seed):
    rng = random.Random(seed)
    num_shares, max_num_seqs, step_cost = rng.choice([2, 3]), rng.choice([2, 5, 100]), rng.choice([3.0, 40.0])
    sizes = [(rng.randrange(1, 60), rng.choice([1, 2, 5, 60, 200])) for _ in range(12)]
    found = by_length(sizes, num_shares, max_num_seqs, step_cost)
    in_turn = max(cost(sizes[place::num_shares], max_num_seqs, step_cost) for place in range(num_shares))
    ordered = sorted(sizes, key=lambda size: (size[1], size[0]))
    cuts = itertools.combinations_with_replacement(range(len(sizes) + 1), num_shares - 1)
    best = min(
        max(
            cost(ordered[start:end], max_num_seqs, step_cost)
            for start, end in itertools.pairwise((0, *cut, len(sizes)))
        )
        for cut in cuts
    )
    if found is None:
        assert best > 0.96 * in_turn
        return
    shares = [[size for size, at in zip(sizes, found, strict=True) if at == share] for share in range(num_shares)]
    assert max(cost(share, max_num_seqs, step_cost) for share in shares) == pytest.approx(best)
    assert best <= 0.97 * in_turn + 1e-6


def test_long_answers_are_with_one_engine():
    sizes = [(100, 400 if number % 10 == 0 else 50) for number in range(400)]
    found = by_length(sizes, 2, 1024, 160.0)
    assert found is not None
    assert {at for at, (_, count) in zip(found, sizes, strict=True) if count == 400} == {0}
    assert found.count(1) > 200  # and one with short answers alone has room for more of them


def test_equal_requests_are_dealt_out_in_turn():
    assert by_length([(100, 50)] * 64, 2, 1024, 160.0) is None


@pytest.mark.parametrize(
    "given, count",
    [
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "ignore_eos": False}, None),
        ({"max_tokens": 9, "min_tokens": 9, "ignore_eos": False}, 9),
        ({"max_tokens": 1, "ignore_eos": False, "stop": ["x"]}, 1),
        ({"max_tokens": 9, "stop": ["x"]}, None),
        ({"max_tokens": 9, "stop_token_ids": [3]}, None),
        ({"max_tokens": 9, "structured_outputs": StructuredOutputsParams(regex="a+")}, None),
        ({"max_tokens": 9, "output_kind": RequestOutputKind.DELTA}, None),  # somebody waits for its first token
        ({"max_tokens": None}, None),
        ({"max_tokens": 9, "ignore_eos": False, "pooling": PoolingParams()}, 0),
    ],
)
def test_whose_length_is_certain(given, count):
    assert num_certain_tokens(request(**given)) == count


def places(*, requests=None, loads=None, ready=(0, 1), platform="cuda", **flat: Any):
    if requests is None:
        requests = [request(100, max_tokens=400 if number % 10 == 0 else 50) for number in range(400)]
    info = EngineInfo(
        report=DeviceReport(platform=platform), num_blocks=10, block_size=16, kv_cache_bytes=1, max_num_seqs=1024,
        max_num_batched_tokens=64, max_model_len=2048,
    )  # fmt: skip
    router = LoadRouter(EngineConfig.from_flat(**flat), 3)
    return router.route_batch(requests, loads or [EngineLoad() for _ in range(3)], ready, info)


def test_a_router_shares_requests_out_among_engines_without_work():
    found = places(ready=[1, 2])
    assert found is not None and set(found) == {1, 2} and found[0] == 1
    assert places(ready=[1, 2], loads=[EngineLoad(2, 0), EngineLoad(), EngineLoad()]) == found
    assert places(loads=[EngineLoad(0, 1), EngineLoad(), EngineLoad()]) is None
    assert places(requests=[request(9000, max_tokens=100), request(100)] * 20) is not None
    assert places(requests=[*[request(9000, max_tokens=100), request(100)] * 20, request(ignore_eos=False)]) is None


def test_engines_that_step_together_have_as_much_to_do_in_each_step():
    assert places(data_parallel_size=2, enable_expert_parallel=True) is None


def test_steps_with_few_rows_cost_a_cpu_less():
    requests = [request(1000 if number % 2 else 100, max_tokens=10 + 37 * number % 900) for number in range(400)]
    one, other = places(requests=requests, platform="cpu"), places(requests=requests)
    assert one is not None and other is not None and one.count(1) < other.count(1)

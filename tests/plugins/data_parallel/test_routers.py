"""Which engine gets a request: by what each has to do, and by what each has computed."""

from __future__ import annotations

import pytest

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.messages.request import AdapterRef, EngineRequest
from pelton.plugins import load_plugins
from pelton.sampling_params import SamplingParams
from pelton_plugins.data_parallel.prefix_router import PrefixRouter
from pelton_plugins.data_parallel.router import EngineLoad, LoadRouter


def request(tokens: list[int], **more: object) -> EngineRequest:
    return EngineRequest(request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams(), **more)


def loads(*pairs: tuple[int, int]) -> list[EngineLoad]:
    return [EngineLoad(*pair) for pair in pairs]


def prefix_router(num_engines: int, **settings: int) -> PrefixRouter:
    config = EngineConfig.from_flat(plugin_config={"data_parallel": {"piece_tokens": 4, **settings}})
    return PrefixRouter(config, num_engines)


@pytest.mark.parametrize(
    "pairs, ready, chosen",
    [
        pytest.param([(0, 9), (2, 0), (3, 0)], [0, 1, 2], 1, id="scores-9-8-12"),
        pytest.param([(1, 0), (0, 4), (0, 5)], [0, 1, 2], 0, id="a-tie-goes-by-order"),
        pytest.param([(0, 0), (5, 5), (4, 8)], [1, 2], 2, id="only-those-that-are-ready"),
    ],
)
def test_the_lowest_of_4_waiting_plus_running(pairs, ready, chosen):
    assert LoadRouter(EngineConfig(), len(pairs)).route(request([1]), loads(*pairs), ready) == chosen


IDLE = [0, 1, 2]


def test_prompts_that_begin_alike_go_to_one_engine():
    router = prefix_router(3)
    shared = list(range(10))
    assert router.route(request([*shared, 1, 2]), loads((1, 0), (0, 0), (0, 0)), IDLE) == 1
    # Two pieces of 4 tokens are known at engine 1, though another has less to do.
    assert router.route(request([*shared, 7]), loads((0, 0), (2, 3), (0, 0)), IDLE) == 1
    assert router.route(request([9, *shared]), loads((1, 0), (2, 3), (0, 0)), IDLE) == 2
    # The longest beginning counts: one more piece was sent to engine 2.
    longer = [*shared[:8], 50, 51, 52, 53]
    assert router.route(request(longer), loads((0, 9), (90, 0), (0, 0)), IDLE) == 2
    assert router.route(request([*longer, 1]), loads((0, 0), (0, 0), (0, 5)), IDLE) == 2
    assert router.route(request(shared[:4]), loads((0, 0), (0, 2), (0, 1)), IDLE) == 2  # both have it: less to do


def test_an_engine_that_has_much_more_to_do_is_left_alone():
    """Its score may lie 8 above the lowest, and no more."""
    router = prefix_router(3, max_imbalance=8)
    prompt = request(list(range(8)))
    assert router.route(prompt, loads((0, 0), (0, 1), (0, 1)), IDLE) == 0
    assert router.route(prompt, loads((2, 1), (0, 1), (0, 2)), IDLE) == 0  # 9 against 1
    assert router.route(prompt, loads((2, 2), (0, 1), (0, 2)), IDLE) == 1  # 10 against 1
    assert router.route(prompt, loads((2, 2), (0, 3), (0, 1)), IDLE) == 1  # it knows the prompt now too


@pytest.mark.parametrize("more", [{"cache_salt": "s"}, {"adapter": AdapterRef(id=1, name="a", path="/a")}])
def test_what_shares_no_cache_shares_no_engine(more):
    router, tokens = prefix_router(2), list(range(8))
    assert router.route(request(tokens), loads((0, 0), (0, 1)), [0, 1]) == 0
    assert router.route(request(tokens, **more), loads((0, 2), (0, 1)), [0, 1]) == 1
    assert router.route(request(tokens), loads((0, 2), (0, 1)), [0, 1]) == 0


def test_an_engine_that_started_anew_knows_nothing():
    router, prompt = prefix_router(2), request(list(range(8)))
    assert router.route(prompt, loads((0, 0), (0, 1)), [0, 1]) == 0
    router.forget(0)
    assert router.route(prompt, loads((0, 2), (0, 1)), [0, 1]) == 1
    assert router.route(prompt, loads((0, 0), (0, 1)), [0, 1]) == 1


def test_memory_is_bounded():
    router = prefix_router(2, max_pieces=3)
    first = request([1, 2, 3, 4])
    assert router.route(first, loads((0, 0), (0, 1)), [0, 1]) == 0
    for start in range(3):
        router.route(request([100 + start] * 4), loads((0, 0), (0, 0)), [0, 1])
    assert router.route(first, loads((0, 2), (0, 1)), [0, 1]) == 1


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"data_parallel.piece_tokens is 0; use at least 1"):
        prefix_router(2, piece_tokens=0)


def test_the_hook_offers_a_client_for_each():
    entries = load_plugins(only=[]).entries("pelton_engine_clients")
    assert {entry.name: entry.resolve().router_class for entry in entries} == {
        "load": LoadRouter,
        "prefix": PrefixRouter,
    }

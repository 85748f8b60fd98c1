"""`SeveralEngines` over scripted engines: who gets what, and what a dead one takes with it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient, start_engines
from pelton.errors import ConfigError, EngineDeadError, RequestError
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.messages.request import EngineRequest
from pelton.metrics.stats import SchedulerStats
from pelton.plugins import load_plugins
from pelton.sampling_params import RequestOutputKind, SamplingParams
from pelton.testing.engine_client import EngineClientConformance, ScriptedEngine
from pelton_plugins.data_parallel.client import SeveralEngines
from pelton_plugins.executors.in_process import place_on_host

FINAL = RequestOutputKind.FINAL_ONLY


class TestByLoad(EngineClientConformance):
    load = "pelton_plugins.data_parallel.client:SeveralEngines"


class TestByPrefix(EngineClientConformance):
    load = "pelton_plugins.data_parallel.prefix_router:ByPrefix"


def request(request_id: str) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], sampling_params=SamplingParams())


def make(num_engines: int = 2, **settings: Any) -> tuple[SeveralEngines, list[ScriptedEngine]]:
    engines: dict[int, ScriptedEngine] = {}

    def start(config: EngineConfig, model: Any, plugins: Any) -> EngineClient:
        return engines.setdefault(config.parallel.data_parallel_rank, ScriptedEngine(config))

    config = EngineConfig.from_flat(data_parallel_size=num_engines, **settings)
    client = start_engines(config, None, load_plugins(only=[]), start)  # type: ignore[arg-type]
    assert isinstance(client, SeveralEngines)
    return client, [engines[index] for index in sorted(engines)]


def done(request_id: str) -> EngineOutput:
    return EngineOutput(request_id, [5], finish_reason=FinishReason.LENGTH)


async def take(client: SeveralEngines, wanted: int = 1) -> list[EngineOutputs]:
    """Outputs of requests, `wanted` batches of them."""
    found: list[EngineOutputs] = []
    while len(found) < wanted:
        found += [one for one in await asyncio.wait_for(client.get_outputs_async(), 60) if one.outputs]
    return found


def test_requests_are_dealt_out_stick_and_are_aborted_where_they_are():
    client, engines = make(3)
    client.add_requests([request(f"r{number}") for number in range(7)])
    assert [engine.requests for engine in engines] == [["r0", "r3", "r6"], ["r1", "r4"], ["r2", "r5"]]
    client.finish_requests(["r4", "r5", "gone"])
    client.finish_requests(["r2"], FinishReason.STOP)
    assert [engine.ended for engine in engines] == [
        [], [("r4", FinishReason.ABORT)], [("r5", FinishReason.ABORT), ("r2", FinishReason.STOP)],
    ]  # fmt: skip
    client.shutdown()
    assert all(engine.is_closed for engine in engines)


async def test_a_batch_of_certain_lengths_goes_to_engines_without_work_by_length():
    client, engines = make(2)

    def batch(name: str) -> list[EngineRequest]:
        found = [request(f"{name}{number}") for number in range(60)]
        for number, one in enumerate(found):
            length = 8 if number % 2 else 80
            one.sampling_params = SamplingParams(max_tokens=length, ignore_eos=True, output_kind=FINAL)
        return found

    def num_tokens(names: list[str]) -> int:
        return sum(8 if int(name[1:]) % 2 else 80 for name in names)

    client.add_requests(batch("a"))
    for engine in engines:
        assert 1200 < num_tokens(engine.requests) < 1440  # in turn they were 2,400 and 240
        assert engine.requests == sorted(engine.requests, key=lambda name: int(name[1:]))
    client.add_requests(batch("b"))  # while these run: by load
    assert [len(engine.requests) for engine in engines] == [60, 60]
    for engine in engines:
        engine.say(*map(done, engine.requests), stats=SchedulerStats())
        engine.requests.clear()
    await take(client, 2)
    client.add_requests(batch("c"))
    assert 1200 < num_tokens(engines[1].requests) < 1440
    client.shutdown()


async def test_reports_replace_what_was_counted_between_them():
    client, engines = make(2)
    client.add_requests([request("a"), request("b"), request("c")])  # a, c | b
    for engine, (waiting, running) in zip(engines, [(0, 2), (3, 1)], strict=True):
        engine.say(
            EngineOutput(engine.requests[0], [5]),
            stats=SchedulerStats(num_waiting_reqs=waiting, num_running_reqs=running),
        )
    found = await take(client, 2)
    assert {(one.engine_index, one.outputs[0].request_id) for one in found} == {(0, "a"), (1, "b")}
    for number in range(3):
        client.add_request(request(f"d{number}"))  # scores 2 and 13, then 6, then 10
    assert engines[0].requests[2:] == ["d0", "d1", "d2"]
    client.add_request(request("e"))  # 14 and 13
    assert engines[1].requests == ["b", "e"]
    # A report from before the last requests came to it: they count all the same.
    engines[0].say(EngineOutput("a", [5]), stats=SchedulerStats(num_running_reqs=2))
    await take(client)
    engines[1].say(EngineOutput("b", [5]), stats=SchedulerStats(num_running_reqs=2))
    await take(client)
    client.add_request(request("f"))  # 2 + 3 x 4 against 2
    assert engines[1].requests[-1] == "f"
    client.shutdown()


async def test_requests_of_other_front_ends_count_as_soon_as_they_are_sent():
    """They are told by other means than the engine's reports, which come later."""
    client, engines = make(2)
    told: list[list[int]] = [[], []]
    of_others = [3, 0]
    for place, engine in enumerate(engines):
        engine.share_load = lambda count, place=place: (told[place].append(count), of_others[place])[1]  # type: ignore[method-assign]
    client.add_requests([request("a"), request("b"), request("c"), request("d"), request("e")])
    assert (engines[0].requests, engines[1].requests) == (["d"], ["a", "b", "c", "e"])  # 12 and 0, 4, 8, 12, 16
    assert (told[0][-1], told[1][-1]) == (1, 4)
    engines[1].say(done("a"))
    await take(client)
    assert told[1][-1] == 3
    of_others[0] = 0
    client.add_request(request("f"))
    assert engines[0].requests == ["d", "f"]
    client.shutdown()


async def test_a_request_that_ends_between_two_reports_counts_no_longer():
    client, engines = make(2)
    for _ in range(3):  # in an API process, of which each hears of the engines' loads now and then
        client.add_request(request("short"))
        assert engines[0].requests.pop() == "short"
        engines[0].say(done("short"))
        await take(client)
    client.shutdown()


async def test_a_dead_engine_loses_its_own_requests_and_comes_back():
    client, engines = make(2)
    back: list[int] = []
    client.supervise(5, lambda info, index: back.append(index))
    engines[1].may_restart.clear()
    client.add_requests([request("a"), request("b")])
    engines[1].die()
    [lost] = await take(client)
    assert [one.request_id for one in lost.outputs] == ["b"] and lost.engine_index == 1
    assert lost.outputs[0].finish_reason == FinishReason.ERROR
    assert "Engine 1, which ran this request, is gone: engine of rank 1 was killed" in lost.outputs[0].error.message
    assert lost.stats is not None and lost.stats.num_running_reqs == 0
    assert client.error is None
    client.add_requests([request("c"), request("d")])
    assert engines[0].requests == ["a", "c", "d"]
    engines[0].say(done("a"))
    [kept] = await take(client)
    assert kept.outputs[0].new_token_ids == [5] and kept.engine_index == 0
    engines[1].may_restart.set()
    while engines[1].num_starts < 2 or not client._engines[1].is_up:
        await asyncio.sleep(0.01)
    client.add_request(request("e"))
    assert engines[1].requests == ["b", "e"] and back == [1, 1]  # with its first start
    client.shutdown()


async def test_all_dead_is_an_error_until_one_is_back():
    client, engines = make(2)
    for engine in engines:
        engine.may_restart.clear()
    client.add_requests([request("a"), request("b")])
    for engine in engines:
        engine.die()
    await take(client, 2)
    assert "rank 0 was killed" in str(client.error) and "rank 1 was killed" in str(client.error)
    with pytest.raises(EngineDeadError, match="refused until an engine is back") as caught:
        client.add_request(request("c"))
    assert caught.value.status == 503
    engines[1].may_restart.set()
    while client.error is not None:
        await asyncio.sleep(0.01)
    client.add_request(request("c"))
    assert engines[1].requests == ["b", "c"]
    engines[0].may_restart.set()
    client.shutdown()


async def test_no_more_restarts_than_were_asked_for():
    client, engines = make(2)
    client.supervise(0, lambda info, index: None)
    client.add_request(request("a"))
    engines[0].die()
    await take(client)
    await asyncio.sleep(0.05)
    assert engines[0].num_starts == 1 and client.error is None
    engines[1].die()
    while client.error is None:
        await asyncio.sleep(0.01)
    assert str(client.error).count("It will not be restarted") == 2
    client.shutdown()


def test_one_that_died_just_now_is_passed_over():
    client, engines = make(2)
    engines[0].die()
    client.add_requests([request("a"), request("b")])
    assert engines[0].requests == [] and engines[1].requests == ["b", "a"]
    client.shutdown()


def test_one_that_says_nothing_gets_nothing_new_while_others_do():
    client, engines = make(2)
    engines[0].silence = 4.0
    client.add_requests([request("a"), request("b")])
    assert engines[1].requests == ["a", "b"]
    engines[1].silence = 4.0  # perhaps we stood still ourselves
    client.add_request(request("c"))
    assert engines[0].requests == ["c"]
    client.shutdown()


async def test_one_whose_steps_all_fail_is_no_black_hole():
    """It would always have the least to do."""
    client, engines = make(2)
    client.add_request(request("a"))
    failed = SchedulerStats(num_failed_steps=5, step_failure="out of memory")
    engines[0].say(done("a"), stats=failed)
    await take(client)
    client.add_requests([request("b"), request("c")])
    assert engines[1].requests == ["b", "c"]
    client.shutdown()


def test_programs_without_an_event_loop_wait_for_outputs():
    client, engines = make(2)
    client.add_requests([request("a"), request("b")])

    def next_with_outputs() -> EngineOutputs:
        while not (found := client.get_outputs(5)).outputs:
            pass
        return found

    threading.Timer(0.05, lambda: engines[1].say(done("b"))).start()
    assert next_with_outputs().outputs[0].request_id == "b"
    threading.Timer(0.05, engines[0].die).start()
    assert next_with_outputs().outputs[0].finish_reason == FinishReason.ERROR
    assert client.get_outputs(0.01) is not None
    client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        while True:
            client.get_outputs(1)


def test_calls_go_to_all():
    client, engines = make(2)
    assert client.call("reset_prefix_cache") is True
    engines[1].answers = {
        "reset_prefix_cache": False, "kv_cache_usage": 0.5, "adapter.remove": False, "adapter.list": [2, 3], "worker.profile": "x",
    }  # fmt: skip
    engines[0].answers = {"kv_cache_usage": 0.0, "adapter.list": [1, 2], "worker.profile": None}
    assert client.call("reset_prefix_cache") is False
    assert client.call("kv_cache_usage") == 0.25
    assert client.call("adapter.remove", 1) is True
    assert client.call("adapter.list") == [1, 2, 3]
    assert client.call("worker.profile", "start") is None
    assert engines[0].calls == engines[1].calls and engines[1].calls[-1] == ("worker.profile", "start")
    engines[1].answers["adapter.load"] = RequestError("no such adapter")
    with pytest.raises(RequestError, match="no such adapter"):
        client.call("adapter.load", 1, "a", "/a")
    engines[1].die()
    assert client.call("kv_cache_usage") == 0.0
    client.shutdown()


def test_each_engine_has_a_number_a_place_and_one_description():
    client, engines = make(4, data_parallel_size_local=2, data_parallel_start_rank=2, tensor_parallel_size=2)
    assert [(engine.rank, place_on_host(engine.config.parallel)) for engine in engines] == [(2, (0, 4)), (3, (2, 4))]
    assert client.info.num_blocks == 7  # the least
    assert client.info.report.choices["engines"].startswith("2, requests by load")
    client.shutdown()


def test_a_failed_start_ends_the_others():
    started: list[ScriptedEngine] = []

    def start(config: EngineConfig, model: Any, plugins: Any) -> EngineClient:
        if config.parallel.data_parallel_rank == 1:
            raise ConfigError("no device 1")
        started.append(ScriptedEngine(config))
        return started[-1]

    config = EngineConfig.from_flat(data_parallel_size=3)
    with pytest.raises(ConfigError, match="no device 1"):
        start_engines(config, None, load_plugins(only=[]), start)  # type: ignore[arg-type]
    for _ in range(9000):
        if len(started) == 2 and all(engine.is_closed for engine in started):
            return
        threading.Event().wait(0.01)
    raise AssertionError("an engine was left")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"data_parallel_routing": "luck"}, "data_parallel_routing is 'luck'; available: load, prefix"),
        ({"data_parallel_start_rank": 1}, "data_parallel_start_rank is 1 and data_parallel_size_local 2; use engines of 0 to 1"),
        ({"data_parallel_size_local": 3}, "use engines of 0 to 1"),
        ({"data_parallel_size_local": 2**70}, "use engines of 0 to 1"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(2, **settings)

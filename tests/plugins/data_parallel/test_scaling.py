"""Another number of engines behind `SeveralEngines`, over scripted ones: who leaves when, who joins, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import eventually

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient, start_engines
from pelton.errors import ConfigError, EngineDeadError, EngineError, NotSupportedError, RequestError
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.messages.request import EngineRequest
from pelton.plugins import load_plugins
from pelton.sampling_params import SamplingParams
from pelton.testing.engine_client import ScriptedEngine
from pelton_plugins.data_parallel import expert_group
from pelton_plugins.data_parallel.client import SeveralEngines
from pelton_plugins.executors.shared_experts import meeting


class Fleet:
    """A client and all engines that it started, in their order."""

    def __init__(self, num_engines: int, **settings: Any) -> None:
        self.started: list[ScriptedEngine] = []
        self.failing: Callable[[EngineConfig], Exception | None] = lambda config: None
        self.max_model_len = 256
        config = EngineConfig.from_flat(**{"data_parallel_size": num_engines, "enable_elastic_ep": True} | settings)
        client = start_engines(config, None, load_plugins(only=[]), self._start)  # type: ignore[arg-type]
        assert isinstance(client, SeveralEngines)
        self.client = client

    def _start(self, config: EngineConfig, model: Any, plugins: Any) -> EngineClient:
        if (error := self.failing(config)) is not None:
            raise error
        engine = ScriptedEngine(config)
        engine.answers["is_sleeping"] = False
        engine.info.max_model_len = self.max_model_len
        self.started.append(engine)
        return engine

    @property
    def open(self) -> list[ScriptedEngine]:
        return sorted((engine for engine in self.started if not engine.is_closed), key=lambda engine: engine.rank)

    def send(self, *names: str) -> None:
        given = {"prompt_token_ids": [1], "sampling_params": SamplingParams()}
        self.client.add_requests([EngineRequest(request_id=name, **given) for name in names])

    def scale(self, num_engines: int, seconds: float = 20.0) -> Any:
        return asyncio.create_task(asyncio.to_thread(self.client.call, "scale_elastic_ep", num_engines, seconds))

    async def ended(self, *names: str) -> list[EngineOutput]:
        """Take outputs until these requests have ended."""
        found: list[EngineOutput] = []
        while {one.request_id for one in found} < set(names):
            batches = await asyncio.wait_for(self.client.get_outputs_async(), 60)
            found += [one for batch in batches for one in batch.outputs if one.finish_reason is not None]
        return found


def done(request_id: str) -> EngineOutput:
    return EngineOutput(request_id, [5], finish_reason=FinishReason.LENGTH)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(18_000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come true")


async def test_engines_join_and_leave_and_requests_go_on():
    fleet = Fleet(1)
    follow = asyncio.create_task(fleet.ended("a", "b", "c", "d", "e"))
    fleet.send("a")
    await asyncio.wait_for(fleet.scale(3), 60)
    assert [engine.rank for engine in fleet.open] == [0, 1, 2]
    fleet.send("b", "c", "d")
    first, second, third = fleet.open
    assert [first.requests, second.requests, third.requests] == [["a", "d"], ["b"], ["c"]]
    assert "3, requests by load" in fleet.client.info.report.choices["engines"]
    leaving = fleet.scale(1)
    await until(lambda: all(engine.is_leaving for engine in fleet.client._engines[1:]))
    fleet.send("e")
    assert first.requests[-1] == "e"
    second.say(done("b"))
    await until(lambda: not fleet.client._engines[1].num_in_flight)
    assert not leaving.done() and not second.is_closed, "c runs"
    third.say(done("c"))
    assert await asyncio.wait_for(leaving, 60) is True
    assert fleet.open == [first] and second.is_closed and third.is_closed
    first.say(done("a"), done("d"), done("e"))
    found = await follow
    assert all(one.error is None for one in found)
    assert fleet.client.call("kv_cache_usage") is True and not [one for one in third.calls if "kv" in one[0]]
    fleet.client.shutdown()


async def test_what_is_left_at_the_end_of_the_time_ends_with_a_reason():
    fleet = Fleet(2)
    follow = asyncio.create_task(fleet.ended("b"))
    fleet.send("a", "b")
    await asyncio.wait_for(fleet.scale(1, 0.05), 60)
    [lost] = await follow
    assert lost.finish_reason == FinishReason.ERROR and lost.error is not None and lost.error.status == 503
    assert "did not finish within 0.05 s. Send it again." in lost.error.message
    assert fleet.client._engine_of.keys() == {"a"}
    fleet.client.shutdown()


async def test_a_joined_engine_is_started_again_and_one_that_dies_while_it_leaves_is_not():
    fleet = Fleet(1)
    joined: list[int] = []
    fleet.client.supervise(5, lambda info, index: joined.append(index))
    follow = asyncio.create_task(fleet.ended("x"))
    await asyncio.wait_for(fleet.scale(2), 60)
    second = fleet.open[1]
    second.die()
    await until(lambda: second.num_starts == 2 and fleet.client._engines[1].is_up)
    assert joined == [1, 1]
    fleet.send("a", "x")
    second.may_restart.clear()
    leaving = fleet.scale(1)
    await until(lambda: fleet.client._engines[1].is_leaving)
    second.die()
    assert await asyncio.wait_for(leaving, 60)
    [lost] = await follow
    assert lost.error is not None and "was killed" in lost.error.message
    second.may_restart.set()
    assert len(fleet.client._engines) == 1 and fleet.open == [fleet.started[0]]
    fleet.client.shutdown()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ((0, 1), "Use a whole number of engines, 1 to 1024"),
        ((-1, 1), "new_data_parallel_size"),
        ((2000, 1), "1 to 1024"),
        ((True, 1), "whole number"),
        ((1.5, 1), "whole number"),
        (("2", 1), "whole number"),
        ((2, -1), "drain_timeout"),
        ((2, float("nan")), "Use seconds, 0 to"),
        ((2, "soon"), "Use seconds"),
    ],
)
def test_wrong_numbers_are_named(asked: tuple[Any, Any], why: str) -> None:
    fleet = Fleet(1)
    with pytest.raises(RequestError, match=why) as caught:
        fleet.client.call("scale_elastic_ep", *asked)
    assert caught.value.status == 400 and len(fleet.started) == 1
    fleet.client.shutdown()


async def test_one_change_at_a_time_and_none_while_engines_sleep():
    fleet = Fleet(2)
    follow = asyncio.create_task(fleet.ended("b"))
    fleet.send("a", "b")
    first = fleet.scale(1)
    await until(lambda: fleet.client._engines[1].is_leaving)
    with pytest.raises(RequestError, match="being changed already") as caught:
        await fleet.scale(3)
    assert caught.value.status == 409
    fleet.started[1].say(done("b"))
    await asyncio.wait_for(first, 60)
    await follow
    fleet.started[0].answers["is_sleeping"] = True
    with pytest.raises(RequestError, match="Wake them up first") as caught:
        await fleet.scale(3)
    assert caught.value.status == 409 and len(fleet.started) == 2
    fleet.client.shutdown()


async def test_engines_that_do_not_start_change_nothing():
    fleet = Fleet(1)
    fleet.failing = lambda config: ConfigError("no device 2") if config.parallel.data_parallel_rank == 2 else None
    with pytest.raises(RequestError, match=r"3 engines did not start, and there are 1 as before. no device 2"):
        await fleet.scale(3)
    assert len(fleet.open) == len(fleet.client._engines) == 1 and fleet.started[1].is_closed
    fleet.failing = lambda config: None
    fleet.max_model_len = 100
    with pytest.raises(EngineError, match="room for requests of 100 tokens, and 256 are promised"):
        await fleet.scale(2)
    assert len(fleet.open) == 1
    fleet.send("a")
    assert fleet.started[0].requests == ["a"]
    fleet.client.shutdown()


async def test_engines_that_share_experts_all_leave_and_as_many_as_are_wanted_start():
    fleet = Fleet(2, enable_expert_parallel=True)
    follow = asyncio.create_task(fleet.ended("a", "b"))
    fleet.send("a", "b")
    changing = fleet.scale(3)
    await until(lambda: all(engine.is_leaving for engine in fleet.client._engines))
    assert "2 engines that share their experts become 3" in str(fleet.client.error)
    with pytest.raises(EngineDeadError, match=r"become 3. New requests are refused") as caught:
        fleet.send("c")
    assert caught.value.status == 503
    for engine, name in zip(fleet.started[:2], ("a", "b"), strict=True):
        engine.say(done(name))
    assert await asyncio.wait_for(changing, 60)
    await follow
    before, now = fleet.started[:2], fleet.open
    assert all(engine.is_closed for engine in before) and [engine.rank for engine in now] == [0, 1, 2]
    parallel = [engine.config.parallel for engine in (*before, *now)]
    assert [one.data_parallel_size for one in parallel] == [2, 2, 3, 3, 3]
    assert len({one.data_parallel_store for one in parallel}) == 2 and None not in {
        one.data_parallel_store for one in parallel
    }
    assert fleet.client.error is None
    fleet.send("d")
    # One that dies takes those along that are there now.
    assert await asyncio.wait_for(fleet.scale(1, 0.0), 60)
    assert fleet.open[0].config.parallel.data_parallel_store is None
    fleet.client.shutdown()


async def test_a_group_that_does_not_start_is_what_it_was_before():
    fleet = Fleet(2, enable_expert_parallel=True)
    follow = asyncio.create_task(fleet.ended("never"))
    fleet.failing = lambda config: ConfigError("4 experts") if config.parallel.data_parallel_size > 2 else None
    with pytest.raises(RequestError, match=r"5 engines did not start, and there are 2 as before. 4 experts"):
        await fleet.scale(5)
    assert [engine.config.parallel.data_parallel_size for engine in fleet.open] == [2, 2]
    assert fleet.client.error is None
    fleet.failing = lambda config: ConfigError("no room")
    with pytest.raises(EngineDeadError, match=r"3 did not start \(no room\), and 2 did not any more"):
        await fleet.scale(3)
    assert "There are no engines" in str(fleet.client.error) and fleet.client.num_engines == 0
    fleet.failing = lambda config: None
    await fleet.scale(2)
    assert fleet.client.error is None and len(fleet.open) == 2
    follow.cancel()
    fleet.client.shutdown()


@pytest.mark.parametrize("is_group", [False, True])
async def test_a_shutdown_waits_for_no_start_and_leaves_nothing(is_group: bool) -> None:
    fleet = Fleet(1, enable_expert_parallel=is_group)
    follow = asyncio.create_task(fleet.ended("never"))
    may_start = threading.Event()

    def wait(config: EngineConfig) -> None:
        may_start.wait(120)

    fleet.failing = wait
    changing = fleet.scale(2)
    await until(lambda: fleet.client._scaling._is_busy.locked())
    await asyncio.sleep(0.1)
    fleet.client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await asyncio.wait_for(changing, 60)
    may_start.set()
    await until(lambda: len(fleet.started) == (3 if is_group else 2) and not fleet.open)
    follow.cancel()


async def test_a_front_end_of_engines_of_another_process_lets_go_and_takes():
    fleet = Fleet(2, enable_expert_parallel=True)
    await asyncio.to_thread(fleet.client.call, "take_engines", 0, 1.0)
    assert not any(engine.is_closed for engine in fleet.started), "they are not ours"
    assert str(fleet.client.error) == "The number of engines is being changed."
    await asyncio.to_thread(fleet.client.call, "take_engines", 3, 0.0)
    assert len(fleet.started) == 5 and fleet.client.call("num_engines") == 3 and fleet.client.error is None
    fleet.client.shutdown()


def test_a_program_without_an_event_loop():
    fleet = Fleet(1)
    fleet.client.call("scale_elastic_ep", 2, 1.0)
    fleet.send("a", "b")
    threading.Timer(0.05, lambda: fleet.open[1].say(done("b"))).start()
    found: list[EngineOutputs] = []
    assert eventually(lambda: any(one.outputs for one in found) or found.append(fleet.client.get_outputs(1)))
    fleet.client.call("scale_elastic_ep", 1, 1.0)
    assert len(fleet.open) == 1
    fleet.client.shutdown()


def test_it_is_off_unless_it_is_allowed_and_one_host_alone_has_it():
    fleet = Fleet(2, enable_elastic_ep=False)
    with pytest.raises(NotSupportedError, match="stays 2: enable_elastic_ep is off"):
        fleet.client.call("scale_elastic_ep", 3, 1.0)
    fleet.client.shutdown()
    for settings in ({"data_parallel_size_local": 1}, {"data_parallel_address": "10.0.0.1"}):
        with pytest.raises(ConfigError, match="does not go with enable_elastic_ep"):
            Fleet(2, **settings)


def test_who_waits_for_one_that_did_not_start_hears_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(expert_group.tempfile, "gettempdir", lambda: str(tmp_path))
    config = EngineConfig.from_flat(data_parallel_size=2, enable_expert_parallel=True)
    group = expert_group.ExpertGroup(config.parallel)
    folder = tmp_path / str(group.parallel.data_parallel_store)
    threading.Timer(0.05, group.give_up).start()
    with pytest.raises(EngineError, match="Another engine of those that share experts did not start"):
        meeting.meet(folder, 0, 2, 60.0)
    group.close()
    assert not list(tmp_path.iterdir())

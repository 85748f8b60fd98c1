"""Conformance of clients of several engines: what any implementation has to keep, run with pytest.

Subclass `EngineClientConformance` in a test module and name what is tested:

    class TestMine(EngineClientConformance):
        load = "my_package.client:MyClient"

The engines are `ScriptedEngine`s: no process, no model.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.errors import EngineDeadError
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.messages.report import DeviceReport, EngineInfo
from pelton.messages.request import EngineRequest
from pelton.metrics.stats import SchedulerStats
from pelton.plugins import load_plugins
from pelton.sampling_params import SamplingParams

NUM_ENGINES = 3


class ScriptedEngine(EngineClient):
    """An engine that says what a test tells it to, to whoever asks on an event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self.rank = config.parallel.data_parallel_rank
        self.config = config
        self.info = EngineInfo(
            report=DeviceReport(), num_blocks=10 - self.rank, block_size=16, kv_cache_bytes=1, max_num_seqs=8,
            max_num_batched_tokens=64, max_model_len=256,
        )  # fmt: skip
        self.requests: list[str] = []
        self.ended: list[tuple[str, FinishReason]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.silence = 0.0
        self.num_starts = 1
        self.is_closed = False
        self._error: Exception | None = None
        self._said: list[EngineOutputs] = []
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.may_restart = threading.Event()
        self.may_restart.set()

    def say(self, *outputs: EngineOutput, stats: SchedulerStats | None = None) -> None:
        self._said.append(EngineOutputs(list(outputs), 1.0, stats))
        self._set()

    def die(self) -> None:
        self._error = EngineDeadError(f"engine of rank {self.rank} was killed")
        self._set()

    def _set(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    def add_request(self, request: EngineRequest) -> None:
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        if self._error is not None:
            raise self._error
        self.requests += [request.request_id for request in requests]

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        self.ended += [(request_id, reason) for request_id in request_ids]

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        raise AssertionError("scripted engines are asked on an event loop")

    async def get_outputs_async(self) -> list[EngineOutputs]:
        self._loop = asyncio.get_running_loop()
        while not self._said:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        said, self._said = self._said, []
        return said

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        self.calls.append((method, *args))
        answer = self.answers.get(method, True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def error(self) -> Exception | None:
        return self._error

    @property
    def silence_s(self) -> float:
        return self.silence

    def restart(self) -> None:
        assert self.may_restart.wait(10)
        self.num_starts += 1
        self._error = None

    def shutdown(self, timeout_s: float = 10.0) -> None:
        self.is_closed = True


class EngineClientConformance:
    load: ClassVar[str]
    """module:class"""
    settings: ClassVar[dict[str, object]] = {}
    """Flat settings, such as `plugin_config`."""

    def _make(self) -> tuple[EngineClient, list[ScriptedEngine]]:
        engines: dict[int, ScriptedEngine] = {}

        def start(config: EngineConfig, model: Any, plugins: Any) -> EngineClient:
            return engines.setdefault(config.parallel.data_parallel_rank, ScriptedEngine(config))

        module, _, name = self.load.partition(":")
        config = EngineConfig.from_flat(data_parallel_size=NUM_ENGINES, **self.settings)
        client = getattr(importlib.import_module(module), name)(config, None, load_plugins(only=[]), start)
        assert isinstance(client, EngineClient)
        assert sorted(engines) == list(range(NUM_ENGINES)), "each engine has a data_parallel_rank of its own"
        return client, [engines[index] for index in range(NUM_ENGINES)]

    def test_each_request_goes_to_one_engine_and_ends_there(self) -> None:
        client, engines = self._make()
        client.add_requests([_request(number) for number in range(12)])
        client.add_request(_request(12))
        sent = [request_id for engine in engines for request_id in engine.requests]
        assert sorted(sent) == sorted(f"r{number}" for number in range(13)), f"the engines got {sent}"
        assert client.info.num_blocks > 0
        client.finish_requests(["r3", "r12", "unknown"])
        for engine in engines:
            wanted = [(name, FinishReason.ABORT) for name in ("r3", "r12") if name in engine.requests]
            assert [end for end in engine.ended if end[0] != "unknown"] == wanted, "an abort goes where the request is"
        client.shutdown()
        client.shutdown()

    def test_outputs_say_whose_they_are(self) -> None:
        async def run() -> None:
            client, engines = self._make()
            client.add_requests([_request(number) for number in range(12)])
            for engine in engines:
                for name in engine.requests:
                    engine.say(EngineOutput(name, [5], finish_reason=FinishReason.LENGTH), stats=SchedulerStats())
            left = {name: engine.rank for engine in engines for name in engine.requests}
            while left:
                for outputs in await asyncio.wait_for(client.get_outputs_async(), 5):
                    for output in outputs.outputs:
                        assert left.pop(output.request_id) == outputs.engine_index, "engine_index is the engine's rank"
            client.shutdown()

        asyncio.run(run())

    def test_calls_reach_every_engine(self) -> None:
        client, engines = self._make()
        assert client.call("reset_prefix_cache") is True
        engines[1].answers["reset_prefix_cache"] = False
        assert client.call("reset_prefix_cache") is False, "False where one engine did not do it"
        assert all(engine.calls == [("reset_prefix_cache",)] * 2 for engine in engines)
        client.shutdown()

    def test_a_dead_engine_is_told(self) -> None:
        """Expect its requests to end with an error, or the client to raise, which ends all of them."""

        async def run() -> None:
            client, engines = self._make()
            client.add_requests([_request(number) for number in range(12)])
            engine = next(engine for engine in engines if engine.requests)
            left = set(engine.requests)
            engine.die()
            with pytest.raises(EngineDeadError):
                while left:
                    for outputs in await asyncio.wait_for(client.get_outputs_async(), 5):
                        assert all(one.finish_reason == FinishReason.ERROR for one in outputs.outputs)
                        left -= {one.request_id for one in outputs.outputs}
                raise EngineDeadError("every request of it was told")
            client.shutdown()

        asyncio.run(run())

    def test_the_end_is_that_of_all(self) -> None:
        client, engines = self._make()
        client.shutdown()
        assert all(engine.is_closed for engine in engines), "an engine was left"
        assert client.error is not None


def _request(number: int) -> EngineRequest:
    return EngineRequest(request_id=f"r{number}", prompt_token_ids=[1, 2, number], sampling_params=SamplingParams())

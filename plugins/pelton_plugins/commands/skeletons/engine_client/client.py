"""The client: engine after engine gets a request. A dead one ends all requests, and is then started again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient, EngineStarter
from pelton.errors import EngineDeadError
from pelton.messages.outputs import EngineOutputs, FinishReason
from pelton.messages.request import EngineRequest
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins

POLL_S = 0.005


class SkeletonClient(EngineClient):
    def __init__(self, config: EngineConfig, model: ResolvedModel, plugins: Plugins, start: EngineStarter) -> None:
        self._engines: dict[int, EngineClient] = {}
        for index in config.parallel.engine_indexes:
            own = msgspec.structs.replace(config.parallel, data_parallel_rank=index)
            self._engines[index] = start(msgspec.structs.replace(config, parallel=own), model, plugins)
        self._turns = itertools.cycle(self._engines.values())
        self._engine_of: dict[str, EngineClient] = {}
        self._asked: dict[int, asyncio.Task[list[EngineOutputs]]] = {}
        self._is_closed = False
        self.info = next(iter(self._engines.values())).info

    def add_request(self, request: EngineRequest) -> None:
        engine = self._engine_of[request.request_id] = next(self._turns)
        engine.add_request(request)

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        for request_id in request_ids:
            if request_id in self._engine_of:
                self._engine_of[request_id].finish_requests([request_id], reason)

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        for _ in itertools.count() if timeout_s is None else range(max(1, int(timeout_s / POLL_S))):
            for index, engine in self._engines.items():
                outputs = engine.get_outputs(POLL_S / len(self._engines))
                if outputs.outputs or outputs.stats is not None:
                    return self._mark(index, [outputs])[0]
        return EngineOutputs()

    async def get_outputs_async(self) -> list[EngineOutputs]:
        for index, engine in self._engines.items():
            if index not in self._asked:
                self._asked[index] = asyncio.ensure_future(engine.get_outputs_async())
        await asyncio.wait(self._asked.values(), return_when=asyncio.FIRST_COMPLETED)
        ready = [index for index, asked in self._asked.items() if asked.done()]
        return [outputs for index in ready for outputs in self._mark(index, self._asked.pop(index).result())]

    def _mark(self, index: int, batches: list[EngineOutputs]) -> list[EngineOutputs]:
        for outputs in batches:
            outputs.engine_index = index
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self._engine_of.pop(output.request_id, None)
        return batches

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        results = [engine.call(method, *args, timeout_s=timeout_s) for engine in self._engines.values()]
        return all(results) if isinstance(results[0], bool) else results[0]

    @property
    def error(self) -> Exception | None:
        if self._is_closed:
            return EngineDeadError("The engines were shut down.")
        return next((engine.error for engine in self._engines.values() if engine.error is not None), None)

    def restart(self) -> None:
        self._engine_of.clear()
        for engine in self._engines.values():
            if engine.error is not None:
                engine.restart()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        self._is_closed = True
        for asked in self._asked.values():
            asked.cancel()
        for engine in self._engines.values():
            engine.shutdown(timeout_s)

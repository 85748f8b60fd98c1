"""/scale_elastic_ep, /is_scaling_elastic_ep."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Response, post
from litestar.types import ASGIApp

from pelton.errors import RequestError
from pelton_plugins.server.errors import NotAllowedError
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.protocol import ScaleAnswer, ScaleRequest, ScalingAnswer
from pelton_plugins.server.state import ServerState


def routes(state: ServerState) -> list[Any]:
    tasks: set[asyncio.Task[None]] = set()

    @post("/scale_elastic_ep", status_code=200, opt=api(ScaleRequest, ScaleAnswer))
    async def scale() -> ASGIApp:
        """Have so many engines from now on; answers once they are there. Those that leave finish their requests within drain_timeout."""
        return Exchange(state, ScaleRequest, scale_to, generates=False)

    @post("/is_scaling_elastic_ep", status_code=200, opt=api(None, ScalingAnswer))
    async def is_scaling() -> Response[bytes]:
        """Say whether the number of engines is being changed."""
        _engine(state)
        answer = ScalingAnswer(is_scaling_elastic_ep=state.is_scaling)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def scale_to(exchange: Exchange, request: ScaleRequest) -> None:
        engine = _engine(state)
        # On a task of its own: it goes on where the client leaves.
        task = asyncio.create_task(_scale(state, engine, request.new_data_parallel_size, request.drain_timeout))
        tasks.add(task)
        task.add_done_callback(_forgetting(tasks))
        await asyncio.shield(task)
        count = request.new_data_parallel_size
        await exchange.answer(msgspec.json.encode(ScaleAnswer(message=f"Scaled to {count} data parallel engines")))

    return [scale, is_scaling]


def _forgetting(tasks: set[asyncio.Task[None]]) -> Any:
    def forget(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have left

    return forget


async def _scale(state: ServerState, engine: Any, num_engines: int, drain_timeout_s: float) -> None:
    if state.ask_scale is not None:
        await state.ask_scale(num_engines, drain_timeout_s)
        return
    if state.is_scaling:
        refusal = RequestError("The number of engines is being changed already.", param="new_data_parallel_size")
        refusal.status = 409
        raise refusal
    state.is_scaling = True
    try:
        await engine.scale_elastic_ep(num_engines, drain_timeout_s)
    finally:
        state.is_scaling = False


def _engine(state: ServerState) -> Any:
    engine = state.engine()
    if not engine.config.parallel.enable_elastic_ep:
        raise NotAllowedError("The number of engines does not change here: start the server with --enable-elastic-ep.")
    return engine

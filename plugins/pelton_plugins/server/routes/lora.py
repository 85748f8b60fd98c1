"""/v1/load_lora_adapter, /v1/unload_lora_adapter."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import post
from litestar.types import ASGIApp

from pelton.errors import RequestError
from pelton.lora.request import LoRARequest
from pelton_plugins.server.errors import NotAllowedError
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.protocol import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest
from pelton_plugins.server.state import ServerState


def routes(state: ServerState) -> list[Any]:
    @post("/v1/load_lora_adapter", status_code=200, opt=api(LoadAdapterRequest, AdapterAnswer))
    async def load() -> ASGIApp:
        """Load a LoRA adapter from a folder of the server, and serve it under a name."""
        return Exchange(state, LoadAdapterRequest, _load, generates=False)

    @post("/v1/unload_lora_adapter", status_code=200, opt=api(UnloadAdapterRequest, AdapterAnswer))
    async def unload() -> ASGIApp:
        """Serve a LoRA adapter no longer; requests that run with it go on."""
        return Exchange(state, UnloadAdapterRequest, _unload, generates=False)

    return [load, unload]


async def _load(exchange: Exchange, request: LoadAdapterRequest) -> None:
    llm = _engine(exchange.state)
    name = request.lora_name
    served = exchange.state.adapters.get(name)
    if served is not None and not request.load_inplace:
        raise RequestError(
            f"The lora adapter '{name}' has already been loaded. Unload it first, or send load_inplace.",
            param="lora_name",
        )
    number = 1 if served is None else served.lora_int_id + 1  # another number: the folder is read again
    try:
        await llm.add_lora(LoRARequest(name, number, request.lora_path))
    except RequestError as error:
        error.param = "lora_path" if error.param == "model" else error.param
        raise
    if served is not None:
        await llm.forget_lora(served)
    await _answer(exchange, f"LoRA adapter '{name}' added.")


async def _unload(exchange: Exchange, request: UnloadAdapterRequest) -> None:
    await _engine(exchange.state).remove_lora(request.lora_name)
    await _answer(exchange, f"LoRA adapter '{request.lora_name}' removed.")


async def _answer(exchange: Exchange, message: str) -> None:
    await exchange.answer(msgspec.json.encode(AdapterAnswer(message=message)))


def _engine(state: ServerState) -> Any:
    llm = state.engine()
    registry = getattr(llm, "adapters", None)
    if registry is None or not registry.config.enable_lora or not registry.config.allow_runtime_lora_updating:
        raise NotAllowedError(
            "Adapters are not loaded and unloaded here: start the server with --enable-lora --allow-runtime-lora-updating."
        )
    return llm

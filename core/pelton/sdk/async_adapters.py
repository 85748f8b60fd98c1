"""LoRA adapters of a running engine, for asyncio programs: a part of `AsyncLLM`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pelton.config import EngineConfig
from pelton.errors import ConfigError, RequestError
from pelton.lora.registry import AdapterRegistry
from pelton.lora.request import LoRARequest
from pelton.lora.resolver import LoRAResolver
from pelton.messages.request import AdapterRef

LOAD_POLL_S = 0.005  # between two looks at an adapter that is being loaded


class AsyncAdapters(ABC):
    """Names that are served, and the engine's calls that load and forget what they stand for."""

    config: EngineConfig
    adapters: AdapterRegistry

    @property
    @abstractmethod
    def _resolvers(self) -> Sequence[tuple[str, LoRAResolver]]:
        """(name, resolver), in the order in which they are asked."""

    @abstractmethod
    async def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """Utility call into the engine core."""

    @abstractmethod
    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the engine."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have the engine read an adapter, and serve its name. Raises `RequestError` for one that it cannot serve; one of the same
        name is then still served."""
        ref = self.adapters.ref(lora_request)
        self.adapters.check_name(ref.name)
        try:
            await self._load_adapter(ref)
        except BaseException:
            if self.adapters.get(lora_request.lora_name) != lora_request:
                self.adapters.forget(lora_request)
            raise
        self.adapters.serve(lora_request)
        return True

    async def remove_lora(self, lora_name: str) -> bool:
        """Forget an adapter; requests that run with it go on. Raises `AdapterNotFoundError` for a name that is not served."""
        return await self.forget_lora(self.adapters.unserve(lora_name))

    async def forget_lora(self, lora_request: LoRARequest) -> bool:
        """Free an adapter's memory, whatever its name now stands for. An equal request is another adapter from now on."""
        ref = self.adapters.forget(lora_request)
        return ref is not None and bool(await self.call("adapter.remove", ref.id))

    def list_loras(self) -> dict[str, LoRARequest]:
        """The adapters that are served, by name."""
        return self.adapters.served

    async def pin_lora(self, lora_name: str) -> bool:
        """Keep an adapter on host and device, whatever else is asked for."""
        ref = self.adapters.ref(self.adapters.require(lora_name))
        await self.call("adapter.pin", ref.id)
        return True

    async def resolve_lora(self, lora_name: str) -> LoRARequest:
        """The adapter of this name: one that is served, or one that a resolver finds. Raises `AdapterNotFoundError`, or what
        is wrong with it."""
        if not self._resolvers:
            return self.adapters.require(lora_name)
        return await self.adapters.resolve(lora_name, self.config.model.model, self._resolvers, self._load_adapter)

    @property
    def resolves_loras(self) -> bool:
        """Return whether adapters of unknown names are looked for."""
        return bool(self._resolvers)

    async def _load_adapter(self, ref: AdapterRef) -> None:
        while not await self.call("adapter.load", ref.id, ref.name, ref.path):
            await asyncio.sleep(LOAD_POLL_S)

    async def _load_adapters(self) -> None:
        """Those that `lora_modules` names."""
        try:
            for name, path in self.config.lora.modules():
                await self.add_lora(LoRARequest(name, 1, path))
        except RequestError as error:
            self.shutdown()
            raise ConfigError(f"lora_modules: {error}") from error

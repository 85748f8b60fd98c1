"""The front end's adapters: names that are served, and the number that each adapter is known by in the engine.

A number is given once: what is cached for an adapter is never found by another, whatever their names are.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from pelton.errors import AdapterNotFoundError, NotSupportedError, PeltonError, RequestError
from pelton.logging import get_logger
from pelton.lora.request import LoRARequest
from pelton.messages.request import AdapterRef

if TYPE_CHECKING:
    from pelton.config import LoRAConfig
    from pelton.lora.resolver import LoRAResolver

FAILURE_S = 5.0
"""Seconds for which a name that no resolver could load is refused at once."""
_MOST_FAILURES = 1024

logger = get_logger(__name__)

Load = Callable[[AdapterRef], Awaitable[None]]
"""Ask the engine for an adapter, and wait until it has it. Raises what stops it."""


class AdapterRegistry:
    """One event loop, or one thread."""

    def __init__(
        self, config: LoRAConfig, base_names: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """base_names: what requests call the model alone; no adapter may be served as one of these."""
        self.config, self._base_names = config, base_names
        self._clock = clock
        self._ids = itertools.count(1)
        self._refs: dict[LoRARequest, AdapterRef] = {}
        self._served: dict[str, LoRARequest] = {}
        self._resolving: dict[str, asyncio.Task[LoRARequest]] = {}
        self._failures: dict[str, tuple[float, PeltonError]] = {}

    def check_enabled(self) -> None:
        """Raises `NotSupportedError` where the engine serves no adapters."""
        if not self.config.enable_lora:
            raise NotSupportedError("This engine serves no adapters: enable_lora is off.", param="lora_request")

    def ref(self, request: LoRARequest) -> AdapterRef:
        """How the engine knows the adapter; the same for equal requests, until it is forgotten."""
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request is a {type(request).__name__}; give a LoRARequest.", param="lora_request")
        self.check_enabled()
        known = self._refs.get(request)
        if known is None:
            known = AdapterRef(id=next(self._ids), name=request.lora_name, path=str(request.lora_path))
            self._refs[request] = known
        return known

    def forget(self, request: LoRARequest) -> AdapterRef | None:
        """From now on an equal request is another adapter."""
        return self._refs.pop(request, None)

    def number_from(self, first: int) -> None:
        """Give the adapters to come numbers that no other front end of the same engine gives."""
        self._ids = itertools.count(first)

    # Served names.

    @property
    def served(self) -> dict[str, LoRARequest]:
        """Return by name what requests may give as their model."""
        return dict(self._served)

    def get(self, name: str) -> LoRARequest | None:
        return self._served.get(name)

    def require(self, name: str) -> LoRARequest:
        """Raises `AdapterNotFoundError` for a name that is not served."""
        request = self._served.get(name)
        if request is None:
            known = ", ".join(self._served) or "none"
            raise AdapterNotFoundError(f"LoRA adapter {name!r} is not loaded; there are: {known}.", param="lora_name")
        return request

    def check_name(self, name: str) -> None:
        """Raises `RequestError` for a name that no adapter may be served as."""
        if name in self._base_names:
            raise RequestError(
                "The model itself has this name; give the adapter another", param="lora_name", value=name
            )

    def serve(self, request: LoRARequest) -> None:
        """Requests may name it from now on."""
        self._served[request.lora_name] = request
        self._failures.pop(request.lora_name, None)

    def unserve(self, name: str) -> LoRARequest:
        """Raises `AdapterNotFoundError` for a name that is not served."""
        request = self.require(name)
        del self._served[name]
        return request

    # Names that nobody has loaded yet.

    async def resolve(
        self, name: str, base_model: str, resolvers: Sequence[tuple[str, LoRAResolver]], load: Load
    ) -> LoRARequest:
        """Find and load the adapter of an unknown name. Requests that ask meanwhile wait for the same load. A failure is remembered for a
        short time, and raised again. Raises `RequestError`."""
        known = self._served.get(name)
        if known is not None:
            return known
        failed = self._failures.get(name)
        if failed is not None and self._clock() < failed[0]:
            raise failed[1]
        task = self._resolving.get(name)
        if task is None:
            task = asyncio.create_task(self._resolve(name, base_model, resolvers, load))
            self._resolving[name] = task
            task.add_done_callback(lambda done: self._resolving.pop(name, None))
        return await asyncio.shield(task)  # a client that goes away leaves the others their load

    async def _resolve(
        self, name: str, base_model: str, resolvers: Sequence[tuple[str, LoRAResolver]], load: Load
    ) -> LoRARequest:
        try:
            request = await self._ask(name, base_model, resolvers)
            await load(self.ref(request))
        except PeltonError as error:
            self._note_failure(name, error)
            raise
        self.serve(request)
        return request

    async def _ask(self, name: str, base_model: str, resolvers: Sequence[tuple[str, LoRAResolver]]) -> LoRARequest:
        for resolver_name, resolver in resolvers:
            try:
                found = await resolver.resolve_lora(base_model, name)
                if not isinstance(found, LoRARequest | None) or (found is not None and found.lora_name != name):
                    raise TypeError(f"it gives {found!r}, not a LoRARequest of that name")
            except PeltonError:
                raise
            except Exception:
                logger.exception("LoRA resolver %s failed on %r; the next one is asked.", resolver_name, name)
                continue
            if found is not None:
                return found
        asked = ", ".join(resolver_name for resolver_name, _ in resolvers)
        raise AdapterNotFoundError(f"LoRA adapter {name!r} not found; asked: {asked}.", param="model")

    def _note_failure(self, name: str, error: PeltonError) -> None:
        now = self._clock()
        self._failures = {known: failed for known, failed in self._failures.items() if failed[0] > now}
        if len(self._failures) < _MOST_FAILURES:
            self._failures[name] = now + FAILURE_S, error

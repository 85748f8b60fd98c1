"""The state that all handlers of one server share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pelton import limits
from pelton.errors import ModelNotFoundError, PeltonError, RequestError
from pelton_plugins.server.body import BodyBudget
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.errors import UnavailableError
from pelton_plugins.server.http_metrics import HttpMetrics

if TYPE_CHECKING:
    from litestar.types import Scope

    from pelton.lora.request import LoRARequest
    from pelton.sdk.async_llm import AsyncLLM
    from pelton_plugins.server.exchange import Exchange
    from pelton_plugins.server.parsing import Parsers
    from pelton_plugins.server.processes.load_counts import LoadCounts
    from pelton_plugins.server.responses import ResponseStore
    from pelton_plugins.server.tracing import Tracing


@dataclass(slots=True)
class ServerState:
    """Made before the engine: the server listens while the model loads, and says so on /health."""

    config: ServerConfig
    model_names: Sequence[str]
    llm: AsyncLLM | Any | None = None
    phase: str = "loading the model"
    """What keeps the server from taking requests, while `llm` is None."""
    is_draining: bool = False
    started_at: int = field(default_factory=lambda: int(time.time()))
    exchanges: set[Exchange] = field(default_factory=set)
    """Generating requests that are open now."""
    http_metrics: HttpMetrics = field(default_factory=HttpMetrics)
    tracing: Tracing | None = None
    openapi: bytes | None = None
    responses: ResponseStore | None = None
    parsers: Parsers | None = None
    """Of tool calls and reasoning; set with the application."""
    body_budget: BodyBudget = field(init=False)
    writes_directly: bool = True
    """Streams go past the middleware, which no plugin's is part of."""
    load_counts: LoadCounts | None = None
    """Open requests of all processes, where several serve; `index` is this one's place in it."""
    index: int = 0
    ask_metrics: Callable[[], Awaitable[str]] | None = None
    """Asks the process that knows the figures of all, where several serve."""
    ask_kept: Callable[[int, str, str], Awaitable[bytes]] | None = None
    """Asks process `index` to do something with a response that it keeps, where several serve; empty where it is gone."""

    ask_scale: Callable[[int, float], Awaitable[None]] | None = None
    """Asks the process that owns the engines for so many of them, where several serve; see `AsyncLLM.scale_elastic_ep`."""
    is_scaling: bool = False
    """The number of engines is being changed."""

    def __post_init__(self) -> None:
        self.body_budget = BodyBudget(self.config.max_body_bytes_at_once)

    def tenant_of(self, scope: Scope) -> str:
        """Return whose share of the engine a request is charged to; empty where there are no shares."""
        key = self.config.fairness_key
        if key is None:
            return ""
        if key == "api-key":
            token = _header(scope, b"authorization").partition(b" ")[2].strip()
            return hashlib.sha256(token).hexdigest()[:16]
        return _header(scope, key.removeprefix("header:").lower().encode())[: limits.MAX_TENANT_CHARS].decode("latin-1")

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def metrics_prefix(self) -> str:
        llm = self.llm
        return "pelton_" if llm is None else str(llm.config.observability.metrics_prefix)

    def engine(self) -> AsyncLLM | Any:
        """The engine, or `UnavailableError` with the reason."""
        if self.is_draining:
            raise UnavailableError("The server is shutting down; send the request to another one.")
        if self.llm is None:
            raise UnavailableError(f"The server is not ready yet: {self.phase}. Try again in a while.")
        return self.llm

    @property
    def adapters(self) -> Mapping[str, LoRARequest]:
        """Adapters that are served, by name."""
        registry = getattr(self.llm, "adapters", None)
        return {} if registry is None else registry.served

    async def adapter_of(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request names as its model, loaded where a resolver finds it; None: the model alone.

        Raises `ModelNotFoundError` (404), or what is wrong with the adapter.
        """
        if not name or name in self.model_names:
            return None
        llm = self.engine()
        if name not in self.adapters and getattr(llm, "resolves_loras", False):
            found: LoRARequest = await llm.resolve_lora(name)
            return found
        self.check_model(name)
        return self.adapters[name]

    def check_model(self, name: str | None) -> None:
        """Raises `ModelNotFoundError` (404). No name means the served model; adapters are models too."""
        if name and name not in self.model_names and name not in self.adapters:
            known = ", ".join(f"`{known}`" for known in [*self.model_names, *self.adapters])
            shown = name if len(name) <= 200 else name[:200] + "..."
            error = ModelNotFoundError(f"The model `{shown}` does not exist. Valid aliases: {known}.")
            error.param = "model"
            raise error

    def generating_engine(self) -> AsyncLLM | Any:
        """The engine, or `RequestError` (400) where its model pools."""
        llm = self.engine()
        if llm.model.pooling is not None:
            tasks = ", ".join(llm.model.pooling.tasks)
            raise RequestError(
                f"This model does not generate; it is run for {tasks}. Use /v1/embeddings, /classify, /score or /pooling.",
                param="model",
            )
        return llm

    def admit(self, exchange: Exchange) -> None:
        most = self.config.max_concurrent_requests
        if most is not None and self.num_open >= most:
            raise UnavailableError(f"{self.num_open} requests run already (max_concurrent_requests is {most}).")
        self.exchanges.add(exchange)
        if self.load_counts is not None:
            self.load_counts.tell(self.index, len(self.exchanges))

    def dismiss(self, exchange: Exchange) -> None:
        """Forget a request that was admitted."""
        self.exchanges.discard(exchange)
        if self.load_counts is not None:
            self.load_counts.tell(self.index, len(self.exchanges))

    @property
    def num_open(self) -> int:
        """Generating requests that are open now, over all processes."""
        return len(self.exchanges) if self.load_counts is None else self.load_counts.total()

    def end_all(self, error: PeltonError) -> None:
        """Every open request ends now, with `error`."""
        for exchange in list(self.exchanges):
            exchange.end(error)


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == wanted), b"")

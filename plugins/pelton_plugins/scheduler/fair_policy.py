"""Fair shares of an engine: whoever got least is admitted next.

Each tenant has a counter of the tokens that it was served, divided by its weight; output tokens count more than those of
prompts. One that was idle does not save up: on its return its counter is lifted to the least of those that wait. While two
tenants both wait, what they got differs by a bounded amount, whatever they send.

Paper  Sheng et al., Fairness in Serving Large Language Models, OSDI 2024 (arXiv:2401.00588): the virtual token counter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import msgspec

from pelton.config import EngineConfig
from pelton.config.plugin_settings import read_settings
from pelton.errors import ConfigError
from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import ScheduledRequest

SETTINGS = "fair"
REFRESH_S = 0.02  # between two looks at what running requests made: a look costs as much as a short step's scheduling
MAX_TENANTS = 10_000  # counters kept; those that got least are forgotten first, and lifted when they return


class FairSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of the scheduling policy `fair`."""

    weights: dict[str, float] = {}
    """Share of a tenant against another's; 1 for those that are not named."""
    input_weight: float = 1.0
    """What a prompt's token counts; one that the prefix cache has counts nothing."""
    output_weight: float = 2.0
    """What a generated token counts."""

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(f"weights has {weight} for {name!r}; use a number above 0.")
        for name in ("input_weight", "output_weight"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; use a number above 0.")


class FairPolicy(SchedulingPolicy):
    """First come, first served within a tenant; between tenants, who got least is next."""

    shares: ClassVar[bool] = True

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = FairSettings()
        self._clock = clock
        self._served: dict[str, float] = {}  # by tenant, without what running requests make
        self._making: dict[str, float] = {}  # by tenant, of running requests when looked at last
        self._made_by: dict[str, float] = {}  # the same by request
        self._looked = float("-inf")
        self._level = 0.0  # of the tenant that was chosen last

    def configure(self, config: EngineConfig) -> None:
        self._settings = read_settings(config, SETTINGS, FairSettings)

    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        return (request.arrival,)

    def served(self, tenant: str) -> float:
        """Weighted tokens that a tenant was served, divided by its weight."""
        return self._served.get(tenant, 0.0) + self._making.get(tenant, 0.0)

    def arrived(self, tenant: str, waiting: Collection[str]) -> None:
        level = min((self.served(other) for other in waiting), default=self._level)
        if self.served(tenant) < level:
            self._served[tenant] = level - self._making.get(tenant, 0.0)
        if len(self._served) > MAX_TENANTS:
            self._forget_least(tenant)

    def next_tenant(self, waiting: Collection[str], running: Sequence[ScheduledRequest]) -> str:
        now = self._clock()
        if now - self._looked >= REFRESH_S:
            self._look(running, now)
        served, making = self._served, self._making
        chosen, least = "", float("inf")
        for tenant in waiting:
            value = served.get(tenant, 0.0) + making.get(tenant, 0.0)
            if value < least or (value == least and tenant < chosen):
                chosen, least = tenant, value
        self._level = least
        return chosen

    def started(self, request: ScheduledRequest) -> None:
        num_new = request.num_prompt_tokens - max(request.num_cached_tokens, 0)
        self._charge(request, self._settings.input_weight * max(num_new, 0))

    def ended(self, request: ScheduledRequest) -> None:
        tenant = request.request.tenant
        if (made := self._made_by.pop(request.request_id, None)) is not None:
            self._making[tenant] -= made
        if request.num_output_tokens:
            self._charge(request, self._settings.output_weight * request.num_output_tokens)

    def _charge(self, request: ScheduledRequest, tokens: float) -> None:
        tenant = request.request.tenant
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens / self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self._settings.weights.get(tenant, 1.0)

    def _look(self, running: Sequence[ScheduledRequest], now: float) -> None:
        """Note what running requests have made so far: long answers count before their end."""
        self._looked = now
        making: dict[str, float] = {}
        made_by: dict[str, float] = {}
        for request in running:
            tenant = request.request.tenant
            made = self._settings.output_weight * request.num_output_tokens / self._weight(tenant)
            made_by[request.request_id] = made
            making[tenant] = making.get(tenant, 0.0) + made
        self._making, self._made_by = making, made_by

    def _forget_least(self, keep: str) -> None:
        for tenant in sorted(self._served, key=self.served)[: MAX_TENANTS // 10]:
            if tenant != keep and not self._making.get(tenant):
                del self._served[tenant]

"""`ExpertBalancer`: lets experts change places between steps, as a policy says, from the tokens that each was given lately.

All ranks do the same at the same step: they add up their counters, ask the policy, and send each other the weights of those that move.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError
from pelton.logging import get_logger
from pelton.parallel.expert_placement import ExpertPlacement, why_wrong
from pelton.plugins import calling, make

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.executor.interface import ExecutorContext
    from pelton.parallel.communicator import Communicator
    from pelton.worker.interface import Worker

logger = get_logger(__name__)

_KEPT = 100


class ExpertBalancer:
    """One in each rank; ranks: those that have the experts together."""

    def __init__(self, context: ExecutorContext, worker: Worker, ranks: Communicator) -> None:
        config, self._worker = context.config.eplb, worker
        if not self._layers() or ranks.size == 1:
            raise ConfigError(
                "enable_eplb is set, and no rank has some of the experts whole. Set enable_expert_parallel, with tensor_parallel_size or "
                "data_parallel_size above 1, for a model with experts; or leave it off."
            )
        self._ranks, self._config = ranks, config
        self._entry = context.plugins.find("pelton_expert_placements", config.policy, setting="eplb_config.policy")
        self._policy = make(self._entry, ExpertPlacement)  # type: ignore[type-abstract]
        self._mark_at = config.step_interval - min(config.window_size, config.step_interval)
        self._num_steps = 0
        self._marks = self._counters()
        self._told_balance: deque[float] = deque(maxlen=_KEPT)
        self._num_moved = 0
        self._moved = context.metrics.counter("expert_moves", "Experts that came to another rank.")
        self._balance = context.metrics.gauge(
            "expert_balance", "Tokens of a rank's experts, the mean over ranks by the largest, at the last look."
        )

    def after_step(self) -> None:
        """Between two steps, on all ranks."""
        place = self._num_steps = (self._num_steps + 1) % self._config.step_interval
        if place == 0:
            self._move()
        if place == self._mark_at % self._config.step_interval:
            self._marks = self._counters()

    def told(self) -> dict[str, Any]:
        """How many experts came to another rank so far, how even the load was at the last looks, as `expert_balance` is, and which expert
        each place of a layer has."""
        placement = {name: list(layer.placement) for name, layer in self._layers().items()}
        return {"moves": self._num_moved, "balance": list(self._told_balance), "placement": placement}

    def _layers(self) -> dict[str, Any]:
        """Those of the worker's model as it is: one that slept may have built another, and nobody else may hold on to the first."""
        model: Any = getattr(self._worker, "model", None)
        modules = model.named_modules() if model is not None else ()
        return {name: module for name, module in modules if getattr(module, "places", None)}

    def _counters(self) -> Tensor:
        import torch

        return torch.stack([layer.expert_load for layer in self._layers().values()])

    def _move(self) -> None:
        loads = self._ranks.all_reduce((self._counters() - self._marks).clamp(min=0)).tolist()
        balances, num_moved = [], 0
        for (name, layer), by_place in zip(self._layers().items(), loads, strict=True):
            if not any(by_place):
                continue
            totals = [sum(by_place[places.start : places.stop]) for places in layer.places]
            balances.append(sum(totals) / len(totals) / max(totals))
            load = [0] * (max(layer.placement) + 1)
            for expert, count in zip(layer.placement, by_place, strict=True):
                load[expert] += count
            new = self._ask(name, layer, load)
            owner = [rank for rank, places in enumerate(layer.places) for _ in places]
            if new != layer.placement:
                before = set(zip(layer.placement, owner, strict=True))
                num_moved += sum(pair not in before for pair in zip(new, owner, strict=True))
                layer.place_experts(new, self._ranks)
        if not balances:
            return
        balance = sum(balances) / len(balances)
        self._told_balance.append(round(balance, 4))
        self._num_moved += num_moved
        if self._ranks.rank == 0:
            self._balance.set(balance)
            self._moved.inc(num_moved)
            if self._config.log_balancedness:
                logger.info("Experts: ranks had %.0f %% of an even load; %d experts moved.", 100 * balance, num_moved)

    def _ask(self, name: str, layer: Any, load: list[int]) -> list[int]:
        """A policy that is wrong changes nothing: all ranks find the same."""
        try:
            with calling(self._entry):
                new = list(
                    self._policy.place(load, list(layer.placement), [len(p) for p in layer.places], layer.group_size)
                )
            why = why_wrong(new, layer.placement, layer.group_size)
        except Exception as error:
            new, why = [], f"{type(error).__name__}: {error}"
        if why is None:
            return new
        logger.error("Experts of %s stay where they are: %s answers wrongly. %s", name, self._entry, why)
        return list(layer.placement)

"""`LockStep`: engines that share their experts step together, for as long as one of them has work.

A wave begins when a rank has a step: it rings, and all come. In each round of a wave every rank says whether it has a step. Engines of
which all ranks have one run it; the others enter its layers of experts without tokens (a dummy step). A round in which nobody has a step
ends the wave, and everyone sleeps until the next bell. All ranks are told the same in a round, so all decide the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from pelton.errors import EngineDeadError, EngineError
from pelton_plugins.executors.shared_experts.bells import Bells
from pelton_plugins.executors.shared_experts.exchange import EngineExchange

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pelton.parallel.communicator import Communicator

LINGER_S = 0.002
"""How long a rank that has just run a step waits for its next one before it says that it has none: the engine is about to send it."""

T = TypeVar("T")


class LockStep:
    """One in each rank. everyone: all ranks of all engines, those of one engine after each other. submit: queues a job on the worker's
    thread, on which `run` is called. Rounds are jobs of their own, so that other jobs of the thread find their turn between them."""

    def __init__(
        self,
        everyone: Communicator,
        exchange: EngineExchange,
        submit: Callable[[Callable[[], None]], Future[Any]],
        *,
        folder: Path,
        device: torch.device,
    ) -> None:
        self.exchange, self.everyone = exchange, everyone
        self.after_round: Callable[[], None] = lambda: None
        """Called on all ranks, between the rounds in which a step ran."""
        self._everyone, self._submit, self._device = everyone, submit, device
        self._engine_size = everyone.size // exchange.size
        self._news = threading.Condition()  # of what follows
        self._num_pending = 0  # steps that wait for their turn on the thread
        self._wave = 0  # number of the wave that runs, or that comes next
        self._is_in_wave = False
        self._rung = -1  # the latest wave that another rank has rung for
        self._is_join_queued = False
        self._has_just_run = False
        self._counts = {"waves": 0, "steps": 0, "dummy_steps": 0}
        self._bells = Bells(folder, everyone.rank, everyone.size, self._hear)

    def add(self) -> None:
        """Announce a step, before its job is queued. From any thread."""
        with self._news:
            self._num_pending += 1
            self._news.notify()

    def run(self, step_id: int, num_tokens: int, step: Callable[[], T]) -> T:
        """Run an announced step when its turn comes. Raises what it raises; `EngineDeadError` where the others are lost."""
        with self._news:
            self._num_pending -= 1
            is_first, self._is_in_wave = not self._is_in_wave, True
        if is_first:
            self._bells.ring(self._wave)
        found: list[T] = []
        try:
            while not self._round(step_id, num_tokens, lambda: found.append(step())):
                pass
        finally:
            self._go_on()
        return found[0]

    def counts(self) -> dict[str, int]:
        """How many waves, steps and dummy steps there were so far, and layers in which tokens went by all-to-all."""
        return {**self._counts, "swapped_layers": self.exchange.num_swapped}

    def close(self) -> None:
        self._bells.close()

    def _hear(self, wave: int) -> None:
        with self._news:
            self._rung = max(self._rung, wave)
        self._go_on()

    def _go_on(self) -> None:
        """Queue a round where a wave runs, unless a step that is queued brings one."""
        with self._news:
            is_awake = self._is_in_wave or self._rung >= self._wave
            if not is_awake or self._num_pending or self._is_join_queued:
                return
            self._is_join_queued = True
        try:
            self._submit(self._join)
        except EngineDeadError:  # it is shut down
            self.close()

    def _join(self) -> None:
        """One round, where this rank has no step."""
        with self._news:
            self._is_join_queued = False
            if self._has_just_run:
                self._has_just_run = False
                self._news.wait_for(lambda: self._num_pending, LINGER_S)
            if self._num_pending or not (self._is_in_wave or self._rung >= self._wave):
                return  # the step's job goes on with the wave; or it is over
            self._is_in_wave = True
        self._round(None, 0, None)
        self._go_on()

    def _round(self, step_id: int | None, num_tokens: int, step: Callable[[], None] | None) -> bool:
        """Return whether this rank's step ran."""
        import torch

        mine = torch.tensor([-1 if step_id is None else step_id, num_tokens], device=self._device)
        try:
            told = self._everyone.all_gather(mine, 0).view(self.exchange.size, self._engine_size, 2).tolist()
        except EngineError as error:
            raise EngineDeadError(str(error)) from error
        if all(rank[0] < 0 for engine in told for rank in engine):
            with self._news:
                self._is_in_wave, self._wave = False, self._wave + 1
            self._counts["waves"] += 1
            return False
        runs = [engine[0][0] >= 0 and all(rank[0] == engine[0][0] for rank in engine) for engine in told]
        if not any(runs):
            return False
        self.exchange.open([engine[0][1] if is_run else 0 for engine, is_run in zip(told, runs, strict=True)])
        is_ours = runs[self.exchange.rank]
        self._counts["steps" if is_ours else "dummy_steps"] += 1
        try:
            if is_ours:
                assert step is not None, "this rank said that it has one"
                self._has_just_run = True
                step()
        finally:
            self.exchange.close()
            self.after_round()
        return is_ours

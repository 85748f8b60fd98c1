"""Adapters as the scheduler sees them: which the workers have, and which of them lie in the device's slots.

Loading runs beside the steps: no step waits for a load. A step brings what its new requests need to their slots, on the device's
stream. While requests run it brings one adapter at most, so that they are held up by the copy of one.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pelton.errors import PeltonError, RequestError
from pelton.messages.request import AdapterRef
from pelton.messages.step import SchedulerOutput
from pelton.scheduler.gates import Gate, Verdict
from pelton.scheduler.interface import AdapterLoads
from pelton.scheduler.request import ScheduledRequest

FAILURE_S = 1.0
"""Seconds for which requests that wait for a failed load get its error; after that it is tried again."""
COPIES = 1
"""Adapters that a step with running requests brings to their slots, at most."""


class AdapterSlots:
    """The step loop's thread alone calls it. Both host memory and slots are given up in the order of their last use."""

    def __init__(self, loads: AdapterLoads, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_slots, self._num_host = loads.num_slots, loads.num_host
        self._load, self._clock = loads.load, clock
        self.running: Sequence[ScheduledRequest] = ()
        """The scheduler's own list."""
        self._host: OrderedDict[int, Future[Any]] = OrderedDict()  # by id, the longest unused first
        self._load_ids: dict[int, int] = {}  # id -> number of its load
        self._num_loads = 0
        self._failed_at: dict[int, float] = {}
        self._slots: OrderedDict[int, int] = OrderedDict()  # id -> slot, the longest unused first
        self._pinned: set[int] = set()
        self._removed: set[int] = set()  # to be dropped once no request runs with it
        self._pending: list[tuple[int, int, int]] = []  # (slot, id, load) for the next step
        self._dropped: list[int] = []  # loads that the next step tells the workers to forget
        self._has_room: bool | None = None
        self._most_copies = math.inf  # of this step

    # What is there.

    def request(self, ref: AdapterRef) -> bool:
        """Have it loaded. True: the workers have it. Raises what stopped the load."""
        future = self._host.get(ref.id)
        if future is not None and future.done() and future.exception() is not None:
            if self._clock() < self._failed_at.setdefault(ref.id, self._clock() + FAILURE_S):
                error = future.exception()
                assert error is not None
                raise error
            self._give_up(ref.id)
            future = None
        if future is None:
            self._removed.discard(ref.id)
            self._make_room()
            self._num_loads += 1
            future = self._load(ref, self._num_loads)
            self._host[ref.id], self._load_ids[ref.id] = future, self._num_loads
        self._host.move_to_end(ref.id)
        return future.done() and future.exception() is None

    def prefetch(self, ref: AdapterRef) -> None:
        """Start to load the adapter of a request that has just arrived and waits for its turn. An error is reported when its turn comes."""
        if ref.id not in self._host:
            self.request(ref)

    def is_loaded(self, adapter_id: int) -> bool:
        future = self._host.get(adapter_id)
        return future is not None and future.done() and future.exception() is None

    def loaded(self) -> list[int]:
        return [adapter_id for adapter_id in self._host if self.is_loaded(adapter_id)]

    def remove(self, adapter_id: int) -> bool:
        """Forget it once no request runs with it. False: it is not there."""
        self._pinned.discard(adapter_id)
        if adapter_id not in self._host:
            return False
        self._removed.add(adapter_id)
        self._collect()
        return True

    def pin(self, adapter_id: int) -> None:
        """Keep it on host and device. Raises `RequestError` where that would leave no slot for others."""
        if not self.is_loaded(adapter_id):
            raise RequestError("The adapter is not loaded.", param="adapter", value=adapter_id)
        if adapter_id not in self._pinned and len(self._pinned) + 1 >= self.num_slots:
            raise RequestError(
                f"{len(self._pinned)} adapters are pinned, and max_loras is {self.num_slots}: one slot has to be left for others.",
                param="adapter", value=adapter_id,
            )  # fmt: skip
        self._pinned.add(adapter_id)

    # Slots.

    def take(self, ref: AdapterRef) -> bool:
        """Give it a slot. False: it is still being loaded, running requests use all slots, or this step brings others to theirs. Raises
        what stopped the load."""
        if not self.request(ref):
            return False
        if ref.id in self._slots:
            self._slots.move_to_end(ref.id)
            return True
        if len(self._pending) >= self._most_copies:
            return False
        slot = self._free_slot()
        if slot is None:
            return False
        self._slots[ref.id] = slot
        self._pending.append((slot, ref.id, self._load_ids[ref.id]))
        return True

    def may_take(self, ref: AdapterRef) -> bool:
        """Return whether `take` is worth a call: cheap, asked for each waiting request in each step."""
        future = self._host.get(ref.id)
        if future is None or not future.done():
            return future is None
        if future.exception() is not None or ref.id in self._slots:
            return True
        if self._has_room is None:
            self._has_room = len(self._slots) < self.num_slots or self._victim() is not None
        return self._has_room

    def begin_step(self) -> None:
        """Before requests are admitted: who runs has changed."""
        self._has_room = None
        self._most_copies = COPIES if self.running else math.inf
        if self._removed:
            self._collect()

    def describe(self, output: SchedulerOutput) -> None:
        """Tell the workers, with the step that is handed out next."""
        output.adapter_slots, self._pending = self._pending, []
        output.dropped_adapters, self._dropped = self._dropped, []

    def tell_again(self, output: SchedulerOutput) -> None:
        """The workers may not have heard of what this step said."""
        known = [item for item in output.adapter_slots if self._slots.get(item[1]) == item[0]]
        self._pending = known + self._pending
        self._dropped = output.dropped_adapters + self._dropped

    def _free_slot(self) -> int | None:
        if len(self._slots) < self.num_slots:
            return min(set(range(self.num_slots)) - set(self._slots.values()))
        victim = self._victim()
        if victim is None:
            return None
        self._pending = [item for item in self._pending if item[1] != victim]
        return self._slots.pop(victim)

    def _victim(self) -> int | None:
        used = self._used()
        return next((one for one in self._slots if one not in used and one not in self._pinned), None)

    def _used(self) -> set[int]:
        return {request.request.adapter_id for request in self.running}

    def _make_room(self) -> None:
        """On the host, for one more."""
        if len(self._host) < self._num_host:
            return
        kept = self._used() | self._pinned
        for adapter_id, future in self._host.items():
            if future.done() and adapter_id not in self._slots and adapter_id not in kept:
                self._give_up(adapter_id)
                return
        victim = self._victim()  # all the others are in slots, or being loaded
        if victim is not None:
            self._give_up(victim)

    def _collect(self) -> None:
        used = self._used()
        for adapter_id in list(self._removed):
            future = self._host.get(adapter_id)
            if adapter_id not in used and (future is None or future.done()):
                self._removed.discard(adapter_id)
                if future is not None:
                    self._give_up(adapter_id)

    def _give_up(self, adapter_id: int) -> None:
        self._slots.pop(adapter_id, None)
        self._pending = [item for item in self._pending if item[1] != adapter_id]
        del self._host[adapter_id]
        self._failed_at.pop(adapter_id, None)
        self._dropped.append(self._load_ids.pop(adapter_id))


class AdapterSlotGate(Gate):
    """A request with an adapter waits until a slot has it; a load that failed ends it."""

    def __init__(self, adapters: AdapterSlots) -> None:
        self._adapters = adapters

    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        ref = request.request.adapter
        try:
            return Verdict.OPEN if ref is None or self._adapters.take(ref) else Verdict.DEFER
        except PeltonError:
            raise
        except Exception as error:
            assert ref is not None
            raise RequestError(f"Adapter {ref.name!r} cannot be loaded: {error}", param="adapter") from error

    def may_open(self, request: ScheduledRequest) -> bool:
        ref = request.request.adapter
        return ref is None or self._adapters.may_take(ref)

"""Masks of steps that are launched before their masks are made: the device waits for a number in pinned memory, not the host.

    worker's thread    open: on a stream of their own, wait for the number, copy the pinned masks; the step's stream waits for the copy
    whoever has them   bring: write the pinned masks, then the number

So they travel while the forward pass computes. What they overwrite on the device has been read: they are made of the tokens that the
step before has sampled under it.

Between the two nothing may wait for the device on the thread that makes the masks. The worker's own thread may, since the masks
come without it; it launches nothing but captured decode steps meanwhile (`settle`), which never fill the driver's queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pelton.messages.step import GrammarMasks
from pelton_platforms.device.steps.masks import MaskPlaces
from pelton_platforms.device.steps.staging import place_words
from pelton_platforms.device.steps.step_plan import Ints

_NUM_PARTS = 3
StreamWait = Callable[[int, int], None]
"""Let the current stream wait until the int32 at an address has reached a value."""


class Awaited:
    """A launched step whose masks the device waits for; `error` says why there were none."""

    __slots__ = ("error", "part", "slots", "value")

    def __init__(self, part: _Part, slots: Ints, value: int) -> None:
        self.part, self.slots, self.value = part, slots, value
        self.error = ""


class _Part:
    """Pinned masks by slot, the number that says they are there, and the event after which they may be written again."""

    def __init__(self, words: Tensor, has_mask: Tensor, *, pin_memory: bool) -> None:
        self.words = torch.zeros(words.shape, dtype=torch.int32, pin_memory=pin_memory)
        self.has_mask = torch.zeros(has_mask.shape, dtype=torch.bool, pin_memory=pin_memory)
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=pin_memory)
        self.word_rows, self.flags, self.number = self.words.numpy(), self.has_mask.numpy(), self.flag.numpy()
        self.address = self.flag.data_ptr()
        self.num_uses = 0
        self.slots = b""  # that `copies` and `flags` are of
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.was_copied: torch.Event | None = None


class MasksAhead:
    """Three parts in turn: one is read by the device, two are of steps that are launched behind it."""

    def __init__(self, places: MaskPlaces, wait: StreamWait) -> None:
        self._places, self._wait = places, wait
        is_pinned = places.device.type != "cpu"
        self._stream = torch.Stream(places.device) if is_pinned else None
        self._parts = [_Part(*places.tensors, pin_memory=is_pinned) for _ in range(_NUM_PARTS)]
        self._next = 0
        self._awaited: dict[int, Awaited] = {}
        self._changed = threading.Condition()

    @property
    def is_waiting(self) -> bool:
        """True while the device waits, or is going to, for masks that have not come."""
        return bool(self._awaited)

    def open(self, step_id: int, slots: Ints) -> Awaited:
        """Queue the wait for the masks of `slots`, in the order in which they will come, and their way to the device."""
        part, self._next = self._parts[self._next], (self._next + 1) % len(self._parts)
        if part.was_copied is not None:
            part.was_copied.synchronize()
        key = slots.tobytes()
        if part.slots != key:
            part.slots, part.copies = key, self._places.copies(slots, part.words, part.has_mask)
            part.flags[:] = False
            part.flags[slots] = True
        part.num_uses += 1
        awaited = Awaited(part, slots, part.num_uses)
        with self._changed:
            self._awaited[step_id] = awaited
        try:
            if self._stream is None:
                self._queue(part)
            else:
                if part.was_copied is None:
                    part.was_copied = torch.Event(self._places.device)
                with self._stream:
                    self._queue(part)
                    part.was_copied.record()
                part.was_copied.wait()
        except BaseException:
            self._raise(step_id)
            raise
        return awaited

    def _queue(self, part: _Part) -> None:
        self._wait(part.address, part.num_uses)
        for target, source in part.copies if self._places.placed != part.slots else part.copies[:-1]:
            target.copy_(source, non_blocking=True)
        self._places.placed = part.slots

    def room(self, step_id: int) -> Any:
        """[slots, words] int32 of pinned memory, for masks of a launched step; None while it is not launched."""
        awaited = self._awaited.get(step_id)
        return None if awaited is None else awaited.part.word_rows

    def bring(self, masks: GrammarMasks) -> None:
        """Write the masks of a step, and let the device go on. From any thread, once the result of the step before is read; never
        raises."""
        awaited = self._awaited.get(masks.step_id)
        if awaited is None:
            return
        try:
            awaited.error = masks.error
            if not masks.error and not masks.are_placed:
                place_words(awaited.part.word_rows, awaited.slots, masks.bitmask)
        except Exception as error:
            awaited.error = f"Placing the step's masks failed: {type(error).__name__}: {error}"
        finally:
            self._raise(masks.step_id)

    def _raise(self, step_id: int) -> None:
        with self._changed:
            awaited = self._awaited.pop(step_id, None)
            if awaited is not None:
                awaited.part.number[0] = awaited.value
                self._changed.notify_all()

    def settle(self) -> None:
        """Wait until the masks of all launched steps have come. On the worker's thread."""
        if self._awaited:
            with self._changed:
                self._changed.wait_for(lambda: not self._awaited)

    def give_up(self, step_id: int, error: str) -> None:
        """Let the device go on without the step's masks; the step fails."""
        self.bring(GrammarMasks(step_id=step_id, bitmask=b"", num_masks=[], error=error))


def make_masks_ahead(places: MaskPlaces, wait: StreamWait | None) -> MasksAhead | None:
    """None where the device cannot wait: its driver has no such call, or refuses it."""
    if wait is None:
        return None
    probe: Any = torch.zeros(1, dtype=torch.int32, pin_memory=places.device.type != "cpu")
    try:
        wait(probe.data_ptr(), 0)
    except RuntimeError:
        return None
    return MasksAhead(places, wait)

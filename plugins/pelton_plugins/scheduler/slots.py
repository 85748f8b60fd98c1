"""Rows of the device's tables: which are free, and which were freed since the workers last heard."""

from __future__ import annotations


class SlotPool:
    """Last given back, first taken: low row numbers stay in use, and their memory warm."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._freed.append(slot)

    def take_freed(self) -> list[int]:
        """Slots given back since the last call, for the next step's `freed_slots`."""
        freed, self._freed = self._freed, []
        return freed

    def tell_again(self, slots: list[int]) -> None:
        """A message with these freed slots may be lost; those taken again since are the new holder's."""
        free = set(self._free).difference(self._freed)
        self._freed += [slot for slot in slots if slot in free]

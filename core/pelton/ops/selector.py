"""Choose an implementation of each fused seam, when a layer is built.

The first entry by (-priority, name) whose `unsupported(needs)` is empty wins; one that serves only some
batch sizes leaves the others to the next that fits. What is returned is a plain callable: nothing
dispatches by name in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

from pelton.entries import OpEntry
from pelton.errors import ConfigError, PluginError
from pelton.ops.interface import SEAMS, LinearWeights, OpImplementation


@dataclass(frozen=True, slots=True)
class OpChoice:
    """One choice, for `pelton backends`."""

    seam: str
    needs: Any
    names: tuple[str, ...]  # more than one when they share the batch sizes
    refused: tuple[tuple[str, str], ...] = ()  # (entry, reasons), of those with a better place


@dataclass(slots=True)
class _Ranged:
    least: int
    most: int | None
    call: Callable[..., Any]


class OpSelector:
    """Made once per worker from `plugins.entries("pelton_ops", device_type=...)`."""

    def __init__(self, entries: Iterable[OpEntry]) -> None:
        self.choices: list[OpChoice] = []  # distinct ones, in the order in which layers asked
        self._entries: dict[str, list[OpEntry]] = {seam: [] for seam in SEAMS}
        self._loaded: dict[str, OpImplementation] = {}
        self._bound: list[Callable[..., Any]] = []
        for entry in sorted(entries, key=lambda e: (-e.priority, e.name)):
            if entry.seam not in self._entries:
                raise PluginError(f"Op {entry.name!r} offers seam {entry.seam!r}; the seams are {', '.join(SEAMS)}.")
            self._entries[entry.seam].append(entry)

    def bind(self, seam: str, needs: Any, tensors: Any) -> Callable[..., Any]:
        """The callable for one layer. Raises `ConfigError` that lists every entry with its reasons."""
        parts: list[_Ranged] = []
        names: list[str] = []
        refused: list[tuple[str, str]] = []
        for entry in self._entries[seam]:
            implementation = self._load(entry)
            reasons = implementation.unsupported(needs)
            if reasons:
                refused.append((entry.name, ", ".join(reasons)))
                continue
            least, most = getattr(implementation, "token_range", _all_sizes)(needs)
            call = implementation.bind(needs, tensors)
            self._bound.append(call)
            parts.append(_Ranged(least, most, call))
            names.append(entry.name)
            if least <= 0 and most is None:
                break
        else:
            tried = "; ".join(f"{name}: {why}" for name, why in refused) or "none is offered"
            partly = f" {', '.join(names)} fit for some batch sizes only." if names else ""
            raise ConfigError(f"No op for seam {seam!r} fits {needs}. Tried: {tried}.{partly}")
        if isinstance(weights := getattr(tensors, "linear", None), LinearWeights):
            weights.num_readers += len(parts) - 1
        choice = OpChoice(seam, needs, tuple(names), tuple(refused))
        if choice not in self.choices:
            self.choices.append(choice)
        return parts[0].call if len(parts) == 1 else _by_batch_size(parts)

    def fork(self) -> OpSelector:
        """One that chooses the same, and whose calls are nobody's concern here: they end with what they were bound to."""
        fork = copy(self)
        fork._bound = []
        return fork

    def unrecordable(self) -> list[str]:
        """Entries in use that a tape may not see all of: strangers' that do not say otherwise."""
        used = {name for choice in self.choices for name in choice.names}
        return sorted(name for name in used if not _is_recordable(self._loaded[name]))

    def weights_loaded(self) -> None:
        """Tell the bound ops that their weights are in place, so that they may pack them."""
        for call in self._bound:
            prepare = getattr(call, "weights_loaded", None)
            if prepare is not None:
                prepare()

    def _load(self, entry: OpEntry) -> OpImplementation:
        if entry.name not in self._loaded:
            self._loaded[entry.name] = entry.resolve()
        return self._loaded[entry.name]


def _is_recordable(implementation: OpImplementation) -> bool:
    module = str(getattr(implementation, "__module__", None) or getattr(implementation, "__name__", ""))
    is_reference = module.startswith("pelton.")  # torch's ops only
    return bool(getattr(implementation, "is_recordable", is_reference))


def _all_sizes(needs: Any) -> tuple[int, int | None]:
    return 0, None


def _by_batch_size(parts: list[_Ranged]) -> Callable[..., Any]:
    """The first part that takes the first argument's number of rows; the last takes all."""

    def call(first: Any, *rest: Any) -> Any:
        num_tokens = first.shape[0]
        for part in parts:
            if part.least <= num_tokens and (part.most is None or num_tokens <= part.most):
                return part.call(first, *rest)
        raise AssertionError("the last part takes every batch size")

    return call

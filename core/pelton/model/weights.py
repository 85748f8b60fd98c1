"""Where each tensor of a checkpoint goes: filled by layers as they are made, used once to load.

A layer says which checkpoint name fills which part of its parameter, and which slice of the tensor this rank
keeps. Loading copies that slice from the file into place: there is never a full copy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = (r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", r".*\.attention\.masked_bias")  # nobody reads them
_SHOWN = 5  # names in an error

Fill = Callable[[LazyWeight, "Tensor"], None]
Check = Callable[[str, LazyWeight], None]


class Copier(Protocol):
    """Copies tensors from host memory to a device; `finish` when all is queued."""

    def copy(self, source: Tensor, target: Tensor) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """One checkpoint tensor's place."""

    shape: tuple[int, ...] | None  # of the whole tensor; None: `fill` takes any
    target: Tensor | None  # a view of a parameter, shaped as the slice; None: this rank keeps nothing of it
    dim: int | None  # axis of the slice; None: the whole tensor
    start: int
    stop: int | None
    fill: Fill | None = None  # puts the whole tensor there in a form of its own, in place of a copy


class WeightMap:
    """Checkpoint name -> target."""

    def __init__(self) -> None:
        self._targets: dict[str, list[WeightTarget]] = {}
        self._ignored: dict[re.Pattern[str], Check | None] = {re.compile(pattern): None for pattern in IGNORED}
        self.finishers: list[Callable[[], None]] = []  # called when all weights are in place
        self.make_copier: Callable[[], Copier] | None = None  # the platform's way to its device; None: plain

    def expect(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        target: Tensor | None,
        *,
        dim: int | None = None,
        start: int = 0,
        stop: int | None = None,
        fill: Fill | None = None,
    ) -> None:
        """`target` is filled with the slice [start, stop) along `dim` of the checkpoint's `name`, or by `fill`, which takes its part of it.
        Several parts of one tensor may have targets: a merged matrix."""
        others = self._targets.setdefault(name, [])
        if others:
            is_part = dim is not None if fill is None else others[0].fill is not None
            assert is_part and others[0].dim == dim and others[0].shape == shape, f"two layers read {name}"
        others.append(WeightTarget(shape, target, dim, start, stop, fill))

    def ignore(self, pattern: str, check: Check | None = None) -> None:
        """Checkpoint names that match (a regular expression) are skipped without an error, unless `check` of name and weight raises one."""
        self._ignored[re.compile(pattern)] = check

    def ignores(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._ignored)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Every checkpoint name with the shape it must have; () where it may have any."""
        return {name: targets[0].shape or () for name, targets in self._targets.items()}

    def load(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        """Read each weight once, in the order given. Raises `ConfigError` naming what is missing, unexpected or misshapen."""
        used: set[str] = set()
        unexpected: list[str] = []
        copy = _Copy(self.make_copier)
        for name, weight in weights:
            targets = self._targets.get(name)
            if targets is None:
                checks = [check for pattern, check in self._ignored.items() if pattern.fullmatch(name)]
                unexpected += [] if checks else [name]
                for check in filter(None, checks):
                    check(name, weight)
                continue
            _check_shape(name, weight, targets[0])
            for target in targets:
                if target.target is not None:
                    copy(weight, target.target, target)
            used.add(name)
        copy.finish()
        self._check(used, unexpected)
        for finish in self.finishers:
            finish()
        return used

    def _check(self, used: set[str], unexpected: list[str]) -> None:
        missing = [name for name in self._targets if name not in used]
        if not missing and not unexpected:
            return
        parts = []
        if missing:
            parts.append(f"missing {_list(missing)}")
        if unexpected:
            close = difflib.get_close_matches(unexpected[0], missing or list(self._targets), n=1)
            hint = f" (near to {close[0]})" if close else ""
            parts.append(f"unexpected {_list(unexpected)}{hint}")
        raise ConfigError(
            f"The checkpoint does not fit the model: {'; '.join(parts)}. "
            "Check that config.json names the architecture of these weights (model_impl transformers goes by its model_type), and that "
            "every file of the checkpoint is there."
        )


def _check_shape(name: str, weight: LazyWeight, target: WeightTarget) -> None:
    if target.shape is not None and tuple(weight.shape) != target.shape:
        raise ConfigError(
            f"Weight {name} is {list(weight.shape)}; config.json makes it {list(target.shape)}. "
            "Check that config.json belongs to these weights."
        )


class _Copy:
    """Into place: by the weight itself, else by the platform's copier, else plainly."""

    def __init__(self, make_copier: Callable[[], Copier] | None) -> None:
        self._make_copier = make_copier
        self._copier: Copier | None = None

    def __call__(self, weight: LazyWeight, place: Tensor, target: WeightTarget) -> None:
        if target.fill is not None:
            target.fill(weight, place)
            return
        part = () if target.dim is None else (target.dim, target.start, target.stop)
        if weight.fill_later(place, *part):
            return
        source = weight.read(*part)
        if self._make_copier is not None and source.device != place.device:
            if self._copier is None:
                self._copier = self._make_copier()
            self._copier.copy(source, place)
        else:
            place.copy_(source)

    def finish(self) -> None:
        if self._copier is not None:
            self._copier.finish()


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

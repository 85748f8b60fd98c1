"""Choose an implementation of each fused op, when a layer is built.

The first entry by (-priority, name) that handles the optional needs, and whose `unsupported(needs)` is empty, wins; one
that serves only some batch sizes leaves the others to the next that fits. What is returned is a plain callable: nothing
dispatches by name in forward. Once weights are loaded, the selector also decides which of them are packed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from pelton.config import EngineConfig
from pelton.entries import Entry, OpEntry
from pelton.errors import ConfigError, PluginError
from pelton.ops.interface import FUSED_OPS, FusedOp, LinearWeights, OpImplementation, optional_needs
from pelton.plugins import FIX_IT, calling


@dataclass(frozen=True, slots=True)
class OpChoice:
    """One choice, for `pelton backends`."""

    op: str
    needs: Any
    names: tuple[str, ...]  # more than one when they share the batch sizes
    refused: tuple[tuple[str, str], ...] = ()  # (entry, reasons), of those with a better place


@dataclass(slots=True)
class _Ranged:
    least: int
    most: int | None
    call: Callable[..., Any]


class OpSelector:
    """Made once per worker from `plugins.entries("pelton_ops", device_type=...)` and `plugins.entries("pelton_fused_ops")`."""

    def __init__(
        self, entries: Iterable[OpEntry], declared: Iterable[Entry] = (), config: EngineConfig | None = None
    ) -> None:
        """config: what implementations are `configured` with; None leaves them as they are."""
        self._config = config
        self.choices: list[OpChoice] = []  # distinct ones, in the order in which layers asked
        self._ops = dict(FUSED_OPS)
        self._loaded: dict[str, OpImplementation] = {}
        self._bound: list[Callable[..., Any]] = []
        self._readers: dict[int, tuple[LinearWeights, list[Callable[..., Any]]]] = {}
        offered = list(entries)
        for declaration in declared:
            if not isinstance(op := declaration.resolve(), FusedOp):
                raise PluginError(f"{declaration} is a {type(op).__name__}, not a FusedOp of pelton.ops. {FIX_IT}")
            if self._ops.setdefault(op.name, op) is not op:
                raise PluginError(f"Fused op {op.name!r} is declared twice; {declaration} needs another name.")
            if op.reference is not None:
                offered.append(OpEntry(name=f"reference.{op.name}", op=op.name, load=op.reference, priority=10))
        self._entries: dict[str, list[OpEntry]] = {name: [] for name in self._ops}
        for entry in sorted(offered, key=lambda e: (-e.priority, e.name)):
            if entry.op not in self._entries:
                raise PluginError(f"Op {entry.name!r} is offered for {entry.op!r}; there are {', '.join(self._ops)}.")
            self._entries[entry.op].append(entry)

    def bind(self, op: str, needs: Any, tensors: Any) -> Callable[..., Any]:
        """The callable for one layer. Raises `ConfigError` that lists every entry with its reasons."""
        assert isinstance(needs, self._ops[op].needs), f"needs of {op} are a {self._ops[op].needs.__name__}"
        parts: list[_Ranged] = []
        names: list[str] = []
        refused: list[tuple[str, str]] = []
        for entry in self._entries[op]:
            with calling(entry):
                implementation = self._load(entry)
                reasons = reasons_against(implementation, needs)
                if reasons:
                    refused.append((entry.name, ", ".join(reasons)))
                    continue
                least, most = getattr(implementation, "token_range", lambda needs: (0, None))(needs)
                parts.append(_Ranged(least, most, self._bind(implementation, needs, tensors)))
            names.append(entry.name)
            if least <= 0 and most is None:
                break
        else:
            tried = "; ".join(f"{name}: {why}" for name, why in refused) or "none is offered"
            partly = f" {', '.join(names)} fit for some batch sizes only." if names else ""
            raise ConfigError(f"No op for {op!r} fits {needs}. Tried: {tried}.{partly}")
        choice = OpChoice(op, needs, tuple(names), tuple(refused))
        if choice not in self.choices:
            self.choices.append(choice)
        return parts[0].call if len(parts) == 1 else BySize(parts)

    def _bind(self, implementation: OpImplementation, needs: Any, tensors: Any) -> Callable[..., Any]:
        compose = getattr(implementation, "compose", None)
        if compose is not None:
            return compose(needs, tensors, self.bind)  # type: ignore[no-any-return]
        if not callable(call := implementation.bind(needs, tensors)):
            raise TypeError(f"bind gives {call!r}, which is not callable")
        self._bound.append(call)
        if isinstance(weights := getattr(tensors, "linear", None), LinearWeights):
            self._readers.setdefault(id(weights), (weights, []))[1].append(call)
        return call

    def fork(self) -> OpSelector:
        """Make a selector with the same entries and choices, which does not keep the callables that it binds."""
        fork = copy(self)
        fork._bound, fork._readers = [], {}
        return fork

    def unrecordable(self) -> list[str]:
        """Return the entries in use that cannot be recorded: third-party ops without `is_recordable`."""
        used = {name for choice in self.choices for name in choice.names}
        return sorted(name for name in used if not getattr(self._loaded[name], "is_recordable", False))

    def read_by(self, reader: Any) -> None:
        """Let `reader` have a say in the order of all weights (`orders`, `pack`, `packed`). Before they are loaded."""
        for _, readers in self._readers.values():
            readers.append(reader)

    def weights_loaded(self) -> None:
        """Finish the weights, which are all in place; pack those whose readers agree on an order; tell the bound ops."""
        for weights, readers in self._readers.values():
            if weights.finish is not None:
                weights.finish()
            pack_weights(readers)
        for call in self._bound:
            prepare = getattr(call, "weights_loaded", None)
            if prepare is not None:
                prepare()

    def _load(self, entry: OpEntry) -> OpImplementation:
        if entry.name not in self._loaded:
            loaded = entry.resolve()
            configured = None if self._config is None else getattr(loaded, "configured", None)
            self._loaded[entry.name] = loaded if configured is None else configured(self._config)
        return self._loaded[entry.name]


def reasons_against(implementation: Any, needs: Any) -> list[str]:
    """Why it cannot serve these needs: those that it does not handle, and its own."""
    handles: Collection[str] = getattr(implementation, "handles", ())
    asked = optional_needs(needs, nested=not hasattr(implementation, "compose"))  # parts look into specs themselves
    reasons = [f"does not handle {name}={value}" for name, value in asked.items() if name not in handles]
    return [*reasons, *implementation.unsupported(needs)]


def pack_weights(readers: Sequence[Any]) -> None:
    """The weights of all these bound ops, in the first order that all readers know and one of them can make."""
    first, *others = (getattr(reader, "orders", ()) for reader in readers)
    for order in first:
        if all(order in known for known in others) and any(reader.pack(order) for reader in readers):
            for reader in readers:
                reader.packed(order)
            return


class BySize:
    """The first part that takes the first argument's number of rows; the last takes all."""

    def __init__(self, parts: list[_Ranged]) -> None:
        self.parts = parts

    def part(self, num_tokens: int) -> Callable[..., Any]:
        fit = (one for one in self.parts if one.least <= num_tokens and (one.most is None or num_tokens <= one.most))
        return next(fit).call

    def __call__(self, first: Any, *rest: Any) -> Any:
        num_tokens = first.shape[0]
        for part in self.parts:  # as `part`, whose frame each call of an op would pay
            if part.least <= num_tokens and (part.most is None or num_tokens <= part.most):
                return part.call(first, *rest)

    def read_by(self, reader: Callable[[int], Callable[..., Any] | None] | None) -> None:
        for part in self.parts:
            getattr(part.call, "read_by", lambda reader: None)(reader)

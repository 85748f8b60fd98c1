"""Choose an attention backend: the first entry by (-priority, name) that can serve a layer.

A named backend wins over all and fails loudly when it refuses. Every verdict is kept: errors and
`pelton backends` show the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from pelton.attention.interface import PHASES, AttentionBackend, AttentionNeeds, GraphSupport, KVLayout
from pelton.attention.phases import BackendChoice, Phased
from pelton.config import EngineConfig
from pelton.entries import BackendEntry
from pelton.errors import ConfigError, PluginError
from pelton.plugins import calling

Capability = tuple[int, int] | None
Configure = Callable[[type[AttentionBackend]], type[AttentionBackend]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one entry: it fits when there is no reason against it."""

    name: str
    priority: int
    reasons: tuple[str, ...]
    backend: type[AttentionBackend] | None  # None when it cannot be loaded

    @property
    def fits(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return f"{self.name} (priority {self.priority}): {', '.join(self.reasons) or 'fits'}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The winner, and why."""

    name: str
    backend: BackendChoice
    needs: AttentionNeeds
    reason: str
    verdicts: tuple[Verdict, ...]  # best place first; entries after the winner were not asked
    names: tuple[str, ...] = ()  # of both, where decode and prefill have backends of their own


def _as_it_is(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    return backend


def select_backend(
    entries: Iterable[BackendEntry],
    needs: AttentionNeeds,
    *,
    named: str | None = None,
    capability: Capability = None,
    phases: frozenset[str] = PHASES,
    layout: KVLayout | None = None,
    configure: Configure = _as_it_is,
) -> Selection:
    """phases: what it must serve; layout: the one that its pages must have, where another backend shares them; configure: calls
    `AttentionBackend.configured`, once for each class.

    Raises `ConfigError`: the named backend refuses or is unknown, or nothing fits (every entry with its reasons).
    """
    ordered = _by_place(entries)
    judge = partial(_judge, needs=needs, capability=capability, phases=phases, layout=layout, configure=configure)
    if named is not None:
        return _select_named(ordered, needs, named, judge)
    verdicts: list[Verdict] = []
    for entry in ordered:
        verdict = judge(entry)
        verdicts.append(verdict)
        if verdict.fits:
            assert verdict.backend is not None
            refused = f", after {'; '.join(map(str, verdicts[:-1]))}" if len(verdicts) > 1 else ""
            reason = f"priority {verdict.priority}, the first that fits{refused}"
            return Selection(verdict.name, verdict.backend, needs, reason, tuple(verdicts))
    tried = "; ".join(map(str, verdicts)) or "none is offered for this device"
    raise ConfigError(f"No attention backend fits {needs}. Tried: {tried}.")


def _select_named(
    ordered: list[BackendEntry], needs: AttentionNeeds, named: str, judge: Callable[[BackendEntry], Verdict]
) -> Selection:
    typed = named.lower()
    aliased = (entry for entry in ordered if typed in (alias.lower() for alias in entry.aliases))
    entry = next((entry for entry in ordered if entry.name.lower() == typed), next(aliased, None))
    if entry is None:
        there = ", ".join(verdict.name for verdict in map(judge, ordered) if verdict.fits) or "none"
        raise ConfigError(f"attention_backend is {named!r}; for this model and device there is {there}.")
    shown = repr(named) if entry.name.lower() == typed else f"{named!r} ({entry.name})"
    verdict = judge(entry)
    if verdict.backend is None or not verdict.fits:
        raise ConfigError(
            f"Attention backend {shown} cannot serve this model: {', '.join(verdict.reasons)}. "
            "Name another, or leave it unset to take the best that fits."
        )
    return Selection(verdict.name, verdict.backend, needs, "named in the settings", (verdict,))


def refusals(backend: type[AttentionBackend], needs: AttentionNeeds, capability: Capability = None) -> list[str]:
    """Why a backend cannot serve `needs`: what it has not read about, then what it says itself."""
    unread = [name for name in needs.optional() if name not in backend.handles]
    found = [f"does not handle {name}={getattr(needs, name)}" for name in unread]
    return found + backend.unsupported(needs, capability)


def _by_place(entries: Iterable[BackendEntry]) -> list[BackendEntry]:
    return sorted(entries, key=lambda entry: (-entry.priority, entry.name))


def _judge(
    entry: BackendEntry,
    needs: AttentionNeeds,
    capability: Capability,
    phases: frozenset[str] = frozenset(),
    layout: KVLayout | None = None,
    configure: Configure = _as_it_is,
) -> Verdict:
    try:
        backend: type[AttentionBackend] = entry.resolve()
    except PluginError as error:
        return Verdict(entry.name, entry.priority, (str(error),), None)
    with calling(entry):
        backend = configure(backend)
        reasons = refusals(backend, needs, capability)
        if missing := getattr(backend, "__abstractmethods__", None):
            raise TypeError(f"it lacks {', '.join(sorted(missing))}")
        reasons += [f"does not serve {phase}" for phase in sorted(phases - backend.phases)]
        if layout is not None and not reasons and backend.kv_layout(needs) != layout:
            reasons.append("its pages lie otherwise than the prefill backend's")
    return Verdict(entry.name, entry.priority, tuple(reasons), backend)


class AttentionSelector:
    """One worker's choices; layers with equal needs share one."""

    def __init__(
        self,
        entries: Iterable[BackendEntry],
        *,
        named: str | None = None,
        named_prefill: str | None = None,
        named_decode: str | None = None,
        capability: Capability = None,
        config: EngineConfig | None = None,
    ) -> None:
        """named: for all rows; named_prefill, named_decode: for some, before it. config: what backends are `configured` with."""
        self.entries = list(entries)
        self.named_prefill = named_prefill or named
        self.named_decode = named_decode or named
        self.capability = capability
        self._config = config
        self._configured: dict[type[AttentionBackend], type[AttentionBackend]] = {}
        self._chosen: dict[AttentionNeeds, Selection] = {}

    def verdicts(self, needs: AttentionNeeds) -> list[Verdict]:
        """Every entry's verdict, best place first: the rows of `pelton backends`."""
        return [_judge(entry, needs, self.capability, configure=self._configure) for entry in _by_place(self.entries)]

    def _configure(self, backend: type[AttentionBackend]) -> type[AttentionBackend]:
        if self._config is None:
            return backend
        if backend not in self._configured:
            self._configured[backend] = backend.configured(self._config)
        return self._configured[backend]

    def select(self, needs: AttentionNeeds) -> Selection:
        if needs not in self._chosen:
            self._chosen[needs] = self._select(needs)
        return self._chosen[needs]

    def _select(self, needs: AttentionNeeds) -> Selection:
        """One backend for prefill, then one for decode that can read its pages: most often the same."""
        select = partial(select_backend, self.entries, needs, capability=self.capability, configure=self._configure)
        prefill = select(named=self.named_prefill, phases=frozenset(["prefill"]))
        layout = prefill.backend.kv_layout(needs)
        decode = select(named=self.named_decode, phases=frozenset(["decode"]), layout=layout)
        if decode.backend is prefill.backend:
            return prefill
        assert not (isinstance(decode.backend, Phased) or isinstance(prefill.backend, Phased)), "entries give classes"
        backend = Phased(decode.backend, prefill.backend)
        reason = f"decode: {decode.name} ({decode.reason}); prefill: {prefill.name} ({prefill.reason})"
        names = (decode.name, prefill.name)
        return Selection(backend.name, backend, needs, reason, decode.verdicts + prefill.verdicts, names)

    def selections(self) -> list[Selection]:
        """Distinct choices, in the order in which layers asked."""
        return list(self._chosen.values())

    def graph_support(self) -> GraphSupport:
        """The least support among the model's backends."""
        return min((s.backend.graph_support for s in self._chosen.values()), default=GraphSupport.ALWAYS)

"""Interface of a structured-output backend: from a constraint to masks over the vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.tokenizer import Tokenizer


class MaskFiller(Protocol):
    """Makes the masks of many grammars in one native call."""

    def fill(self, rows: Sequence[tuple[Any, int, Sequence[int]]], bitmask: Any) -> Mapping[int, Any] | None:
        """rows: grammars of this filler, each with the place of its first mask, and its draft tokens; the same list comes again for the
        same rows. bitmask: [masks, ceil(vocab / 32)] int32. Mask `place + i` becomes what may follow `drafts[:i]`; those behind a draft
        that is not allowed stay as they are. Called on the engine core's thread while the device computes. Where it raises, masks are
        made one by one. Returns, by its place in `rows`, a future of the masks [1 + drafts, words] of each that the others did not wait
        for: its request samples when they are there."""


class Grammar(ABC):
    """State of one request's constraint. Called on the engine core's thread."""

    filler: MaskFiller | None = None
    """Grammars of one filler get their masks together."""
    is_slow: bool = False
    """Its masks may take longer than a step: they are made apart, on a thread, and the request samples when they are there."""

    @abstractmethod
    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over tokens that were sampled; False when one is not allowed (the request then fails)."""

    @abstractmethod
    def validate(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens would be allowed, without advancing (draft tokens)."""

    @abstractmethod
    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Sequence[int] = ()) -> None:
        """Write ceil(vocab / 32) little-endian int32 words: bit t % 32 of word t // 32 is 1 when token t may follow `draft_token_ids` in
        the present state, which is unchanged afterwards. Where the next text is certain, one of the tokens that begin it will do."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """True when only EOS may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputContext:
    """Everything that a structured-output backend is made from. New fields have defaults."""

    tokenizer_path: str
    vocab_size: int
    eos_token_ids: Sequence[int]
    engine_config: EngineConfig | None = None
    """All settings, for `read_settings`; None in tests of a backend alone."""
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
    """Counters of its own."""
    load_tokenizer: Callable[[], Tokenizer | None] | None = None
    """Loads the model's; None in tests of a backend alone, which reads `tokenizer_path` itself."""


class StructuredOutputBackend(ABC):
    """Compiles constraints off the step loop: `compile` is called on a worker thread and may take long."""

    @abstractmethod
    def __init__(self, context: StructuredOutputContext) -> None: ...

    @abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Raises `RequestError` when the constraint is not valid."""

    def known(self, params: StructuredOutputsParams) -> Grammar | None:
        """Return what `compile` would where that takes microseconds, else None. On the engine core's thread."""
        return None

"""Outputs for users of `LLM` and `AsyncLLM`: vLLM's names and meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from pelton.errors import ErrorInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pelton.messages.request import TensorData


@dataclass(slots=True)
class Logprob:
    """Log-probability of one candidate token. `rank` counts from 1 (the likeliest)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs = Sequence[dict[int, Logprob]]
"""One entry a generated token: token id to Logprob; the sampled token is always among them."""
PromptLogprobs = Sequence[dict[int, Logprob] | None]
"""One entry a prompt token; None for the first, which nothing predicts."""


class LazyLogprobs(Sequence[Any]):
    """`SampleLogprobs` or `PromptLogprobs` that are made when somebody looks at one: with text for each token they take
    longer than many a step. Like a list that nobody changes; pickled, it is one."""

    __slots__ = ("_make", "_num", "_rows")

    def __init__(self, num: int, make: Callable[[], list[Any]]) -> None:
        """make: returns the `num` entries; called once at most."""
        self._num = num
        self._make: Callable[[], list[Any]] | None = make
        self._rows: list[Any] = []

    def _made(self) -> list[Any]:
        make = self._make
        if make is not None:
            self._rows = make()
            self._make = None
        return self._rows

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._made()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyLogprobs):
            other = other._made()
        return self._made() == other

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self._made(), *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self._made()]

    def __repr__(self) -> str:
        return repr(self._made())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._made(),)


@dataclass(slots=True)
class CompletionOutput:
    """One sampled continuation of a prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for EOS and for other reasons."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds; intervals as docs/metrics.md defines them, None where not reached."""

    arrival_time: float = 0.0
    """Front end's monotonic clock."""
    time_to_first_token_s: float | None = None
    queue_time_s: float | None = None
    prefill_time_s: float | None = None
    decode_time_s: float | None = None
    inference_time_s: float | None = None
    e2e_latency_s: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """All continuations of one prompt, finished or so far (see `RequestOutputKind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
    error: ErrorInfo | None = None
    """Why it failed, with finish_reason "error"; `AsyncLLM.generate` raises it instead."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the KV connector says of the request, at its end; of the first of n samples that has something."""


@dataclass(slots=True)
class PoolingOutput:
    """The result of one prompt, as the engine gave it."""

    tensor: TensorData
    """float32: [D], or [tokens, D] of a task for each token."""

    @property
    def data(self) -> npt.NDArray[np.float32]:
        """The numbers as an array, which may not be written to."""
        import numpy as np

        return np.frombuffer(self.tensor.data, dtype="<f4").reshape(self.tensor.shape)

    def numbers(self) -> list[float]:
        """All of them, row by row."""
        found: list[float] = memoryview(self.tensor.data).cast("f").tolist()  # type: ignore[assignment]
        return found


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]
    """By class."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


Result = TypeVar("Result")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Result]):
    """Result of one prompt, or what an IO processor made of all of its prompts."""

    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    finished: bool
    prompt: str | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
    error: ErrorInfo | None = None
    """Why it failed; `outputs` is None then. `AsyncLLM.encode` raises it instead."""

    def of(self, outputs: Any) -> PoolingRequestOutput[Any]:
        """The same with other outputs."""
        return replace(self, outputs=outputs)


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]

"""What a user of `LLM` or `AsyncLLM` gets back: vLLM's names and meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pelton.errors import ErrorInfo


@dataclass(slots=True)
class Logprob:
    """Log-probability of one candidate token. `rank` counts from 1 (the likeliest)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs = list[dict[int, Logprob]]
"""One entry a generated token: token id to Logprob; the sampled token is always among them."""
PromptLogprobs = list[dict[int, Logprob] | None]
"""One entry a prompt token; None for the first, which nothing predicts."""


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

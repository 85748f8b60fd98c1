"""State of an unfinished request in the front end: its samples with their text and times, and the outputs that are due.

Two clocks appear and are never mixed: the engine's stamps give queue, prefill, decode, inference and inter-token times; the front
end's own clock gives TTFT and E2E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pelton.engine.stop_strings import StopMatcher
from pelton.errors import EngineError, ErrorInfo
from pelton.messages.outputs import EngineEvent, EventType, PackedLogprobs
from pelton.metrics.stats import FinishedRequestStats
from pelton.outputs import (
    CompletionOutput,
    LazyLogprobs,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
)
from pelton.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from pelton.engine.input_processor import ProcessedRequest
    from pelton.engine.output_queue import OutputQueue
    from pelton.messages.request import TensorData
    from pelton.tokenizer.detokenizer import IncrementalDetokenizer


class Times:
    """Stamps of one sequence on the engine's clock; a preemption moves none of them."""

    __slots__ = ("first_token", "last_token", "num_preemptions", "queued", "scheduled")

    def __init__(self) -> None:
        self.queued: float | None = None
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.num_preemptions = 0

    def note(self, events: Iterable[EngineEvent]) -> int:
        """Take in events; returns how many preemptions were among them."""
        preempted = 0
        for event in events:
            if event.type == EventType.QUEUED:
                self.queued = event.timestamp if self.queued is None else self.queued
            elif event.type == EventType.SCHEDULED:
                self.scheduled = event.timestamp if self.scheduled is None else self.scheduled
            elif event.type == EventType.PREEMPTED:
                preempted += 1
        self.num_preemptions += preempted
        return preempted


class SequenceState:
    """One sample of a request."""

    __slots__ = (
        "cumulative_logprob", "decode_token", "detokenizer", "engine_id", "finish_reason", "index", "logprobs",
        "matcher", "new_logprobs", "num_cached_tokens", "only_counts", "only_text", "reported_finish", "request",
        "sent_text", "sent_tokens", "stop_reason", "text", "times", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request: RequestState,
        engine_id: str,
        index: int,
        detokenizer: IncrementalDetokenizer | None,
        matcher: StopMatcher | None,
    ) -> None:
        self.request = request
        self.engine_id = engine_id
        self.index = index
        self.decode_token = request.decode_token  # the request is forgotten before the last output is made
        self.detokenizer = detokenizer
        self.matcher = matcher
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: PackedLogprobs | None = None  # told, where outputs cumulate
        self.new_logprobs: list[PackedLogprobs] | None = None if request.params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = None
        params = request.params
        self.only_counts = detokenizer is None and params.output_kind == RequestOutputKind.FINAL_ONLY
        self.only_text = (  # a step's text may go out as it is
            detokenizer is not None
            and matcher is None
            and self.new_logprobs is None
            and len(request.processed.requests) == 1
            and request.queue is not None
            and request.queue.on_text is not None
        )
        self.sent_tokens = 0
        self.sent_text = 0
        self.reported_finish = False
        self.times = Times()

    def append(self, new_ids: Sequence[int]) -> int:
        """Take in tokens up to a stop string; returns how many were kept."""
        detokenizer, matcher = self.detokenizer, self.matcher
        if detokenizer is None:
            self.token_ids.extend(new_ids)
            return len(new_ids)
        if matcher is None:
            self.token_ids.extend(new_ids)
            self._add_text(detokenizer.step(new_ids))
            return len(new_ids)
        for count, token_id in enumerate(new_ids, start=1):
            self.token_ids.append(token_id)
            text = detokenizer.step((token_id,))
            if len(self.token_ids) < self.request.params.min_tokens:
                self._add_text(text)
            elif text:
                self._add_text(matcher.push(text))
                if matcher.matched is not None:
                    self.finish("stop", matcher.matched)
                    return count
        return len(new_ids)

    def stream_text(self, new_ids: Sequence[int]) -> bool:
        """Give the text of tokens that are taken in already to the request's `on_text`; False when an output is due instead."""
        assert self.detokenizer is not None and self.request.queue is not None
        text = self.detokenizer.step(new_ids)
        if not text:
            return True
        if not self.text and self.request.queue.offer(text, len(self.token_ids) - self.sent_tokens):
            self.sent_tokens = len(self.token_ids)
            return True
        self.text.append(text)
        return False

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the sequence and give out what was held back, which may itself complete a stop string."""
        if self.detokenizer is not None and (self.matcher is None or self.matcher.matched is None):
            text = self.detokenizer.finish()
            if self.matcher is not None and len(self.token_ids) >= self.request.params.min_tokens:
                text = self.matcher.push(text)
                if self.matcher.matched is None:
                    text += self.matcher.flush()
                else:
                    reason, stop_reason = "stop", self.matcher.matched
            self._add_text(text)
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _add_text(self, text: str) -> None:
        if text:
            self.text.append(text)

    def has_news(self, interval: int) -> bool:
        if self.finish_reason is not None:
            return not self.reported_finish
        unsent = len(self.token_ids) - self.sent_tokens
        return unsent >= interval or (unsent > 0 and self.sent_tokens == 0)

    def completion(self, *, delta: bool) -> CompletionOutput:
        """Return this sample's part of a `RequestOutput`, and mark it as sent."""
        finished = self.finish_reason is not None
        if delta:
            token_ids: Sequence[int] = self.token_ids[self.sent_tokens :]
            text = "".join(self.text)
            self.text.clear()
        else:
            token_ids = self.token_ids if finished else list(self.token_ids)
            text = self.text[0] if len(self.text) == 1 else "".join(self.text)
            self.text[:] = [text] if text else []
        logprobs = None if self.new_logprobs is None else self._take_logprobs(self.new_logprobs, delta=delta)
        self.sent_tokens = len(self.token_ids)
        self.reported_finish = finished
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=None if logprobs is None else lazy_rows(logprobs, self.decode_token),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _take_logprobs(self, new: list[PackedLogprobs], *, delta: bool) -> PackedLogprobs:
        """Those that a completion tells."""
        found = PackedLogprobs.join(new)
        new.clear()
        self.cumulative_logprob += sum(found.chosen())
        if not delta:
            found = self.logprobs = PackedLogprobs.join([self.logprobs, found]) if self.logprobs else found
        return found

    def finished_stats(self, now: float) -> FinishedRequestStats:
        times, request = self.times, self.request
        tokens = len(self.token_ids)
        decode = _between(times.first_token, times.last_token)
        return FinishedRequestStats(
            finish_reason=self.finish_reason or "abort", num_prompt_tokens=len(request.processed.prompt_token_ids),
            num_generation_tokens=tokens, max_tokens=request.params.max_tokens, n=request.params.n,
            num_cached_tokens=self.num_cached_tokens or 0, num_preemptions=times.num_preemptions,
            e2e_latency_s=now - request.arrival, queue_time_s=_between(times.queued, times.scheduled),
            prefill_time_s=_between(times.scheduled, times.first_token), decode_time_s=decode,
            inference_time_s=_between(times.scheduled, times.last_token),
            mean_time_per_output_token_s=decode / (tokens - 1) if decode is not None and tokens > 1 else None,
            max_num_generation_tokens=None if request.unfinished else max(len(s.token_ids) for s in request.sequences),
        )  # fmt: skip


class RequestState:
    """One request of a user: n sequences."""

    __slots__ = (
        "arrival", "decode_token", "error", "is_touched", "kv_transfer_params", "params", "pooled", "processed",
        "prompt_logprobs", "prompt_logprobs_sent", "queue", "sequences", "ttft_s", "unfinished",
    )  # fmt: skip

    def __init__(
        self,
        processed: ProcessedRequest,
        arrival: float,
        queue: OutputQueue | None,
        decode_token: Callable[[int], str | None],
    ) -> None:
        """decode_token: text of one token, for logprobs."""
        self.processed = processed
        self.decode_token = decode_token
        self.params = processed.params
        self.arrival = arrival
        self.queue = queue
        self.sequences: list[SequenceState] = []
        self.unfinished = len(processed.requests)
        self.error: ErrorInfo | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.pooled: TensorData | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.prompt_logprobs_sent = False
        self.ttft_s: float | None = None
        self.is_touched = False

    @property
    def request_id(self) -> str:
        return self.processed.request_id

    def output(self, interval: int, now: float) -> RequestOutput | PoolingRequestOutput[Any] | None:
        """The output that is due, if one is."""
        kind, finished = self.params.output_kind, self.unfinished == 0
        if self.processed.pooling_params is not None:
            return self._pooling_output(now) if finished else None
        # The first sample brings them.
        awaits = self.params.prompt_logprobs is not None and self.prompt_logprobs is None
        if not finished and (kind == RequestOutputKind.FINAL_ONLY or awaits):
            return None
        news = [sequence for sequence in self.sequences if finished or sequence.has_news(interval)]
        if not news:
            return None
        if kind == RequestOutputKind.DELTA:
            outputs = [s.completion(delta=True) for s in news if not s.reported_finish]
        else:
            outputs = [s.completion(delta=False) for s in self.sequences]
        were_sent = kind == RequestOutputKind.DELTA and self.prompt_logprobs_sent
        prompt_logprobs = None if were_sent else self.prompt_logprobs
        self.prompt_logprobs_sent = prompt_logprobs is not None or self.prompt_logprobs_sent
        return RequestOutput(
            request_id=self.request_id, prompt=self.processed.prompt, prompt_token_ids=self.processed.prompt_token_ids,
            outputs=outputs, finished=finished, prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.sequences[0].num_cached_tokens, metrics=self._metrics(now) if finished else None,
            error=self.error, kv_transfer_params=self.kv_transfer_params,
        )  # fmt: skip

    def _pooling_output(self, now: float) -> PoolingRequestOutput[Any]:
        error = self.error
        if self.pooled is None and error is None:
            error = EngineError("The request was aborted.").to_info()
        return PoolingRequestOutput(
            request_id=self.request_id, outputs=None if self.pooled is None else PoolingOutput(self.pooled),
            prompt_token_ids=self.processed.prompt_token_ids, finished=True, prompt=self.processed.prompt,
            num_cached_tokens=self.sequences[0].num_cached_tokens, metrics=self._metrics(now), error=error,
        )  # fmt: skip

    def _metrics(self, now: float) -> RequestMetrics:
        """The first sample's metrics, with the preemptions of all."""
        times = self.sequences[0].times
        return RequestMetrics(
            arrival_time=self.arrival, time_to_first_token_s=self.ttft_s, e2e_latency_s=now - self.arrival,
            queue_time_s=_between(times.queued, times.scheduled),
            prefill_time_s=_between(times.scheduled, times.first_token),
            decode_time_s=_between(times.first_token, times.last_token),
            inference_time_s=_between(times.scheduled, times.last_token),
            num_preemptions=sum(s.times.num_preemptions for s in self.sequences),
        )  # fmt: skip


def lazy_rows(packed: PackedLogprobs, decode: Callable[[int], str | None], *, is_prompt: bool = False) -> LazyLogprobs:
    """The rows of a prompt; None for its first token."""
    head: list[dict[int, Logprob] | None] = [None] if is_prompt else []
    return LazyLogprobs(len(head) + len(packed), lambda: [*head, *_logprob_rows(packed, decode)])


def _logprob_rows(packed: PackedLogprobs, decode: Callable[[int], str | None]) -> list[dict[int, Logprob]]:
    columns = packed.columns()
    rows: list[dict[int, Logprob]] = []
    for ids, values, rank in zip(columns.token_ids, columns.logprobs, columns.ranks, strict=True):
        row = {ids[0]: Logprob(values[0], rank, decode(ids[0]))}
        for position, token_id in enumerate(ids[1:], start=1):
            if token_id not in row:
                row[token_id] = Logprob(values[position], position, decode(token_id))
        rows.append(row)
    return rows


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start

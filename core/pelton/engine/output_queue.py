"""One request's outputs on their way to an asyncio consumer; what it has not taken yet is merged into one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pelton.outputs import PoolingRequestOutput, RequestOutput
from pelton.sampling_params import RequestOutputKind

OnText = Callable[[str, int], bool]
"""Takes a stream's next text and how many tokens it is of, at once; False when it cannot now."""


class OutputQueue:
    """`put` and `get` on one event loop; one consumer. Memory is bounded by one output.

    on_text: takes plain text while the consumer waits for more, which then sleeps on. Order is kept.
    """

    def __init__(self, on_text: OnText | None = None) -> None:
        self.on_text = on_text
        self._output: Any = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, text: str, num_tokens: int) -> bool:
        """Give text to `on_text`; False: it is to be put."""
        waiter = self._waiter
        if self.on_text is None or self._output is not None or waiter is None or waiter.done():
            return False
        return self.on_text(text, num_tokens)

    def put(self, output: RequestOutput | PoolingRequestOutput[Any], kind: RequestOutputKind) -> None:
        if self._output is None:
            self._output = output
        elif kind == RequestOutputKind.DELTA and isinstance(output, RequestOutput):
            merge_delta(self._output, output)
        else:
            self._output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """Drop what is pending: the request has failed."""
        self._error = error
        self._wake()

    async def get(self) -> Any:
        """A `RequestOutput`, or the `PoolingRequestOutput` of a request that pools."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge_delta(first: RequestOutput, second: RequestOutput) -> None:
    """Append `second`, which is later, to `first`."""
    by_index = {completion.index: completion for completion in first.outputs}
    for new in second.outputs:
        old = by_index.get(new.index)
        if old is None:
            first.outputs.append(new)
            continue
        old.text += new.text
        old.token_ids = [*old.token_ids, *new.token_ids]
        if new.logprobs is not None:
            old.logprobs = [*(old.logprobs or ()), *new.logprobs]
        old.cumulative_logprob = new.cumulative_logprob
        old.finish_reason = new.finish_reason
        old.stop_reason = new.stop_reason
    first.finished = second.finished
    first.error = second.error
    first.metrics = second.metrics or first.metrics
    first.prompt_logprobs = first.prompt_logprobs or second.prompt_logprobs
    first.num_cached_tokens = second.num_cached_tokens
    first.kv_transfer_params = second.kv_transfer_params

"""Targets of a load: an engine in a process of its own behind `AsyncLLM`, or a server at a URL. One interface for both."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from pelton_plugins.bench.metrics import RequestTimes


@dataclass(frozen=True, slots=True)
class TargetState:
    """State of the engine, between steps."""

    kv_cache_usage: float
    """Share of blocks that requests hold, 0 to 1; blocks that are cached only are free."""
    num_unfinished: int


class Target(ABC):
    """Made ready with `start`. All calls come from one event loop."""

    device: str = ""
    vocab_size: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    is_ours: bool = True
    """The engine is a process that this one started: the host memory of both is watched."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def request(self, prompt: list[int], num_tokens: int, stop_after: int | None, times: RequestTimes) -> None:
        """Generate greedily to `num_tokens`, EOS ignored; note each token's time in `times`. After `stop_after` tokens the
        client goes away. Errors of the request are noted too, and not raised."""

    @abstractmethod
    async def state(self) -> TargetState: ...

    @abstractmethod
    async def close(self) -> None: ...


class EngineTarget(Target):
    """`AsyncLLM` with flat settings."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = {"skip_tokenizer_init": True, **settings}
        self._llm: Any = None

    async def start(self) -> None:
        from pelton import AsyncLLM

        self._llm = llm = AsyncLLM.from_flat(**self._settings)
        await llm.start()
        self.device = llm.info.report.device
        self.vocab_size = llm.model.vocab_size
        self.max_model_len = llm.info.max_model_len
        self.max_num_seqs = llm.info.max_num_seqs

    async def request(self, prompt: list[int], num_tokens: int, stop_after: int | None, times: RequestTimes) -> None:
        from pelton import SamplingParams
        from pelton.errors import PeltonError
        from pelton.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        times.num_prompt_tokens = len(prompt)
        began = time.perf_counter()
        outputs = self._llm.generate({"prompt_token_ids": prompt}, params)
        try:
            async for output in outputs:
                now = time.perf_counter() - began
                times.tokens += [now] * len(output.outputs[0].token_ids)
                if stop_after is not None and len(times.tokens) >= stop_after and not output.finished:
                    times.was_aborted = True
                    return
        except PeltonError as error:
            times.error = str(error)
        finally:
            await outputs.aclose()

    async def state(self) -> TargetState:
        return TargetState(float(await self._llm.call("kv_cache_usage")), self._llm.num_unfinished_requests)

    async def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()

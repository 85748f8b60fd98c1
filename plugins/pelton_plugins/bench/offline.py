"""Batches through `LLM.generate`, timed: what `latency`, `throughput` and `table` have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pelton.config import EngineConfig
from pelton.errors import EngineError
from pelton_plugins.bench.bounds import check_at_least

if TYPE_CHECKING:
    from pelton import LLM, SamplingParams

Prompt = list[int] | str


class OfflineArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments that vLLM's offline commands have in common."""

    n: int = 1
    """Sequences made for each prompt."""
    disable_detokenize: bool = False
    """Make no text of the tokens. Without this the text is made and its time counts, where the model has a tokenizer."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(self, n=1)


class Batch(NamedTuple):
    """One call of `generate`."""

    seconds: float
    num_input_tokens: int
    num_output_tokens: int


def makes_text(config: EngineConfig, arguments: OfflineArguments) -> bool:
    """Return whether tokens become text: unless that is switched off, or the model has no tokenizer to do it with."""
    from pelton.model.resolve import locate
    from pelton.plugins import load_plugins

    model = config.model
    if arguments.disable_detokenize or model.skip_tokenizer_init:
        return False
    path = locate(model.tokenizer or model.model, config, load_plugins(), needs_weights=False)
    return path.is_file() or (path / "tokenizer.json").is_file()  # a file has its tokenizer in it


def text_note(result: dict[str, Any]) -> str:
    return "text" if result["detokenize"] else "no text"


def sampled(num_output_tokens: Sequence[int], *, n: int = 1, detokenize: bool) -> list[SamplingParams]:
    """As vLLM's commands sample: at temperature 1, to the full length."""
    from pelton import SamplingParams

    return [
        SamplingParams(n=n, temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=detokenize)
        for count in num_output_tokens
    ]


def greedy(num_output_tokens: Sequence[int]) -> list[SamplingParams]:
    """As the script that measured the table's other engines: the likeliest token, to the full length, and no text."""
    from pelton import SamplingParams

    return [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in num_output_tokens
    ]


def run_batch(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Batch:
    """Generate for all. Raises when a sequence has not exactly its number of tokens."""
    inputs: list[Any] = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    took = time.perf_counter() - began
    for output, asked in zip(outputs, params, strict=True):
        if output.error is not None:
            raise EngineError(f"Request {output.request_id} failed: {output.error.message}")
        made = [len(sequence.token_ids) for sequence in output.outputs]
        if made != [asked.max_tokens] * asked.n:
            raise EngineError(
                f"Request {output.request_id} made {made} tokens; {asked.n} times {asked.max_tokens} were asked for."
            )
    num_in = sum(len(output.prompt_token_ids or ()) for output in outputs)
    return Batch(took, num_in, sum(one.n * (one.max_tokens or 0) for one in params))

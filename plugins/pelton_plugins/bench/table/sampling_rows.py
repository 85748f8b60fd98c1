"""Requests that ask for more than greedy tokens: the same batch in each kind, as a share of the greedy one's speed.

Repeats alternate between the kinds, so that all see the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pelton_plugins.bench.workloads import Workload

if TYPE_CHECKING:
    from pelton import SamplingParams

GREEDY = "greedy"
KINDS: dict[str, dict[str, Any]] = {
    GREEDY: {"temperature": 0.0},
    "top_k and top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "logit_bias": {"temperature": 0.0, "logit_bias": {1000: 2.0, 2000: -2.0, 3000: 5.0}},
    "penalties and top_p": {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "all together": {
        "temperature": 1.0, "top_k": 50, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 5,
    },
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 5},
    "top_p alone": {"temperature": 1.0, "top_p": 0.9},
}  # fmt: skip
"""Kind to its sampling parameters. With random weights the distribution is flat: top_p alone keeps most of the vocabulary."""
SEEDED = "all together"
TARGETS = {16: 0.92, 32: 0.92, 256: 0.88}
"""Requests at once to the share of the greedy speed that is aimed at; 16 on CPUs."""
LOWER_TARGET = 0.75
LOWER = ("prompt_logprobs", "top_p alone")


def num_rows(name: str) -> int:
    """Requests of the batch, from the row's name."""
    return int(name.removeprefix("sampling"))


def target(kind: str, rows: int) -> float | None:
    """The share of the greedy speed that is aimed at."""
    if kind == GREEDY:
        return None
    return LOWER_TARGET if kind in LOWER else TARGETS.get(rows)


def params_of(kind: str, num_output_tokens: Sequence[int]) -> list[SamplingParams]:
    from pelton import SamplingParams

    seeds = [{"seed": index} if kind == SEEDED else {} for index in range(len(num_output_tokens))]
    return [
        SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **KINDS[kind], **seed)
        for count, seed in zip(num_output_tokens, seeds, strict=True)
    ]


def measure(llm: Any, workload: Workload, repeats: int) -> dict[str, Any]:
    """Output tokens/s of each kind: medians over the repeats that follow one that does not count."""
    from pelton_plugins.bench.offline import run_batch

    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repeat in range(repeats + 1):
        for place, kind in enumerate(KINDS):
            prompts = workload.fresh(repeat * len(KINDS) + place)
            seconds[kind].append(run_batch(llm, prompts, params_of(kind, workload.num_output_tokens)).seconds)
    num_out = sum(workload.num_output_tokens)
    return {
        "kinds": {
            kind: {"out_tok_s": num_out / statistics.median(times[1:]), "all_seconds": times[1:]}
            for kind, times in seconds.items()
        }
    }

"""Decoding over long contexts that lie in the prefix cache, and the first token of such a prompt.

Every row of a batch has a context of its own: a context that all rows share would be read once for all of them. Each
context is computed once, the longer ones on top of the shorter. A row is timed with `OUTPUT` tokens and with one; the
difference is decoding.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OUTPUT = 64
REPEATS = 3
PATTERN = re.compile(r"decode-(\d+)x(\d+)$")
NO_ROOM = "no room"
SHAPES = ((1, 8_000), (2, 8_000), (8, 8_000), (8, 16_000), (1, 32_000), (2, 32_000), (4, 32_000), (8, 32_000),
          (1, 120_000), (2, 120_000), (8, 120_000))  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """Requests that decode together, each behind `context` tokens."""

    context: int
    rows: int

    @property
    def name(self) -> str:
        return f"decode-{self.rows}x{self.context}"

    @property
    def max_model_len(self) -> int:
        return self.context + OUTPUT


CASES = tuple(Case(context, rows) for rows, context in SHAPES)


def case_of(name: str) -> Case | None:
    """The case of a row's name; None for another row."""
    match = PATTERN.match(name)
    return Case(int(match[2]), int(match[1])) if match else None


def measure(llm: Any, names: Sequence[str], repeats: int | None) -> Iterator[dict[str, Any]]:
    """A row for each name, the shortest contexts first."""
    source = _Prompts(llm.llm_engine.model.vocab_size)
    for case in sorted(case for name in names if (case := case_of(name)) is not None):
        try:
            missing = no_room(case, llm.llm_engine.info)
            found = {"no_room": missing} if missing else _measure(llm, case, source, repeats or REPEATS)
        except Exception as error:  # the other rows go on
            found = {"error": f"{type(error).__name__}: {error}"}
        yield {"row": case.name, **found}


def no_room(case: Case, info: Any) -> str | None:
    """Why an engine cannot hold a case; None when it can."""
    if case.max_model_len > info.max_model_len:
        return f"max_model_len is {info.max_model_len:,}"
    num_tokens = (info.num_blocks - 1) * info.block_size  # block 0 is never handed out
    blocks_each = -(-case.max_model_len // info.block_size)
    if case.rows * blocks_each > info.num_blocks - 1:
        return f"the KV cache holds {num_tokens:,} tokens, this row needs {case.rows * case.max_model_len:,}"
    if case.rows > info.max_num_seqs:
        return f"max_num_seqs is {info.max_num_seqs}"
    return None


class _Prompts:
    """The prompt of each row: a longer one begins with the shorter one."""

    def __init__(self, vocab_size: int) -> None:
        self._end = min(vocab_size, 49_000)
        self._tokens: list[list[int]] = []
        self._draws: list[Callable[[int, int], int]] = []

    def of(self, case: Case) -> list[list[int]]:
        while len(self._tokens) < case.rows:
            self._draws.append(random.Random(f"context {len(self._tokens)}").randrange)
            self._tokens.append([])
        for tokens, draw in zip(self._tokens, self._draws, strict=True):
            tokens += [draw(10, self._end) for _ in range(case.context - len(tokens))]
        return [tokens[: case.context] for tokens in self._tokens[: case.rows]]


def _measure(llm: Any, case: Case, source: _Prompts, repeats: int) -> dict[str, Any]:
    from pelton_plugins.bench.offline import greedy, run_batch

    prompts = source.of(case)
    for prompt in prompts:
        run_batch(llm, [prompt], greedy([1]))  # fills the prefix cache
    num_cached = min(
        output.num_cached_tokens or 0
        for output in llm.generate([{"prompt_token_ids": p} for p in prompts], greedy([1] * case.rows), use_tqdm=False)
    )
    # A prompt's last block is computed always: its logits are wanted.
    if num_cached < case.context - 2 * llm.llm_engine.info.block_size:
        return {"error": f"{num_cached} of {case.context} tokens were in the prefix cache"}
    ones, alls = [], []
    for _ in range(repeats + 1):
        ones.append(run_batch(llm, prompts, greedy([1] * case.rows)).seconds)
        alls.append(run_batch(llm, prompts, greedy([OUTPUT] * case.rows)).seconds)
    one, seconds = statistics.median(ones[1:]), statistics.median(alls[1:])
    return {
        "tpot_ms": (seconds - one) / (OUTPUT - 1) * 1e3,
        "ttft_ms": one * 1e3,
        "all_seconds": alls[1:],
        "all_ttft_seconds": ones[1:],
        "num_cached_tokens": num_cached,
    }

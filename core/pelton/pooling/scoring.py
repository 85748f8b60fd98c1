"""Scores of pairs of texts: by a cross-encoder that reads both, or by the cosine of two vectors. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pelton.errors import NotSupportedError, RequestError
from pelton.messages.request import PoolingParams
from pelton.model.resolve_pooling import SCORE
from pelton.outputs import PoolingOutput

if TYPE_CHECKING:
    from pelton.engine.input_processor import Prompt
    from pelton.model.resolved import ResolvedModel
    from pelton.tokenizer import Tokenizer


def reads_pairs(model: ResolvedModel) -> bool:
    """True for a cross-encoder, False for a model whose vectors are compared. Raises `RequestError` for any other."""
    tasks = model.pooling.tasks if model.pooling is not None else []
    if SCORE in tasks:
        return True
    if "embed" in tasks:
        return False
    offered = f"it is run for {', '.join(tasks)}" if tasks else "it generates"
    raise NotSupportedError(f"This model scores no pairs of texts; {offered}.", param="model")


def paired(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """One text against each of the others, or each against its own. Raises `RequestError` where the counts do not fit."""
    if not first or not second:
        raise RequestError("Scores need at least one text on each side.", param="text_1" if not first else "text_2")
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"There are {len(first)} first texts and {len(second)} second ones; give one, or one each.", param="text_1"
        )
    return list(zip([first[0]] * len(second) if len(first) == 1 else first, second, strict=True))


def pair_prompt(
    pair: tuple[str, str], tokenizer: Tokenizer | None, *, max_tokens: int | None, use_activation: bool | None = None
) -> tuple[Prompt, PoolingParams]:
    """Make what a cross-encoder reads for one pair. max_tokens: cut the longer text to fit."""
    if tokenizer is None:
        raise RequestError("Scores of pairs need a tokenizer (skip_tokenizer_init is set).", param="text_1")
    found = tokenizer.encode_pair(*pair, max_tokens=max_tokens)
    params = PoolingParams(task=SCORE, use_activation=use_activation, second_text_start=found.second_start)
    return {"prompt_token_ids": found.token_ids}, params


def cosine(first: PoolingOutput, second: PoolingOutput) -> float:
    """The cosine of two vectors."""
    import numpy as np  # a server that only generates does without

    one, other = first.data.astype(np.float64), second.data.astype(np.float64)
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / length if length else 0.0


def score_of(output: PoolingOutput) -> float:
    """A cross-encoder's one number."""
    return output.numbers()[0]

"""Checks of requests that pool against the model, and how their texts are cut to fit. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pelton.errors import NotSupportedError, RequestError
from pelton.messages.request import EMBED_TASKS, TOKEN_TASKS, PoolingParams
from pelton.model.pooling import PoolingSpec

if TYPE_CHECKING:
    from pelton.model.resolved import ResolvedModel
    from pelton.tokenizer import Tokenizer


def check_pooling_params(params: PoolingParams | None, model: ResolvedModel) -> PoolingParams:
    """The parameters that the engine gets. Raises `RequestError` naming the field."""
    spec = model.pooling
    if spec is None:
        raise RequestError(
            "This model generates; it makes no vectors or scores. Start it with runner=pooling for vectors.",
            param="model",
        )
    if params is None:
        params = PoolingParams(task=spec.tasks[0])
    elif not isinstance(params, PoolingParams):
        raise RequestError(f"pooling_params is a {type(params).__name__}; give PoolingParams.", param="pooling_params")
    if params.task not in spec.tasks:
        raise NotSupportedError(
            f"This model has no task {params.task!r}; it is run for {', '.join(spec.tasks)}.", param="task"
        )
    if params.dimensions is not None:
        _check_dimensions(params, spec, vector_size(model))
    skips = params.task in TOKEN_TASKS or spec.reads_all_tokens or bool(params.skip_reading_prefix_cache)
    return msgspec.structs.replace(params, skip_reading_prefix_cache=skips)


def vector_size(model: ResolvedModel) -> int:
    """Numbers of a whole vector."""
    spec = model.pooling
    return spec.dense[-1].out_features if spec is not None and spec.dense else int(model.hf_config["hidden_size"])


def _check_dimensions(params: PoolingParams, spec: PoolingSpec, size: int) -> None:
    wanted = params.dimensions
    if params.task not in EMBED_TASKS:
        raise RequestError("dimensions is for vectors only", param="dimensions", value=wanted)
    if not spec.is_matryoshka:
        raise RequestError(
            "This model was not trained for shortened vectors; leave dimensions out, or start it with --is-matryoshka",
            param="dimensions",
            value=wanted,
        )
    if spec.dimensions and wanted not in spec.dimensions:
        known = ", ".join(map(str, spec.dimensions))
        raise RequestError(f"dimensions must be one of {known}", param="dimensions", value=wanted)
    if wanted is not None and wanted > size:
        raise RequestError(f"dimensions must be at most {size}", param="dimensions", value=wanted)


def truncated(token_ids: list[int], text: str | None, wanted: int, most: int, tokenizer: Tokenizer | None) -> list[int]:
    """The first `wanted` tokens, the special ones around a text included; -1: `most`."""
    if isinstance(wanted, bool) or not isinstance(wanted, int) or (wanted < 1 and wanted != -1):
        raise RequestError(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens", value=wanted
        )
    limit = most if wanted == -1 else wanted
    if len(token_ids) <= limit:
        return token_ids
    if text is None or tokenizer is None:
        return token_ids[:limit]
    inner = tokenizer.encode(text, add_special_tokens=False)
    num_special = len(token_ids) - len(inner)
    starts = [start for start in range(num_special + 1) if token_ids[start : start + len(inner)] == inner]
    if not starts or limit <= num_special:
        return token_ids[:limit]
    end = starts[0] + len(inner)
    return token_ids[: end - (len(token_ids) - limit)] + token_ids[end:]

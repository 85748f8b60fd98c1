"""One or several: what users may give where several are meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pelton.engine.input_processor import Prompt
from pelton.errors import RequestError


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    wanted = "text, token ids, a prompt dictionary, or a list of these"
    return as_several("prompts", prompts, part=int, wanted=wanted, param="prompt")


def as_several(name: str, value: Any, *, part: type, wanted: str, param: str) -> list[Any]:
    """Return a list of values: [value] where the entries of `value` are `part`s, so that it is one value; else its entries."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RequestError(f"{name} is a {type(value).__name__}; give {wanted}.", param=param)
    return [value] if value and isinstance(value[0], part) else list(value)


def tokenization(given: Mapping[str, Any] | None, most: int | None) -> tuple[bool, int | None]:
    """Return add_special_tokens and truncate_prompt_tokens of vLLM's tokenization_kwargs. most: the latter where `given` has none."""
    options = dict(given or {})
    found = options.pop("add_special_tokens", True), options.pop("truncate_prompt_tokens", most)
    for name in options:
        wanted = "give add_special_tokens or truncate_prompt_tokens"
        raise RequestError(f"tokenization_kwargs has {name!r}; {wanted}.", param="tokenization_kwargs")
    return found


def as_texts(name: str, value: Any) -> list[str]:
    """One text or several, as several."""
    given = [value] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    for text in given:
        if not isinstance(text, str):
            holds = "is" if text is value else "holds"
            raise RequestError(f"{name} {holds} a {type(text).__name__}; give a text, or a list of texts.", param=name)
    return given

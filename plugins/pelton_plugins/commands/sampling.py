"""Sampling flags of `pelton generate` and `pelton chat`, and the parameters they make."""

from __future__ import annotations

from typing import Any

import msgspec

from pelton.config.engine import did_you_mean
from pelton.errors import ConfigError, RequestError
from pelton.sampling_params import RequestOutputKind, SamplingParams


class SamplingFlags(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn; what is not given comes from the model's own defaults."""

    max_tokens: int | None = None
    """Most tokens of one answer."""
    temperature: float | None = None
    """0 takes the likeliest token every time."""
    top_p: float | None = None
    """Draw from the likeliest tokens that make up this share."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens."""
    stop: list[str] | None = None
    """Texts that end an answer."""
    sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    """Any other field of SamplingParams, such as {"seed": 1, "n": 2}, or --sampling-params.seed 1."""

    def given(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that were given. Raises `ConfigError` on one that does not exist."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__[:-1]}
        for name in self.sampling_params:
            if name not in SamplingParams.__struct_fields__:
                raise ConfigError(
                    f"Unknown sampling parameter {name!r}.{did_you_mean(name, SamplingParams.__struct_fields__)}"
                )
        return {**{name: value for name, value in fields.items() if value is not None}, **self.sampling_params}


def check(given: dict[str, Any]) -> None:
    """Refuse a bad value before a model is loaded. Raises `ConfigError` naming it."""
    make_params(SamplingParams(), given, RequestOutputKind.FINAL_ONLY)


def make_params(defaults: SamplingParams, given: dict[str, Any], kind: RequestOutputKind) -> SamplingParams:
    """The model's defaults with what was given put over them. Raises `ConfigError` naming a bad value."""
    values = {**msgspec.structs.asdict(defaults), **given, "output_kind": kind}
    try:
        return msgspec.convert(msgspec.to_builtins(values), SamplingParams)
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError(f"Sampling parameters: {error}.") from error

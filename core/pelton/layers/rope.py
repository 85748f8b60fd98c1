"""Rotary position embedding: one table of cosines and sines per set of parameters, shared by layers.

Reads both forms of config.json: `rope_theta` and `rope_scaling`, and transformers 5's `rope_parameters`, which may
be one set or one per layer type. Scalings: linear, dynamic, llama3, yarn, proportional.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pelton.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig, HFConfig

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """Everything that the table depends on but its length."""

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    share: float = 1.0  # proportional: of all frequencies, those that turn anything


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of an attention layer."""

    parameters: RopeParameters
    cos_sin: Tensor  # [max_model_len, rotary_dim] float32: cosines, then sines

    @property
    def rotary_dim(self) -> int:
        return self.parameters.rotary_dim


def get_rope(
    config: BuildConfig,
    head_dim: int,
    *,
    layer_type: str | None = None,
    theta: float | None = None,
    only_layer_type: bool = False,
) -> Rope:
    """The rope of a layer; the table is made once per set of parameters.

    theta: replaces a rope_theta that is not in the layer type's own set. only_layer_type: where config.json has one set for
    all layers, do without it.
    """
    parameters = rope_parameters(
        config.hf, head_dim, layer_type=layer_type, theta=theta, only_layer_type=only_layer_type
    )
    if parameters not in config.ropes:
        table = cos_sin_table(parameters, config.max_model_len).to(config.device)
        config.ropes[parameters] = Rope(parameters, table)
    return config.ropes[parameters]


def rope_parameters(
    hf: HFConfig,
    head_dim: int,
    *,
    layer_type: str | None = None,
    theta: float | None = None,
    only_layer_type: bool = False,
) -> RopeParameters:
    """Read config.json's fields. `rope_parameters` wins over the older ones, as in transformers."""
    given: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if layer_type is not None and isinstance(given.get(layer_type), Mapping):
        given = given[layer_type]
    elif only_layer_type:
        given = {}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type == "mrope":  # a token of text has the same number in each part of its position
        rope_type = "default"
    if rope_type not in SCALINGS:
        raise ConfigError(
            f"rope_type is {rope_type!r}; this version has {', '.join(SCALINGS)}. Use another checkpoint."
        )
    max_positions = int(hf.get("max_position_embeddings", hf.get("model_max_length", 2048)))
    # Phi-style checkpoints keep the length of pretraining outside, and it wins there.
    original = hf.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = int(original or max_positions)
    factor = given.get("factor")
    if factor is None:
        if rope_type not in ("default", "yarn", "proportional"):
            raise ConfigError(f"rope_type {rope_type!r} needs a factor in rope_parameters {dict(given)}; add one.")
        factor = 1.0 if rope_type == "proportional" else max_positions / original
    share = given.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    return RopeParameters(
        rope_type=rope_type, theta=float(given.get("rope_theta") or theta or hf.get("rope_theta") or 10000.0),
        rotary_dim=head_dim if rope_type == "proportional" else int(head_dim * share),
        max_position_embeddings=max_positions, factor=float(factor), original_max_position_embeddings=original,
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)), attention_factor=given.get("attention_factor"),
        beta_fast=float(given.get("beta_fast") or 32.0), beta_slow=float(given.get("beta_slow") or 1.0),
        mscale=float(given.get("mscale") or 0.0), mscale_all_dim=float(given.get("mscale_all_dim") or 0.0),
        truncate=bool(given.get("truncate", True)), share=float(share) if rope_type == "proportional" else 1.0,
    )  # fmt: skip


def cos_sin_table(parameters: RopeParameters, max_len: int) -> Tensor:
    """[max_len, rotary_dim] float32 on the CPU."""
    positions = torch.arange(max_len, dtype=torch.float32)
    if parameters.rope_type == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(parameters, positions)
        scale = 1.0
    else:
        frequencies, scale = FREQUENCIES[parameters.rope_type](parameters)
        angles = positions[:, None] * frequencies
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)


def _exponents(parameters: RopeParameters) -> Tensor:
    """[rotary_dim / 2]: 0, 2 / d, 4 / d, ..."""
    return torch.arange(0, parameters.rotary_dim, 2, dtype=torch.float32) / parameters.rotary_dim


def _default(parameters: RopeParameters) -> tuple[Tensor, float]:
    return 1.0 / parameters.theta ** _exponents(parameters), 1.0


def _linear(parameters: RopeParameters) -> tuple[Tensor, float]:
    return _default(parameters)[0] / parameters.factor, 1.0


def _proportional(parameters: RopeParameters) -> tuple[Tensor, float]:
    """The first frequencies of a head as they would be without scaling; the others turn nothing, so that pairs stay half a head
    apart (Gemma 4)."""
    frequencies = _default(parameters)[0] / parameters.factor
    frequencies[int(parameters.share * parameters.rotary_dim // 2) :] = 0.0
    return frequencies, 1.0


def _dynamic_frequencies(parameters: RopeParameters, positions: Tensor) -> Tensor:
    """[max_len, rotary_dim / 2]: NTK scaling whose base grows with the length so far, by position.

    Position p uses the base of a sequence of p + 1 tokens: what decoding with a cache gives, and the only reading
    under which a token's key does not depend on how its sequence was chunked or cached.
    """
    dim, limit = parameters.rotary_dim, parameters.max_position_embeddings
    length = (positions.double() + 1).clamp(min=limit)
    growth = parameters.factor * length / limit - (parameters.factor - 1)
    base = (parameters.theta * growth ** (dim / (dim - 2))).float()
    return 1.0 / base[:, None] ** _exponents(parameters)


def _llama3(parameters: RopeParameters) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    frequencies, _ = _default(parameters)
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    turns = parameters.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / parameters.factor), 1.0


def _yarn(parameters: RopeParameters) -> tuple[Tensor, float]:
    """Peng et al., YaRN (arXiv:2309.00071): dimensions that turn often are kept, slow ones stretched."""
    dim, factor = parameters.rotary_dim, parameters.factor
    frequencies, _ = _default(parameters)

    def dim_of_turns(turns: float) -> float:
        span = parameters.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(parameters.theta))

    low, high = dim_of_turns(parameters.beta_fast), dim_of_turns(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / factor * (1.0 - keep), _yarn_scale(parameters)


def _yarn_scale(parameters: RopeParameters) -> float:
    """Return the factor of cosines and sines."""

    def scale(weight: float) -> float:
        return 1.0 if parameters.factor <= 1 else 0.1 * weight * math.log(parameters.factor) + 1.0

    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.mscale and parameters.mscale_all_dim:
        return scale(parameters.mscale) / scale(parameters.mscale_all_dim)
    return scale(1.0)


FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "proportional": _proportional}

"""LongRoPE (Ding et al., arXiv:2402.13753): a factor for each frequency, one set up to the length of pretraining, another beyond it.

Which set counts goes by the longest sequence that is served, not by each one's length so far: a token's key must not depend on what
follows it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch

from pelton.errors import ConfigError
from pelton.layers.rope import Rope, RopeParameters, get_rope, rope_parameters
from pelton.model.build import BuildConfig, HFConfig

NAMES = ("longrope", "su")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeParameters(RopeParameters):
    factors: tuple[float, ...]  # of each frequency


def get_long_rope(config: BuildConfig, head_dim: int) -> Rope:
    """The rope of a layer, with these factors where config.json has them."""
    fields = {name: config.hf.get(name) for name in config.hf}
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if (given.get("rope_type") or given.get("type")) not in NAMES:
        return get_rope(config, head_dim)
    plain = {**given, "rope_type": "default", "type": "default"}
    base = rope_parameters(HFConfig({**fields, "rope_parameters": plain}), head_dim)
    name = "long_factor" if config.max_model_len > base.original_max_position_embeddings else "short_factor"
    factors = tuple(map(float, given.get(name) or ()))
    if 2 * len(factors) != base.rotary_dim:
        raise ConfigError(
            f"rope_parameters.{name} has {len(factors)} numbers; a head's {base.rotary_dim} turned ones take {base.rotary_dim // 2}. "
            "Check config.json."
        )
    growth = float(given.get("factor") or base.max_position_embeddings / base.original_max_position_embeddings)
    made = LongRopeParameters(**asdict(replace(base, rope_type=NAMES[0], factor=growth)), factors=factors)
    if made not in config.ropes:
        config.ropes[made] = Rope(made, table(made, config.max_model_len).to(config.device))
    return config.ropes[made]


def table(parameters: LongRopeParameters, max_len: int) -> torch.Tensor:
    """[max_len, rotary_dim] float32 on the CPU: cosines, then sines."""
    dim, growth = parameters.rotary_dim, parameters.factor
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (torch.tensor(parameters.factors) * parameters.theta**exponents)
    scale = parameters.attention_factor
    if scale is None:
        original = parameters.original_max_position_embeddings
        scale = 1.0 if growth <= 1.0 else math.sqrt(1.0 + math.log(growth) / math.log(original))
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)

"""Scales that checkpoints have for a key-value cache in fp8 (`k_scale`, `v_scale`): a cache in fp8 keeps numbers as they are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pelton.errors import ConfigError

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig
    from pelton.model.loading import LazyWeight

PATTERN = r".*\.((q|k|v|kv|prob)_scale|[kv]_proj\.output_scale)"


def check_cache_scales(config: BuildConfig) -> None:
    """Skip these tensors where the cache is not in fp8, which needs none; else refuse any other than 1."""
    config.weights.ignore(PATTERN, partial(_check, config.kv_dtype) if config.kv_dtype.startswith("fp8") else None)


def _check(kv_dtype: str, name: str, weight: LazyWeight) -> None:
    scale = weight.read().float().flatten()
    if (scale != 1.0).any():
        raise ConfigError(
            f"kv_cache_dtype is {kv_dtype!r}, and the checkpoint has {name} {scale[0].item():.4g}: a cache in fp8 is kept without scales. "
            "Leave kv_cache_dtype unset, which needs none."
        )

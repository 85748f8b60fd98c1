"""Merged matrices whose parts a checkpoint treats differently: some quantized and others not, or not alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from pelton.errors import ConfigError
from pelton.logging import get_logger
from pelton.quantization.plain import decoded_weights

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig
    from pelton.ops.interface import LinearWeights
    from pelton.quantization.interface import LinearShard

logger = get_logger(__name__)


def create_mixed(config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool) -> LinearWeights:
    """Allocate the matrix in the model's dtype. Parts that are quantized are decoded while they load."""
    method = decoded_weights(config)
    if method is None:
        raise ConfigError(
            f"quantization is {config.quantization.name!r}, and the parts of one merged matrix differ in it: "
            f"{', '.join(shard.name for shard in shards)}. Take a checkpoint that treats them alike."
        )
    _report(", ".join(shard.name.rpartition(".")[2] for shard in shards), config.quantization.name, config.dtype_name)
    return method.create(config, shards, bias=bias)


@cache
def _report(parts: str, method: str, dtype: str) -> None:
    logger.info("quantization is %r, and %s differ in it: they are kept in %s.", method, parts, dtype)

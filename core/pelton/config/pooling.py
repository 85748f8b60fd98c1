"""Settings of models that pool: embeddings, classification, scores."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

POOLING_TYPES = ("last", "mean", "cls")
RUNNERS = ("auto", "generate", "pooling")


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of pooling: what the model is run for, and how its hidden states become vectors. Unset: as the model's folder says."""

    runner: str = "auto"
    """generate, pooling, or auto: pooling where the architecture, or the folder, is made for it."""
    pooling_type: str | None = None
    """last, mean or cls."""
    normalize: bool | None = None
    """Give vectors length 1."""
    is_matryoshka: bool | None = None
    """Take `dimensions` in requests: the model was trained so that the head of a vector is a vector."""
    matryoshka_dimensions: list[int] = msgspec.field(default_factory=list)
    """The only `dimensions` that requests may name; any when empty."""
    io_processor_plugin: str | None = None
    """IO processor that makes prompts of requests' data, and answers of vectors; config.json's `io_processor_plugin` when unset."""

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise ConfigError(f"runner is {self.runner!r}; use one of {', '.join(RUNNERS)}.")
        msgspec.structs.force_setattr(self, "pooling_type", self.pooling_type and self.pooling_type.lower())
        if self.pooling_type is not None and self.pooling_type not in POOLING_TYPES:
            raise ConfigError(f"pooling_type is {self.pooling_type!r}; use one of {', '.join(POOLING_TYPES)}.")
        if any(size < 1 for size in self.matryoshka_dimensions):
            raise ConfigError(
                f"matryoshka_dimensions is {self.matryoshka_dimensions}; use numbers from 1, such as [256, 512]."
            )

"""How a model is spread over devices and processes."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the parallel groups."""

    tensor_parallel_size: int = 1
    """Devices that share every layer: each holds a part of its heads and columns."""
    pipeline_parallel_size: int = 1
    """Devices that follow each other, each with some of the layers."""
    pipeline_layer_partition: tuple[int, ...] | None = None
    """How many layers each of them has; as equal as can be when unset."""
    data_parallel_size: int = 1
    """Engines with a whole copy of the model each. This release runs 1."""
    enable_expert_parallel: bool = False
    """Ranks of tensor parallelism hold whole experts, each some of them, in place of a part of each."""
    distributed_executor_backend: str | None = None
    """Name of an executor that a plugin offers; when unset, the best that is offered for one device or for several."""
    device: str | None = None
    """Device type (cpu, cuda, or a plugin's); the best platform that is present when unset."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use at least 1.")

    @property
    def num_ranks(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

"""How a model is spread over devices and processes."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

_SIZES = ("tensor_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the parallel groups."""

    tensor_parallel_size: int = 1
    """Devices that share every layer: each holds a part of its heads and columns."""
    decode_context_parallel_size: int = 1
    """Ranks of tensor parallelism with the same KV heads that share their cache: each keeps some of the tokens."""
    pipeline_parallel_size: int = 1
    """Devices that follow each other, each with some of the layers and with another step at work."""
    pipeline_layer_partition: list[int] | None = None
    """How many layers each of them has; as equal as can be when unset."""
    data_parallel_size: int = 1
    """Engines with a whole copy of the model each, which requests are dealt out to."""
    data_parallel_size_local: int | None = None
    """Engines of this node, on its first devices; all of them when unset."""
    data_parallel_start_rank: int = 0
    """Number of this node's first engine. Its server deals requests out to its own engines alone, unless an address is set."""
    data_parallel_address: str | None = None
    """Address of the server's host, for engines on several hosts: the server serves those of headless nodes too."""
    data_parallel_rpc_port: int = 29550
    """The server waits for engine r of another host at this port + r."""
    data_parallel_key_file: str | None = None
    """File with a secret that all hosts share, at least 32 random bytes: who does not have it is refused."""
    data_parallel_rank: int = 0
    """Number of one engine; its client sets it."""
    data_parallel_store: str | None = None
    """Folder where the ranks of engines that share their experts meet; their client sets it."""
    data_parallel_routing: str = "load"
    """How an engine is picked for each request: load, prefix, or a plugin's name."""
    enable_elastic_ep: bool = False
    """Let the number of engines be changed while they serve: /scale_elastic_ep, `AsyncLLM.scale_elastic_ep`."""
    enable_expert_parallel: bool = False
    """Ranks hold whole experts, each some of them, in place of a part of each; those of several engines share them."""
    distributed_executor_backend: str | None = None
    """Name of an executor that a plugin offers; when unset, the best that is offered for one device or for several."""
    device: str | None = None
    """Device type (cpu, cuda, or a plugin's); the best platform that is present when unset."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use at least 1.")
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size is {self.decode_context_parallel_size}, which does not divide tensor_parallel_size "
                f"{self.tensor_parallel_size}. Use a size that divides it."
            )
        if not 1 <= self.data_parallel_rpc_port <= 65535 - self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_rpc_port is {self.data_parallel_rpc_port}; use a port from 1 on, such as 29550."
            )
        own, size = self.engine_indexes, self.data_parallel_size
        if not 0 <= own.start < own.stop <= size:
            found = f"data_parallel_start_rank is {own.start} and data_parallel_size_local {own.stop - own.start}"
            raise ConfigError(f"{found}; use engines of 0 to {size - 1}.")

    @property
    def has_several_engines(self) -> bool:
        """Engines are behind one client of all: two or more, or one that others may join."""
        return self.data_parallel_size > 1 or self.enable_elastic_ep

    @property
    def shares_experts(self) -> bool:
        """Several engines have the experts together: they step in lock-step."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def num_ranks(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def telling_rank(self) -> int:
        """The rank whose results of steps count: the first of the last stage."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def served_indexes(self) -> range:
        """Numbers of the engines that this node's server deals requests out to."""
        return self.engine_indexes if self.data_parallel_address is None else range(self.data_parallel_size)

    @property
    def engine_indexes(self) -> range:
        """Numbers of this node's engines."""
        start, count = self.data_parallel_start_rank, self.data_parallel_size_local
        return range(start, start + (self.data_parallel_size if count is None else count))

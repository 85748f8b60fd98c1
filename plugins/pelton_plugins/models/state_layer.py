"""Common parts of layers with states: what they keep of a request has one size, however long it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from pelton.attention.cache_layer import register
from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention
from pelton.errors import ConfigError
from pelton.kv_cache.spec import DTYPE_BYTES, KVCacheSpec, MambaSpec

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig

State = tuple[tuple[int, ...], str]
"""A state's shape, and the name of its dtype."""


class StateLayer(nn.Module):
    """A `CacheLayer` with states. A subclass makes its products and parameters, says what it keeps (`keep`), and calls `mix`.

    Its backend's call takes the rows of a product and fills those of the mixture; it heeds which rows begin. What it reads of a layer
    is said beside it (`StateParams` in `pelton_backends.sdpa.state_space` and its like).
    """

    attention_type: ClassVar[str]
    """Of the layer's needs: names what the backend has to compute."""
    state_names: ClassVar[tuple[str, ...]] = ("conv_states", "states")
    conv_states: Tensor
    states: Tensor
    conv_weight: nn.Parameter
    conv_bias: nn.Parameter | None
    backend: AttentionBackend
    attend: BoundAttention

    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        _check_settings(config)
        self.layer_name = prefix
        self.shares: str | None = None
        self._config = config

    def parameter(
        self, name: str, *shape: int, kept: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> nn.Parameter:
        """A tensor of the checkpoint below the layer's prefix. kept: its shape there; dtype: the model's when None."""
        made = nn.Parameter(self._config.empty(*shape, dtype=dtype), requires_grad=False)
        kept = kept or shape
        self._config.weights.expect(f"{self.layer_name}.{name}", kept, made.view(kept))
        return made

    def make_convolution(self, width: int, taps: int, *, has_bias: bool, name: str = "conv1d") -> None:
        self.conv_weight = self.parameter(f"{name}.weight", width, taps, kept=(width, 1, taps))
        self.conv_bias = self.parameter(f"{name}.bias", width) if has_bias else None

    def make_convolutions(self, widths: Mapping[str, int], taps: int) -> None:
        """One convolution of those that a checkpoint has a tensor each of, by name, in the order of a token's numbers."""
        weight = self._config.empty(sum(widths.values()), taps)
        for (name, width), part in zip(widths.items(), weight.split(list(widths.values())), strict=True):
            shape = (width, 1, taps)
            self._config.weights.expect(f"{self.layer_name}.{name}.weight", shape, part.view(shape))
        self.conv_weight, self.conv_bias = nn.Parameter(weight, requires_grad=False), None

    def conv_state(self) -> State:
        """Return the state of its convolution: the last inputs."""
        width, taps = self.conv_weight.shape
        return (width, taps - 1), self._config.dtype_name

    def keep(self, *states: State, num_heads: int, num_groups: int, head_dim: int) -> None:
        """States by `state_names`. The rest is for the layer's needs. Enters the layer; call it last."""
        config, self._states = self._config, states
        self._block_size = config.max_model_len
        del self._config
        self.needs = AttentionNeeds(
            head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_groups, block_size=config.block_size,
            dtype=config.dtype_name, attention_type=self.attention_type,
        )  # fmt: skip
        self.selection = config.attention.select(self.needs)
        register(self, config)

    def cache_spec(self) -> KVCacheSpec:
        """One page for a request, however long it is."""
        size = sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in self._states)
        return MambaSpec(block_size=self._block_size, state_bytes=size, states=self._states)

    def bind_cache(self, views: tuple[Tensor, ...], metadata_index: int, backend: AttentionBackend) -> None:
        for name, view in zip(self.state_names, views, strict=True):
            setattr(self, name, view)
        self.metadata_index, self.backend = metadata_index, backend
        self.attend = backend.bind(self)

    def mix(self, product: Tensor, width: int, batch: ForwardBatch) -> Tensor:
        """[T, ...] -> [T, width]; zeros where there are no states yet."""
        mixed = product.new_zeros(len(product), width)
        if batch.cut is not None:
            batch.cut(self, product, mixed)
        elif batch.attention:  # without: the pass that measures memory, before there are states
            self.attend(product, batch.attention[self.metadata_index], mixed)
        return mixed


def _check_settings(config: BuildConfig) -> None:
    """Refuse what states do not go with."""
    if config.parallel.size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.parallel.size}, and layers with states run on one rank. Set it to 1."
        )
    settings = config.engine_config
    if settings is not None and (settings.speculative.method or settings.speculative.model):
        raise ConfigError(
            "speculative_config is set, and a state cannot leave a rejected draft out again. Leave it out for this model."
        )


def check_groups(num_heads: int, num_groups: int) -> None:
    if num_heads % num_groups:
        raise ConfigError(
            f"config.json has {num_heads} heads in {num_groups} groups, which do not divide them. Fix it."
        )

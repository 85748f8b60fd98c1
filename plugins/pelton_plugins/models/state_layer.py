"""Common parts of layers with states: what they keep of a request has one size, however long it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from pelton.attention.cache_layer import register
from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention
from pelton.errors import ConfigError
from pelton.kv_cache.spec import DTYPE_BYTES, KVCacheSpec, MambaSpec
from pelton.quantization.plain import make_bias
from pelton_plugins.models.shares import Share, shards_of

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
        self,
        name: str,
        *shape: int | Share,
        kept: tuple[int | Share, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """A tensor of the checkpoint below the layer's prefix, of which this rank has its share along one axis. kept: its shape there;
        dtype: the model's when None."""
        own = [_share(size).count for size in shape]
        made = nn.Parameter(self._config.empty(*own, dtype=dtype), requires_grad=False)
        sizes = [_share(size) for size in kept or shape]
        dim, part = next(
            ((dim, size) for dim, size in enumerate(sizes) if size.count < size.total), (None, Share.whole(0))
        )
        self._config.weights.expect(
            f"{self.layer_name}.{name}", tuple(size.total for size in sizes), made.view([size.count for size in sizes]),
            dim=dim, start=part.start, stop=part.stop,
        )  # fmt: skip
        return made

    def make_convolution(self, tensors: Mapping[str, Sequence[Share]], taps: int, *, has_bias: bool = False) -> None:
        """tensors: the checkpoint's, in the order of a token's numbers, and of the channels that lie below each other there this rank's."""
        shards = [
            shard for name, parts in tensors.items() for shard in shards_of(f"{self.layer_name}.{name}", parts, taps)
        ]
        counts = [shard.rows[1] - shard.rows[0] for shard in shards]
        weight = self._config.empty(sum(counts), taps)
        for shard, own in zip(shards, weight.split(counts), strict=True):
            start, stop = shard.rows
            self._config.weights.expect(
                f"{shard.name}.weight", (shard.num_rows, 1, taps), own[:, None], dim=0, start=start, stop=stop
            )
        self.conv_weight = nn.Parameter(weight, requires_grad=False)
        self.conv_bias = make_bias(self._config, shards) if has_bias else None

    def conv_state(self) -> State:
        """Return the state of its convolution: the last inputs."""
        width, taps = self.conv_weight.shape
        return (width, taps - 1), self._config.dtype_name

    def keep(self, *states: State, num_heads: int, num_groups: int, head_dim: int) -> None:
        """States by `state_names`. The rest is for the layer's needs. Enters the layer; call it last."""
        config, self._states = self._config, states
        self._block_size = config.block_size
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


class GroupRMS:
    """x / rms(x) of each group of numbers, without a weight. Ranks that have parts of a group add up their squares, four bytes of each
    group for a token."""

    def __init__(self, groups: Share, width: int, eps: float, config: BuildConfig) -> None:
        """width: numbers of a group, of all ranks."""
        self._groups, self._width, self._eps = groups, width, eps
        is_split = groups.total % config.parallel.size > 0
        self._all_reduce = config.all_reduce(groups.total, "float32") if is_split else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, numbers of this rank] float32 -> the same"""
        grouped, own = x.view(len(x), self._groups.count, -1), slice(self._groups.start, self._groups.stop)
        squares = grouped.square().sum(-1)
        if self._all_reduce is not None:
            of_all = squares.new_zeros(len(x), self._groups.total)
            of_all[:, own] = squares
            squares = self._all_reduce(of_all)[:, own]
        return (grouped * torch.rsqrt(squares / self._width + self._eps)[..., None]).view(len(x), -1)


def _share(size: int | Share) -> Share:
    return size if isinstance(size, Share) else Share.whole(size)


def _check_settings(config: BuildConfig) -> None:
    """Refuse what states do not go with."""
    if config.parallel.context is not None:
        raise ConfigError(
            f"decode_context_parallel_size is {config.parallel.context.size}, and a state has no tokens that ranks could share out. Set it "
            "to 1 for this model."
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

"""`BuildConfig`: the one object from which layers take every choice when they are made.

Dtype, device, ranks, quantization, ops, attention backends and config.json's fields; layers leave in it where
their weights come from, and their attention. One per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pelton.attention.selector import AttentionSelector
from pelton.config import EngineConfig
from pelton.config.plugin_settings import S, read_settings
from pelton.errors import ConfigError, PluginError
from pelton.model.pooling import PoolingSpec
from pelton.model.weights import WeightMap
from pelton.ops.interface import AllReduce, AllReduceNeeds, AllReduceTensors, LinearWeights
from pelton.ops.selector import OpSelector
from pelton.parallel.context import ParallelContext
from pelton.plugins import FIX_IT, make
from pelton.quantization.interface import QuantizationMethod
from pelton.quantization.plain import PlainWeights

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.cache_layer import CacheLayer
    from pelton.attention.encoder import CachelessLayer
    from pelton.layers.norm import RMSNorm
    from pelton.layers.rope import Rope, RopeParameters
    from pelton.lora.layers import AdapterLayer, AdapterLayers, BaseProduct
    from pelton.model.resolved import ResolvedModel
    from pelton.plugins import Plugins
    from pelton.quantization.interface import LinearShard


class MissingFieldError(ConfigError, AttributeError):
    """config.json lacks a field that the model needs; an `AttributeError` too, so that `getattr(hf, x, None)` works."""


class HFConfig:
    """config.json's fields as attributes. A missing one is an error that names it; `get` takes a default."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._fields[name]
        except KeyError:
            raise MissingFieldError(
                f"config.json has no field {name!r}, which this model needs. Add it, or set it with hf_overrides."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` when it is missing or null."""
        value = self._fields.get(name)
        return default if value is None else value


@dataclass(slots=True, kw_only=True)
class BuildConfig:
    """Given to every layer as `config`."""

    hf: HFConfig
    """Of the text model."""
    dtype: torch.dtype
    device: torch.device
    device_type: str | None = None  # whose kernels run, where `device` may be torch's meta device
    max_model_len: int
    ops: OpSelector
    attention: AttentionSelector
    block_size: int = 16
    kv_dtype: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    parallel: ParallelContext = field(default_factory=ParallelContext)
    quantization: QuantizationMethod = field(default_factory=PlainWeights)
    raw_hf: HFConfig = field(default_factory=lambda: HFConfig({}))
    """config.json as it is, with what `hf` leaves out: `vision_config` and the like."""
    pooling: PoolingSpec | None = None
    """Set where the model is run to pool: then it has no output head."""
    engine_config: EngineConfig | None = None
    """All settings; None in tests of layers alone."""
    adapters: AdapterLayers | None = None
    """Where layers register that take LoRA adapters; None without `enable_lora`."""
    allocate: Callable[[Sequence[int], torch.dtype], Tensor] | None = None
    """The platform's memory for parameters and caches, zeroed; torch's own when None."""
    runs_in_stages: bool = False
    """Set by a model that heeds `parallel.stages`: others are refused there."""
    # Left by layers.
    weights: WeightMap = field(default_factory=WeightMap)
    cache_layers: dict[str, CacheLayer] = field(default_factory=dict)
    cacheless_layers: dict[str, CachelessLayer] = field(default_factory=dict)
    ropes: dict[RopeParameters, Rope] = field(default_factory=dict)

    @property
    def attention_layers(self) -> dict[str, Any]:
        """The old name of `cache_layers`."""
        return self.cache_layers

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_whole_experts(self) -> bool:
        """Expert parallelism: each rank holds some experts, all of each."""
        return self.parallel.experts is not None or (
            self.parallel.size > 1
            and self.engine_config is not None
            and self.engine_config.parallel.enable_expert_parallel
        )

    def plugin_settings(self, name: str, struct: type[S]) -> S:
        """The settings of a plugin, for its own layers: see `pelton.config.plugin_settings`."""
        return read_settings(self.engine_config or EngineConfig(), name, struct)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a parameter; in the model's dtype when none is given."""
        dtype = dtype or self.dtype
        if self.allocate is not None:
            return self.allocate(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def create_weights(
        self, shards: Sequence[LinearShard], *, bias: bool = False, is_vocabulary: bool = False
    ) -> LinearWeights:
        """Allocate a matrix's tensors as the quantization method has them: see `QuantizationMethod.create`."""
        method = self.quantization
        made = method.create(self, shards, bias=bias, is_vocabulary=is_vocabulary)
        if not isinstance(made, LinearWeights):
            place = f"{type(method).__module__}:{type(method).__qualname__}.create"
            raise PluginError(
                f"Quantization method {method.name!r} ({place}) gives {made!r} for {shards[0].name}; it has to give LinearWeights. "
                f"{FIX_IT}"
            )
        return made

    def adapter_layer(
        self,
        shards: Sequence[LinearShard],
        *,
        norm: RMSNorm | None = None,
        activation: str | None = None,
        base: BaseProduct | None = None,
    ) -> AdapterLayer | None:
        """Register the product of these matrices: see `AdapterLayers.add`. None without adapters."""
        if self.adapters is None:
            return None
        return self.adapters.add(self, shards, norm=norm, activation=activation, base=base)

    def all_reduce(self, hidden_size: int, dtype: str | None = None) -> AllReduce | None:
        """Sums partial results over ranks, in the model's dtype when None is given; None with one rank."""
        if self.parallel.size == 1:
            return None
        needs = AllReduceNeeds(dtype=dtype or self.dtype_name, hidden_size=hidden_size, tp_size=self.parallel.size)
        bound: AllReduce = self.ops.bind("all_reduce", needs, AllReduceTensors(self.parallel))
        return bound


def make_build_config(
    config: EngineConfig,
    model: ResolvedModel,
    plugins: Plugins,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    device_type: str | None = None,
    capability: tuple[int, int] | None = None,
    parallel: ParallelContext | None = None,
) -> BuildConfig:
    """From settings and what was resolved. device_type: what plugins offer ops and backends for, the platform's own word
    (`Platform.device_type`); torch's name of the device when None."""
    device_type = device_type or device.type
    return BuildConfig(
        hf=HFConfig(model.hf_config),
        raw_hf=HFConfig(model.raw_config),
        engine_config=config,
        pooling=model.pooling,
        dtype=getattr(torch, model.dtype),
        device=device,
        device_type=device_type,
        max_model_len=model.max_model_len,
        ops=OpSelector(
            plugins.entries("pelton_ops", device_type=device_type), plugins.entries("pelton_fused_ops"), config
        ),
        attention=AttentionSelector(
            plugins.entries("pelton_attention_backends", device_type=device_type), named=config.attention.backend,
            named_prefill=config.attention.prefill_backend, named_decode=config.attention.decode_backend,
            capability=capability, config=config,
        ),
        block_size=config.kv_cache.block_size,
        kv_dtype=config.kv_cache.kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        parallel=parallel or ParallelContext(),
        quantization=_quantization(config, model, plugins),
    )  # fmt: skip


def _quantization(config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> QuantizationMethod:
    """The method of the settings, or of config.json; plain weights when neither names one."""
    named, own = config.model.quantization, (model.hf_config.get("quantization_config") or {}).get("quant_method")
    if named is not None and own not in (None, named):
        raise ConfigError(
            f"quantization is {named!r}, and the checkpoint is quantized by {own!r} (config.json's quantization_config). "
            "Leave quantization unset, or take the checkpoint that is not quantized."
        )
    if (name := named or own) is None:
        return PlainWeights()
    known = {} if named else {"advice": "Take a checkpoint of one of these methods, or one that is not quantized."}
    setting = "quantization" if named else "quantization (config.json's quant_method)"
    entry = plugins.find("pelton_quantization_methods", name, setting=setting, **known)
    return make(entry, QuantizationMethod, config, model)  # type: ignore[type-abstract]

"""Paged attention and fused ops in C, for CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pelton.entries import BackendEntry, OpEntry, SettingsEntry
from pelton.hookspecs import hookimpl

if TYPE_CHECKING:
    from pelton.config import EngineConfig

PELTON_API = ">=1,<2"

_ENTRIES = (
    ("embed", "embed:NativeEmbed"),
    ("prepare_inputs", "step:NativePrepareInputs"),
    ("sample", "sampling:NativeSample"),
    ("logprobs", "sampling:NativeLogprobs"),
    ("qk_norm_rope_write_kv", "rope:NativeQkNormRopeWriteKv"),
    ("add_norm_linear", "linear:NativeAddNormLinear"),
    ("linear", "linear:NativeLinear"),
    ("add_norm", "layer_norm:NativeAddNorm"),
    ("add_norm_gated_linear", "linear:NativeAddNormLinear"),
    ("add_norm_logits", "linear:NativeAddNormLogits"),
    ("moe", "moe:NativeMoe"),
    ("lora", "lora:NativeLora"),
    ("lora_add_norm_gated_linear", "lora:NativeLoraAddNormGatedLinear"),
)
_PACKED_ENTRIES = (
    ("embed", "quant:QuantEmbedding"),
    ("add_norm_linear", "quant:QuantAddNormLinear"),
    ("linear", "quant:QuantLinear"),
    ("add_norm_gated_linear", "quant:QuantAddNormLinear"),
    ("add_norm_logits", "quant:QuantAddNormLogits"),
)


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [
        SettingsEntry(name="native", load="pelton_backends.native.config:NativeConfig", doc="kernels in C for CPUs")
    ]


@hookimpl
def pelton_worker_settings(config: EngineConfig, device_type: str) -> Mapping[str, str]:
    if device_type != "cpu":
        return {}
    from pelton_backends.native.settings import take_settings

    return take_settings(config)


@hookimpl
def pelton_attention_backends(device_type: str) -> Sequence[BackendEntry]:
    if device_type != "cpu":
        return []
    return [
        BackendEntry(
            name="native",
            load="pelton_backends.native.backend:NativeBackend",
            priority=50,
            device_types=("cpu",),
            aliases=("CPU_ATTN",),
            doc="paged prefill and decode in C, compiled at the first start",
        ),
        BackendEntry(
            name="native_encoder",
            load="pelton_backends.native.encoder:NativeEncoderBackend",
            priority=50,
            device_types=("cpu",),
            doc="encoders in C, without windows",
        ),
    ]


@hookimpl
def pelton_ops(device_type: str) -> Sequence[OpEntry]:
    if device_type != "cpu":
        return []
    return [
        OpEntry(
            name=f"{name}.{op}",
            op=op,
            load=f"pelton_backends.native.{target}",
            priority=50,
            device_types=("cpu",),
        )
        for name, entries in (("native", _ENTRIES), ("native_packed", _PACKED_ENTRIES))
        for op, target in entries
    ]

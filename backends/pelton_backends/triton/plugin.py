"""Paged attention and fused ops in Triton, for NVIDIA's GPUs; for AMD's those whose sources have nothing of one vendor."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import BackendEntry, OpEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"

_OPS = "pelton_backends.triton.ops"

# op, name, priority, what to load. Priorities order the implementations of one op by the batch sizes they serve; what serves a weight
# format alone comes behind those of plain weights, which then do not import it.
_ENTRIES = (
    ("embed", "triton", 50, "embed:TritonEmbed"),
    ("add_norm", "triton", 50, "linear.large_batch:TritonAddNorm"),
    ("gated", "triton", 50, "linear.large_batch:TritonGated"),
    ("add_norm_linear", "triton_gemv", 60, "linear.gemv:GemvAddNormLinear"),
    ("add_norm_linear", "triton_small_batch", 55, "linear.small_batch:SmallBatchAddNormLinear"),
    ("add_norm_linear", "triton_cublas", 50, "linear.large_batch:LargeBatchAddNormLinear"),
    ("linear", "triton_gemv", 60, "linear.gemv:GemvLinear"),
    ("linear", "triton_small_batch", 55, "linear.small_batch:SmallBatchLinear"),
    ("linear", "triton_cublas", 50, "linear.large_batch:LargeBatchLinear"),
    ("add_norm_gated_linear", "triton_gemv", 60, "linear.gemv:GemvAddNormGatedLinear"),
    ("add_norm_gated_linear", "triton_small_batch", 55, "linear.small_batch:SmallBatchAddNormGatedLinear"),
    ("add_norm_gated_linear", "triton_cublas", 50, "linear.large_batch:LargeBatchAddNormGatedLinear"),
    ("linear", "triton_fp8", 50, "linear.fp8:Fp8Linear"),
    ("add_norm_linear", "triton_fp8", 50, "linear.fp8:Fp8AddNormLinear"),
    ("add_norm_gated_linear", "triton_fp8", 50, "linear.fp8:Fp8AddNormGatedLinear"),
    ("linear", "triton_fp8_blocks", 50, "linear.fp8_blocks:Fp8BlocksLinear"),
    ("add_norm_linear", "triton_fp8_blocks", 50, "linear.fp8_blocks:Fp8BlocksAddNormLinear"),
    ("add_norm_gated_linear", "triton_fp8_blocks", 50, "linear.fp8_blocks:Fp8BlocksAddNormLinear"),
    ("linear", "triton_grouped", 50, "linear.grouped:GroupedLinear"),
    ("add_norm_linear", "triton_grouped", 50, "linear.grouped:GroupedAddNormLinear"),
    ("add_norm_gated_linear", "triton_grouped", 50, "linear.grouped:GroupedAddNormGatedLinear"),
    ("linear", "triton_coded", 45, "linear.coded:CodedLinear"),
    ("add_norm_logits", "triton", 50, "logits:TritonAddNormLogits"),
    ("add_norm_logits", "triton_grouped", 50, "linear.grouped_vocab:GroupedAddNormLogits"),
    ("embed", "triton_grouped", 50, "linear.grouped_vocab:GroupedEmbed"),
    ("qk_norm_rope_write_kv", "triton", 50, "qk_rope:TritonQkNormRopeWriteKv"),
    ("sample", "triton", 50, "sampling.sample:TritonSample"),
    ("logprobs", "triton", 50, "sampling.logprobs:TritonLogprobs"),
    ("prepare_inputs", "triton", 50, "inputs:TritonPrepareInputs"),
    ("moe", "triton", 50, "moe.experts:TritonMoe"),
    ("add_norm_moe", "triton_few", 60, "moe.normed:FewAddNormMoe"),
    ("lookup_drafts", "triton", 50, "sampling.speculation:TritonLookupDrafts"),
    ("verify", "triton", 50, "sampling.speculation:TritonVerify"),
    ("lora", "triton", 50, "lora.linear:TritonLora"),
    ("lora_linear", "triton_gemv", 60, "lora.gemv:LoraGemvLinear"),
    ("lora_linear", "triton_hopper", 55, "lora.hopper:LoraHopperLinear"),
    ("lora_linear", "triton_many", 50, "lora.hopper_many:LoraManyLinear"),
    ("lora_add_norm_linear", "triton_gemv", 60, "lora.gemv:LoraGemvAddNormLinear"),
    ("lora_add_norm_linear", "triton_hopper", 55, "lora.hopper:LoraHopperAddNormLinear"),
    ("lora_add_norm_linear", "triton_many", 50, "lora.hopper_many:LoraManyAddNormLinear"),
    ("lora_add_norm_gated_linear", "triton_gemv", 60, "lora.gemv:LoraGemvAddNormLinear"),
    ("lora_add_norm_gated_linear", "triton_hopper", 55, "lora.hopper:LoraHopperAddNormLinear"),
    ("lora_add_norm_gated_linear", "triton_many", 50, "lora.hopper_many:LoraManyAddNormLinear"),
)
_STATES = (
    ("triton_state", "TritonStateSpaceBackend", "states of Mamba-2's layers"),
    ("triton_delta_rule", "TritonDeltaRuleBackend", "states of layers with the gated delta rule"),
    ("triton_key_delta_rule", "TritonKeyDeltaRuleBackend", "states of layers whose keys' numbers each have a decay"),
    ("triton_selective_scan", "TritonSelectiveScanBackend", "states of Mamba's layers"),
    ("triton_lightning", "TritonLightningBackend", "states of layers with lightning attention"),
    ("triton_rg_lru", "TritonRgLruBackend", "states of real-gated linear recurrent units"),
    ("triton_short_conv", "TritonShortConvBackend", "short convolutions between gates"),
)
"""Layers with states: name, class, what it computes."""
DEVICE_TYPES = ("cuda", "rocm")
_NVIDIA_ONLY = ("sample", "logprobs", "verify")
"""Ops whose launches bound the registers of a thread, which AMD's compiler does not take."""


@hookimpl
def pelton_attention_backends(device_type: str) -> Sequence[BackendEntry]:
    if device_type not in DEVICE_TYPES:
        return []
    return [
        BackendEntry(
            name="triton",
            load="pelton_backends.triton.backend:TritonBackend",
            priority=50,
            device_types=(device_type,),
            aliases=("TRITON_ATTN",),
            doc="paged prefill and split-KV decode kernels",
        ),
        BackendEntry(
            name="triton_mla",
            load="pelton_backends.triton.mla:TritonMLABackend",
            priority=50,
            device_types=(device_type,),
            aliases=("TRITON_MLA",),
            doc="attention over latents (MLA)",
        ),
        BackendEntry(
            name="triton_sparse",
            load="pelton_backends.triton.sparse:TritonSparseBackend",
            priority=50,
            device_types=(device_type,),
            doc="attention over latents that an indexer chooses, and its choice",
        ),
        *(
            BackendEntry(
                name=name,
                load=f"pelton_backends.triton.states.backend:{load}",
                priority=50,
                device_types=(device_type,),
                doc=doc,
            )
            for name, load, doc in _STATES
        ),
    ]


@hookimpl
def pelton_ops(device_type: str) -> Sequence[OpEntry]:
    if device_type not in DEVICE_TYPES:
        return []
    return [
        OpEntry(name=f"{name}.{op}", op=op, load=f"{_OPS}.{target}", priority=priority, device_types=(device_type,))
        for op, name, priority, target in _ENTRIES
        if device_type == "cuda"
        or (op not in _NVIDIA_ONLY and not name.startswith("triton_fp8"))  # AMD's e4m3 has other numbers
    ]

"""Hook functions of the quantization methods, and of the ops that read their weights on every device."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, OpEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"

_PACKAGE = "pelton_plugins.quantization"


@hookimpl
def pelton_quantization_methods() -> Sequence[Entry]:
    return [
        Entry(name="q8_0", load=f"{_PACKAGE}.at_load:Q8Weights", priority=10,
              doc="int8 in blocks of 32, quantized while it loads"),
        Entry(name="q4_0", load=f"{_PACKAGE}.at_load:Q40Weights", priority=10, doc="4 bits in blocks of 32, vocabulary in q8_0"),
        Entry(name="q4_1", load=f"{_PACKAGE}.at_load:Q41Weights", priority=10, doc="as q4_0, with a minimum for each block"),
        Entry(name="fp8", load=f"{_PACKAGE}.fp8:make_fp8",
              doc="e4m3 weights and inputs, rounded while they load, or of a checkpoint that says 'fp8'"),
        Entry(name="compressed-tensors", load=f"{_PACKAGE}.compressed_tensors:CompressedTensors",
              doc="compressed-tensors checkpoints: 8-bit floating point, packed integers of 4 or 8 bits, int8; NVFP4 and MXFP4, decoded"),
        Entry(name="awq", load=f"{_PACKAGE}.awq:make_awq", doc="AWQ's checkpoints: 4 bits in groups with zero points"),
        Entry(name="gptq", load=f"{_PACKAGE}.gptq:make_gptq", doc="GPTQ's checkpoints: 4 or 8 bits in groups, in any order of columns"),
        Entry(name="auto-round", load=f"{_PACKAGE}.auto_round:make_auto_round", aliases=("intel/auto-round",),
              doc="AutoRound's checkpoints in GPTQ's or AWQ's layout"),
        Entry(name="modelopt", load=f"{_PACKAGE}.modelopt:make_modelopt",
              doc="ModelOpt's checkpoints: 8-bit floating point, and NVFP4, decoded while it loads"),
        Entry(name="quark", load=f"{_PACKAGE}.quark:QuarkFp8", doc="Quark's checkpoints in 8-bit floating point"),
        Entry(name="bitsandbytes", load=f"{_PACKAGE}.bitsandbytes:make_bitsandbytes",
              doc="bitsandbytes' checkpoints: int8, nf4 and fp4 as they are; the latter two are decoded while they load on CPUs"),
        Entry(name="mxfp4", load=f"{_PACKAGE}.mxfp4:Mxfp4Weights", 
              doc="gpt-oss checkpoints: experts in four bits"),
        Entry(name="fbgemm_fp8", load=f"{_PACKAGE}.fbgemm:FBGEMMWeights", doc="FBGEMM's checkpoints: a scale for each row"),
    ]  # fmt: skip


@hookimpl
def pelton_ops() -> Sequence[OpEntry]:
    return [
        OpEntry(name="reference.fp8_linear", op="linear", load=f"{_PACKAGE}.reference:Fp8LinearReference", priority=10,
                doc="plain torch, for e4m3 weights"),
        OpEntry(name="reference.fp8_blocks_linear", op="linear", load=f"{_PACKAGE}.reference:Fp8BlocksReference", priority=10,
                doc="plain torch, for e4m3 weights whose blocks have scales"),
        OpEntry(name="reference.grouped_linear", op="linear", load="pelton_plugins.weight_forms.groups:GroupedLinearReference", priority=10,
                doc="plain torch, for integer weights in groups"),
        OpEntry(name="reference.grouped_embed", op="embed", load="pelton_plugins.weight_forms.groups:GroupedEmbedReference", priority=10,
                doc="plain torch, for rows of integer weights in groups"),
        OpEntry(name="ordered_linear", op="linear", load=f"{_PACKAGE}.grouped:OrderedLinear", priority=20,
                doc="another op for the product, behind a new order of the inputs' columns"),
    ]  # fmt: skip

"""The torch references of core's fused ops, on every device."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import OpEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"

_ENTRIES = (
    ("embed", "ops:ReferenceEmbed"),
    ("add_norm", "ops:ReferenceAddNorm"),
    ("linear", "ops:ReferenceLinear"),
    ("gated", "ops:ReferenceGated"),
    ("add_norm_linear", "ops:ReferenceAddNormLinear"),
    ("add_norm_gated_linear", "ops:ReferenceAddNormGatedLinear"),
    ("add_norm_logits", "ops:ReferenceAddNormLogits"),
    ("qk_norm_rope_write_kv", "ops:ReferenceQkNormRopeWriteKv"),
    ("all_reduce", "ops:ReferenceAllReduce"),
    ("lookup_drafts", "speculation:ReferenceLookupDrafts"),
    ("verify", "speculation:ReferenceVerify"),
    ("moe", "moe:ReferenceMoe"),
    ("add_norm_moe", "composed_moe:ComposedAddNormMoe"),
    ("lora", "lora:ReferenceLora"),
    ("lora_linear", "composed_lora:ComposedLinear"),
    ("lora_add_norm_linear", "composed_lora:ComposedAddNormLinear"),
    ("lora_add_norm_gated_linear", "composed_lora:ComposedAddNormGatedLinear"),
)


@hookimpl
def pelton_ops() -> Sequence[OpEntry]:
    exchanged = OpEntry(
        name="exchanged.moe", op="moe", load="pelton_backends.reference.exchanged_moe:ExchangedMoe", priority=10,
        doc="experts that several engines share, around the op of one",
    )  # fmt: skip
    references = [
        OpEntry(
            name=f"reference.{op}", op=op, load=f"pelton_backends.reference.{target}", priority=10, doc="plain torch"
        )
        for op, target in _ENTRIES
    ]
    return [*references, exchanged]

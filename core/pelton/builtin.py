"""Core's own plugin: the fused ops that layers beside the dense ones use. Their implementations are plugins like any other's."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_fused_ops() -> Sequence[Entry]:
    adapters = (
        ("lora", "adapters behind a product"),
        ("lora_linear", "a product with adapters"),
        ("lora_add_norm_linear", "the same with the norm before it"),
        ("lora_add_norm_gated_linear", "the same of gate and up, with their activation"),
    )
    return [
        Entry(name="moe", load="pelton.ops.moe:MOE", priority=10, doc="a layer of experts"),
        Entry(
            name="add_norm_moe", load="pelton.ops.moe:ADD_NORM_MOE", priority=10, doc="the same with the norm before it"
        ),
        *(Entry(name=name, load=f"pelton.lora.op:{name.upper()}", priority=10, doc=doc) for name, doc in adapters),
    ]

"""Core's own plugin: the torch references of its ops, registered like any other's."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, OpEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_fused_ops() -> Sequence[Entry]:
    return [
        Entry(name="moe", load="pelton.ops.moe:MOE", priority=10, doc="a layer of experts"),
        *_adapter_ops(),
    ]


def _adapter_ops() -> list[Entry]:
    return [
        Entry(name=name, load=f"pelton.lora.op:{name.upper()}", priority=10, doc=doc)
        for name, doc in (
            ("lora", "adapters behind a product"),
            ("lora_linear", "a product with adapters"),
            ("lora_add_norm_linear", "the same with the norm before it"),
            ("lora_add_norm_gated_linear", "the same of gate and up, with their activation"),
        )
    ]


@hookimpl
def pelton_ops() -> Sequence[OpEntry]:
    """The torch references, on every device."""
    from pelton.ops.interface import FUSED_OPS

    return [
        OpEntry(name=f"reference.{op.name}", op=op.name, load=op.reference, priority=10, doc="plain torch")
        for op in FUSED_OPS.values()
        if op.reference is not None
    ]

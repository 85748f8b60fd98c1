"""Core's own plugin: the torch references of its ops, registered like any other's."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, OpEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_fused_ops() -> Sequence[Entry]:
    return [Entry(name="lora", load="pelton.lora.op:LORA", priority=10, doc="adapters behind a product")]


@hookimpl
def pelton_ops() -> Sequence[OpEntry]:
    """The torch references, on every device."""
    from pelton.ops.interface import FUSED_OPS

    return [
        OpEntry(name=f"reference.{op.name}", op=op.name, load=op.reference, priority=10, doc="plain torch")
        for op in FUSED_OPS.values()
        if op.reference is not None
    ]

"""Core's own plugin: the plain implementations that the engine cannot run without, registered like any other."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, OpEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_executors() -> Sequence[Entry]:
    return [Entry(name="in_process", load="pelton.executor.in_process:InProcessExecutor", priority=10,
                  doc="one worker on a thread of the engine's process")]  # fmt: skip


@hookimpl
def pelton_schedulers() -> Sequence[Entry]:
    return [Entry(name="default", load="pelton.scheduler.scheduler:DefaultScheduler", priority=10,
                  doc="continuous batching with chunked prefill")]  # fmt: skip


@hookimpl
def pelton_scheduling_policies() -> Sequence[Entry]:
    return [
        Entry(name="fcfs", load="pelton.scheduler.policy:FCFSPolicy", priority=10, doc="first come, first served"),
        Entry(name="priority", load="pelton.scheduler.policy:PriorityPolicy", priority=10, doc="lower value first"),
    ]


@hookimpl
def pelton_kv_cache_managers() -> Sequence[Entry]:
    return [Entry(name="default", load="pelton.kv_cache.manager:PagedKVCacheManager.make", priority=10,
                  doc="paged blocks with a prefix cache")]  # fmt: skip


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

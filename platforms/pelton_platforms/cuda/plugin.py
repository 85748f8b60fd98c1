"""Hook functions of the CUDA platform."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry, OpEntry, PlatformEntry
from pelton.hookspecs import hookimpl
from pelton_platforms.cuda.driver import why_not_here

PELTON_API = ">=1,<2"


@hookimpl
def pelton_platforms() -> Sequence[PlatformEntry]:
    return [
        PlatformEntry(
            name="cuda",
            load="pelton_platforms.cuda.platform:CUDAPlatform",
            priority=50,
            probe=why_not_here,
            doc="NVIDIA GPUs",
        )
    ]


@hookimpl
def pelton_communicators(device_type: str) -> Sequence[Entry]:
    if device_type != "cuda":
        return []
    return [
        Entry(
            name="peers",
            load="pelton_platforms.gpu.peers.communicator:PeerCommunicator",
            priority=60,
            doc="GPUs of this host through memory that they map from each other, NCCL for large tensors",
        ),
        Entry(
            name="nccl", load="pelton_platforms.gpu.nccl:NcclCommunicator", doc="GPUs of one or several hosts, by NCCL"
        ),
    ]


@hookimpl
def pelton_ops(device_type: str) -> Sequence[OpEntry]:
    if device_type != "cuda":
        return []
    return [
        OpEntry(
            name="peers.all_reduce",
            op="all_reduce",
            load="pelton_platforms.gpu.peers.add_norm:PeerAllReduce",
            priority=60,
            device_types=("cuda",),
        )
    ]

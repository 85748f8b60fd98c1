"""The place where ranks find each other."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

TCP = "tcp://"
dist: Any = torch.distributed  # whose stores are not among its typed names


def meeting(store: str, size: int) -> Any:
    """Open `CommunicatorContext.store`, a `torch.distributed.Store`: a file, or a store of the executor's at tcp://host:port."""
    if not store.startswith(TCP):
        return dist.FileStore(store, size)
    host, _, port = store.removeprefix(TCP).rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)


def all_told(store: Any, rank: int, size: int, name: str, own: bytes) -> list[bytes]:
    """Tell the others `own`, and return what each rank tells, in order of rank."""
    store.set(f"{name} {rank}", own.hex())
    return [bytes.fromhex(store.get(f"{name} {other}").decode()) for other in range(size)]


def this_host(folder: str) -> bytes:
    """Return what ranks that see the same `folder` of one running system have in common."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat(folder).st_dev}".encode()

"""The worker's half of `shared_storage`: pages to files, and files to pages.

A file is safetensors with one uint8 tensor a layer, so nothing in it is ever run. Blocks are copied to the host in the order
of the device's stream, before a later step can change them, and written by a thread beside it; a file appears whole or not
at all.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pelton.kv_transfer.interface import WorkerConnector
from pelton.logging import get_logger
from pelton_plugins.kv_connectors.shared_storage import StepTransfers, block_path

logger = get_logger(__name__)

_MAX_WAITING = 256
"""Steps whose blocks wait to be written; a disk that is slower than that loses some, which is said."""
_LAYOUT = "__layout__"


class StorageWorker(WorkerConnector):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._caches: dict[str, Tensor] = {}
        self._layout = torch.empty(0, dtype=torch.uint8)
        self._transfers = StepTransfers()
        self._invalid: list[int] = []
        self._copied: list[str] = []  # requests that are over, whose blocks may be handed on
        self._to_write: queue.Queue[_Copied | None] = queue.Queue(_MAX_WAITING)
        self._writer: threading.Thread | None = None

    def register_kv_caches(self, caches: dict[str, Tensor], layout: str) -> None:
        self._caches = caches
        self._layout = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)

    def start_load(self, metadata: bytes) -> None:
        self._transfers = msgspec.msgpack.decode(metadata, type=StepTransfers)
        bad = False
        for block_hash, block_id in self._transfers.loads:
            # Behind a block that is missing no other is of use.
            bad = bad or not self._load(block_path(self._folder, block_hash), block_id)
            if bad:
                self._invalid.append(block_id)

    def wait_for_save(self) -> None:
        transfers, self._transfers = self._transfers, StepTransfers()
        self._copied += transfers.leaving
        saves = transfers.saves
        if not saves:
            return
        hashes, ids = [block_hash for block_hash, _ in saves], [block_id for _, block_id in saves]
        copied = _copy(self._caches, ids)
        copied.paths = [block_path(self._folder, block_hash) for block_hash in hashes]
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="pelton-kv-writer", daemon=True)
            self._writer.start()
        try:
            self._to_write.put_nowait(copied)
        except queue.Full:
            logger.warning("%d KV blocks are not saved: writing to %s is too slow.", len(ids), self._folder)

    def take_finished(self) -> tuple[Sequence[str], Sequence[str]]:
        copied, self._copied = self._copied, []
        return copied, ()

    def take_invalid_block_ids(self) -> Sequence[int]:
        invalid, self._invalid = self._invalid, []
        return invalid

    def shutdown(self) -> None:
        """Write what waits to be written."""
        if self._writer is not None:
            self._to_write.put(None)
            self._writer.join()
            self._writer = None

    def _load(self, path: Path, block_id: int) -> bool:
        """Bring a file into its block. False, and a warning, for a file that cannot be used."""
        try:
            found = load_file(path)
            layout = found.pop(_LAYOUT, None)
            if layout is None or not torch.equal(layout, self._layout) or found.keys() != self._caches.keys():
                raise ValueError("it is of another model, device or layout")
            for name, page in self._caches.items():
                if found[name].dtype != torch.uint8 or found[name].shape != page.shape[1:]:
                    raise ValueError(f"the page of {name} is {found[name].dtype} {list(found[name].shape)}")
        except (OSError, SafetensorError, ValueError) as error:
            logger.warning("KV block %s cannot be used and is computed: %s", path, error)
            if isinstance(error, SafetensorError):  # truncated or garbage: in the way of a good one
                with contextlib.suppress(OSError):
                    path.unlink()
            return False
        for name, page in self._caches.items():
            page[block_id].copy_(found[name])
        return True

    def _write_all(self) -> None:
        while (copied := self._to_write.get()) is not None:
            try:
                copied.wait()
                for index, path in enumerate(copied.paths):
                    self._write(path, {name: pages[index] for name, pages in copied.pages.items()})
            except Exception as error:
                logger.warning("KV blocks are not saved in %s: %s", self._folder, error)

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        os.close(handle)
        try:
            save_file({_LAYOUT: self._layout, **{key: value.contiguous() for key, value in tensors.items()}}, name)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


class _Copied:
    """Blocks on the host, once the device has come to the copy."""

    def __init__(self, pages: dict[str, Tensor], event: torch.Event | None) -> None:
        self.pages = pages  # layer name to [blocks, bytes a page]
        self.paths: list[Path] = []
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def _copy(caches: dict[str, Tensor], block_ids: list[int]) -> _Copied:
    """Queue the copy on the current stream, behind the step that filled the blocks."""
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return _Copied({name: page[block_ids] for name, page in caches.items()}, None)
    index = torch.tensor(block_ids).pin_memory().to(device, non_blocking=True)
    pages = {}
    for name, page in caches.items():
        host = torch.empty(len(block_ids), page.shape[1], dtype=torch.uint8, pin_memory=True)
        pages[name] = host.copy_(page.index_select(0, index), non_blocking=True)
    event = torch.Event(device)
    event.record()
    return _Copied(pages, event)

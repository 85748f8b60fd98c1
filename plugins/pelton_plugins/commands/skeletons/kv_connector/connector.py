"""KV blocks of prompts as files of a folder: `{"kv_connector": "skeleton", "kv_connector_extra_config": {"folder": "/data/kv"}}`.

A block's file is called after the chain hash of its tokens, and holds the pages of all layers, one behind the other. Blocks are
saved when their request is over. The half in the scheduler says what is to be done, the half in the worker does it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from pelton.errors import ConfigError
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import BlockIds
from pelton.kv_transfer.interface import ConnectorContext, KVConnector, SchedulerConnector, WorkerConnector
from pelton.messages.request import EngineRequest
from pelton.messages.step import SchedulerOutput
from torch import Tensor, frombuffer, uint8

Block = tuple[str, int]
"""File, block id."""


class StepTransfers(msgspec.Struct, frozen=True):
    """Orders to the workers for one step."""

    loads: list[Block] = []
    saves: list[Block] = []
    leaving: list[str] = []
    """Requests that are over, and whose blocks are free once the saves are copied."""


class SkeletonConnector(KVConnector):
    """Makes both halves, of the same settings."""

    @staticmethod
    def for_scheduler(context: ConnectorContext) -> SchedulerConnector:
        return SkeletonScheduler(context)

    @staticmethod
    def for_worker(context: ConnectorContext) -> WorkerConnector:
        return SkeletonWorker()


def folder_of(context: ConnectorContext) -> Path:
    """A folder for each model: another's blocks are of no use."""
    given = context.config.kv_transfer.kv_connector_extra_config.get("folder")
    if not isinstance(given, str) or len(context.plan.groups) != 1:
        raise ConfigError("kv_connector_extra_config needs a folder, and the model one KV group.")
    model = context.model
    key = repr((model.name, model.dtype, sorted(model.hf_config.items(), key=repr)))
    folder = Path(given) / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class SkeletonScheduler(SchedulerConnector):
    """Looks for files when a request is admitted."""

    def __init__(self, context: ConnectorContext) -> None:
        self.name = context.name
        self._folder = folder_of(context)
        self._size = context.plan.groups[0].spec.block_size
        self._hasher = BlockHasher("sha256", self._size)
        self._files: dict[str, list[str]] = {}  # request id to the files of its blocks
        self._first: dict[str, int] = {}  # blocks that are here already
        self._computed: set[str] = set()
        self._loads: list[Block] = []
        self._saves: list[Block] = []
        self._leaving: list[str] = []

    def num_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Called again after a preemption: what was computed then is gone."""
        self._computed.discard(request.request_id)
        if request.adapter_id or request.placeholders() or num_computed_tokens % self._size:
            return 0, False
        hashes: list[bytes] = []
        self._hasher.extend(hashes, request.prompt_token_ids, cache_salt=request.cache_salt)
        files = [str(self._folder / found.hex()) for found in hashes]
        first, last = num_computed_tokens // self._size, (len(request.prompt_token_ids) - 1) // self._size
        self._files[request.request_id], self._first[request.request_id] = files, first
        missing = (index for index, file in enumerate(files[first:last]) if not os.path.exists(file))
        return next(missing, max(last - first, 0)) * self._size, False

    def after_allocation(self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        first = self._first[request.request_id]
        places = range(first, first + num_external_tokens // self._size)
        self._loads += [(self._files[request.request_id][place], block_ids[0][place]) for place in places]

    def build_metadata(self, output: SchedulerOutput) -> bytes:
        transfers = StepTransfers(self._loads, self._saves, self._leaving)
        self._loads, self._saves, self._leaving = [], [], []
        return msgspec.msgpack.encode(transfers)

    def request_computed(self, request_id: str) -> None:
        """The KV of the prompt is finite; before this call it may be NaN."""
        self._computed.add(request_id)

    def request_finished(self, request_id: str, block_ids: BlockIds) -> bool:
        """True: its blocks stay until the worker has copied them."""
        files = self._files.pop(request_id, [])
        self._first.pop(request_id, None)
        if request_id not in self._computed:
            return False
        self._computed.remove(request_id)
        saves = [pair for pair in zip(files, block_ids[0], strict=False) if pair[1] and not os.path.exists(pair[0])]
        self._saves += saves
        self._leaving += [request_id] if saves else []
        return bool(saves)


class SkeletonWorker(WorkerConnector):
    """Copies pages to files and back. What takes long belongs on a thread of its own."""

    def __init__(self) -> None:
        self._pages: dict[str, Tensor] = {}
        self._layout = b""
        self._transfers = StepTransfers()
        self._copied: list[str] = []
        self._invalid: list[int] = []

    def register_kv_caches(self, caches: dict[str, Tensor], layout: str) -> None:
        self._pages = caches
        self._layout = hashlib.sha256(layout.encode()).digest()  # what these bytes are: checked by who reads them

    def start_load(self, metadata: bytes) -> None:
        self._transfers = msgspec.msgpack.decode(metadata, type=StepTransfers)
        self._invalid += [block for file, block in self._transfers.loads if not self._load(file, block)]

    def _load(self, file: str, block: int) -> bool:
        try:
            content = Path(file).read_bytes()
        except OSError:
            return False
        size = len(self._layout) + sum(pages.shape[1] for pages in self._pages.values())
        if len(content) != size or not content.startswith(self._layout):
            return False
        data = frombuffer(bytearray(content[len(self._layout) :]), dtype=uint8)
        for pages, part in zip(
            self._pages.values(), data.split([pages.shape[1] for pages in self._pages.values()]), strict=True
        ):
            pages[block].copy_(part)
        return True

    def wait_for_save(self) -> None:
        for file, block in self._transfers.saves:
            content = b"".join(pages[block].cpu().numpy().tobytes() for pages in self._pages.values())
            part = Path(f"{file}.{os.getpid()}.part")
            part.write_bytes(self._layout + content)
            part.replace(file)  # whole, or not at all
        self._copied += self._transfers.leaving

    def take_finished(self) -> tuple[Sequence[str], Sequence[str]]:
        copied, self._copied = self._copied, []
        return copied, ()

    def take_invalid_block_ids(self) -> Sequence[int]:
        invalid, self._invalid = self._invalid, []
        return invalid

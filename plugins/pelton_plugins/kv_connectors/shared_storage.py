"""KV blocks of prompts as files in a folder, which several engines may share.

A file holds one block of all layers. Its name is the block's chain hash over tokens, salt and extras, so its content is what
any engine with the same weights would compute. A file that is missing, truncated or not of this model is a miss: its tokens
are computed. This file is the connector's settings and its half in the scheduler; `block_files` has the worker's half.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pelton.errors import ConfigError
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import BlockIds
from pelton.kv_transfer.interface import ConnectorContext, KVConnector, SchedulerConnector, WorkerConnector
from pelton.request import EngineRequest
from pelton.scheduler.output import SchedulerOutput
from pelton_plugins.kv_connectors.fingerprint import model_fingerprint

HASH = "sha256"


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `shared_storage`."""

    shared_storage_path: str
    """Folder of the files; made when it is missing."""


class StepTransfers(msgspec.Struct, frozen=True):
    """What the workers do around one step: (hash, block id) of each block."""

    loads: list[tuple[bytes, int]] = []
    saves: list[tuple[bytes, int]] = []


class SharedStorage(KVConnector):
    @staticmethod
    def for_scheduler(context: ConnectorContext) -> SchedulerConnector:
        role = context.config.kv_transfer.kv_role
        return StorageScheduler(
            context.name, storage_folder(context), block_size(context), loads=role.loads, saves=role.saves
        )

    @staticmethod
    def for_worker(context: ConnectorContext) -> WorkerConnector:
        from pelton_plugins.kv_connectors.block_files import StorageWorker

        return StorageWorker(storage_folder(context))


def storage_folder(context: ConnectorContext) -> Path:
    """The folder of this model's files. Raises `ConfigError` for settings that cannot be used."""
    given = context.config.kv_transfer.kv_connector_extra_config
    try:
        settings = msgspec.convert(given, StorageSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config is {given}: {error}. Give the folder: {{'shared_storage_path': '/data/kv'}}."
        ) from None
    folder = Path(settings.shared_storage_path).expanduser() / model_fingerprint(context.model, block_size(context))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"shared_storage_path is {settings.shared_storage_path!r}, which cannot be used: {error}. "
            "Give a folder that this user may write to."
        ) from error
    return folder


def block_size(context: ConnectorContext) -> int:
    """Tokens of a block. Raises `ConfigError` for a model whose layers keep different tokens."""
    groups = context.plan.groups
    if len(groups) != 1:
        raise ConfigError(
            f"The KV connector {context.name!r} serves models with one KV group; this one has {len(groups)}. "
            "Set disable_hybrid_kv_cache_manager, so that all layers keep all tokens."
        )
    return groups[0].spec.block_size


def block_path(folder: Path, block_hash: bytes) -> Path:
    name = block_hash.hex()
    return folder / name[:2] / f"{name}.safetensors"


@dataclass(slots=True)
class _Prompt:
    """A request whose blocks may be loaded or saved."""

    hashes: list[bytes]
    first: int = 0  # tokens that were computed or found here, when the connector was asked


@dataclass(slots=True)
class _Row:
    """A running request, as the workers have it."""

    request_id: str
    table: list[int]
    num_computed: int


class StorageScheduler(SchedulerConnector):
    """Looks for files when a request is admitted, and names the blocks that a step fills."""

    def __init__(self, name: str, folder: Path, size: int, *, loads: bool, saves: bool) -> None:
        self.name = name
        self._folder, self._size = folder, size
        self._loads, self._saves = loads, saves
        self._hasher = BlockHasher(HASH, size)
        self._prompts: dict[str, _Prompt] = {}
        self._rows: dict[int, _Row] = {}
        self._to_load: list[tuple[bytes, int]] = []  # with the next step

    def num_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.adapter_id:  # its id means nothing to another engine
            return 0, False
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = self._prompts[request.request_id] = _Prompt([])
            self._hasher.extend(
                prompt.hashes, request.prompt_token_ids,
                block_extra_hashes=request.block_extra_hashes, cache_salt=request.cache_salt,
            )  # fmt: skip
        prompt.first = num_computed_tokens
        if not self._loads or num_computed_tokens % self._size:
            return 0, False
        first = num_computed_tokens // self._size
        count = 0
        for block_hash in prompt.hashes[first : (len(request.prompt_token_ids) - 1) // self._size]:
            if not block_path(self._folder, block_hash).exists():
                break
            count += 1
        return count * self._size, False

    def after_allocation(self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        prompt = self._prompts[request.request_id]
        first, last = prompt.first // self._size, (prompt.first + num_external_tokens) // self._size
        self._to_load += zip(prompt.hashes[first:last], block_ids[0][first:last], strict=True)

    def build_metadata(self, output: SchedulerOutput) -> bytes:
        loads, self._to_load = self._to_load, []
        for new in output.new:
            self._rows[new.slot] = _Row(new.request_id, list(new.block_ids[0]), new.num_computed_tokens)
        for _, slot, _, block_ids in output.block_appends:
            self._rows[slot].table += block_ids
        saves: list[tuple[bytes, int]] = []
        for slot, count in zip(output.slots, output.num_scheduled, strict=True):
            row = self._rows[slot]
            before, row.num_computed = row.num_computed, row.num_computed + count
            prompt = self._prompts.get(row.request_id)
            if not self._saves or prompt is None or before >= len(prompt.hashes) * self._size:
                continue
            for place in range(before // self._size, min(row.num_computed // self._size, len(prompt.hashes))):
                block_hash = prompt.hashes[place]
                if not block_path(self._folder, block_hash).exists():
                    saves.append((block_hash, row.table[place]))
        return msgspec.msgpack.encode(StepTransfers(loads, saves))

    def request_finished(self, request_id: str, block_ids: BlockIds) -> bool:
        """Saves were copied in their own step, so that no block has to be kept."""
        self._prompts.pop(request_id, None)
        return False

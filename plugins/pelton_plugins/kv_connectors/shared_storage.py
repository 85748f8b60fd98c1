"""KV blocks of prompts as files in a folder, which several engines may share.

A file holds one block of all layers. Its name is the block's chain hash over tokens, salt and extras, so its content is what
any engine with the same weights would compute. A file that is missing, truncated or not of this model is a miss: its tokens
are computed. Of several ranks each has files with its part of a block, in a folder of its own; all of them are needed. This file
is the connector's settings and its half in the scheduler; `block_files` has the worker's half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pelton.config.parallel import ParallelConfig
from pelton.errors import ConfigError, RequestError
from pelton.kv_cache.hashing import BlockHasher, placeholder_hashes
from pelton.kv_cache.interface import BlockIds
from pelton.kv_transfer.interface import ConnectorContext, KVConnector, SchedulerConnector, TransferEnd, WorkerConnector
from pelton.messages.request import EngineRequest
from pelton.messages.step import SchedulerOutput
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton_plugins.kv_connectors.fingerprint import model_fingerprint

HASH = "sha256"


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `shared_storage`."""

    shared_storage_path: str
    """Folder of the files; made when it is missing."""


class StepTransfers(msgspec.Struct, frozen=True):
    """Saves and loads of the workers around one step: (hash, block id) of each block."""

    loads: list[tuple[bytes, int]] = []
    saves: list[tuple[bytes, int]] = []
    leaving: list[str] = []
    """Requests that are over, and whose blocks are free once the saves are copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTransfer:
    """`kv_transfer_params` of a request. Its answer tells `num_loaded_tokens` and `num_saved_tokens`."""

    load: bool = True
    """Use the files that are there."""
    save: bool = True
    """Write the blocks that have none, for other requests and engines."""
    is_asked: bool = False
    """Not the client's: whether there were parameters."""


class SharedStorage(KVConnector):
    serves_ranks = True

    @staticmethod
    def for_scheduler(context: ConnectorContext) -> SchedulerConnector:
        role = context.config.kv_transfer.kv_role
        return StorageScheduler(
            context.name,
            storage_folder(context),
            block_size(context),
            loads=role.loads,
            saves=role.saves,
            metrics=context.metrics,
            rank_folders=rank_folders(context.config.parallel),
        )

    @staticmethod
    def for_worker(context: ConnectorContext) -> WorkerConnector:
        from pelton_plugins.kv_connectors.block_files import StorageWorker

        folder = storage_folder(context) / rank_folders(context.config.parallel)[context.rank]
        folder.mkdir(parents=True, exist_ok=True)
        return StorageWorker(folder)


def read_transfer(request: EngineRequest) -> RequestTransfer:
    """Return what a request says of its transfers. Raises `RequestError`."""
    given = request.kv_transfer_params
    if given is None:
        return RequestTransfer()
    for name, value in given.items():
        if name not in ("load", "save") or not isinstance(value, bool):
            raise RequestError(
                "kv_transfer_params takes load and save, each true or false",
                param="kv_transfer_params",
                value={name: value},
            )
    return RequestTransfer(**given, is_asked=True)


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


def rank_folders(parallel: ParallelConfig) -> list[str]:
    """Return the folder of each rank's files within the model's, which one rank has for itself. Ranks of other sizes have other parts."""
    if parallel.num_ranks == 1:
        return [""]
    sizes = f"tp{parallel.tensor_parallel_size}-dcp{parallel.decode_context_parallel_size}-pp{parallel.pipeline_parallel_size}"
    sizes = "-".join([sizes, *map(str, parallel.pipeline_layer_partition or ())])
    return [f"{sizes}/rank{rank}" for rank in range(parallel.num_ranks)]


def block_size(context: ConnectorContext) -> int:
    """Tokens of a block. Raises `ConfigError` for a model whose layers keep different tokens."""
    groups = context.plan.groups
    if any(group.spec.has_fixed_page for group in groups):
        raise ConfigError(
            f"The KV connector {context.name!r} keeps what models have of each token; this one has states of whole requests. "
            "Leave kv_transfer_config out for it."
        )
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
    wants: RequestTransfer
    first: int = 0  # tokens that were computed or found here, when the connector was asked
    num_loaded: int = 0
    num_saved: int = 0
    slot: int = -1  # -1: it does not run
    table: list[int] = field(default_factory=list)
    start: int = 0  # blocks that it did not compute itself


class StorageScheduler(SchedulerConnector):
    """Looks for files when a request is admitted, and names the blocks to save once their content is known to be finite."""

    def __init__(
        self,
        name: str,
        folder: Path,
        size: int,
        *,
        loads: bool,
        saves: bool,
        metrics: PluginMetrics | None = None,
        rank_folders: Sequence[str] = ("",),
    ) -> None:
        self.name = name
        self._folders, self._size = [folder / name for name in rank_folders], size
        self._loads, self._saves = loads, saves
        self._hasher = BlockHasher(HASH, size)
        self._tokens = (metrics or PluginMetrics()).counter(
            "kv_transfer_tokens",
            "Tokens whose KV the connector brought (loaded) or began to write (saved).",
            ["direction"],
        )
        self._prompts: dict[str, _Prompt] = {}
        self._by_slot: dict[int, _Prompt] = {}
        self._to_load: list[tuple[bytes, int]] = []  # with the next step
        self._computed: dict[str, _Prompt] = {}  # saved with the next step
        self._leaving: dict[
            str, list[tuple[bytes, int]]
        ] = {}  # the same, of requests that are over, whose blocks are kept

    def check_request(self, request: EngineRequest) -> None:
        read_transfer(request)

    def num_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.adapter_id:  # its id means nothing to another engine
            return 0, False
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = self._prompts[request.request_id] = _Prompt([], read_transfer(request))
            self._hasher.extend(
                prompt.hashes, request.prompt_token_ids, cache_salt=request.cache_salt,
                block_extra_hashes=placeholder_hashes(request.placeholders(), self._size),
            )  # fmt: skip
        prompt.first = num_computed_tokens
        if not self._loads or not prompt.wants.load or num_computed_tokens % self._size:
            return 0, False
        first = num_computed_tokens // self._size
        count = 0
        for block_hash in prompt.hashes[first : (len(request.prompt_token_ids) - 1) // self._size]:
            if not self._is_there(block_hash):
                break
            count += 1
        return count * self._size, False

    def after_allocation(self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        prompt = self._prompts[request.request_id]
        first, last = prompt.first // self._size, (prompt.first + num_external_tokens) // self._size
        self._to_load += zip(prompt.hashes[first:last], block_ids[0][first:last], strict=True)
        prompt.num_loaded += num_external_tokens
        self._tokens.inc(num_external_tokens, direction="loaded")

    def request_computed(self, request_id: str) -> None:
        prompt = self._prompts.get(request_id)
        if prompt is not None and self._saves and prompt.wants.save:
            self._computed[request_id] = prompt

    def build_metadata(self, output: SchedulerOutput) -> bytes:
        self._note_rows(output)
        saves = [save for found in self._leaving.values() for save in found]
        for prompt in self._computed.values():
            if prompt.slot >= 0:  # else it was preempted, and will be computed again
                saves += self._unsaved(prompt)
        transfers = StepTransfers(self._to_load, saves, list(self._leaving))
        self._to_load, self._leaving = [], {}
        self._computed.clear()
        return msgspec.msgpack.encode(transfers)

    def _note_rows(self, output: SchedulerOutput) -> None:
        """Follow the block tables of running requests."""
        for slot in output.freed_slots:
            gone = self._by_slot.pop(slot, None)
            if gone is not None:
                gone.slot = -1
        for new in output.new:
            prompt = self._prompts.get(new.request_id)
            if prompt is not None:
                prompt.slot, prompt.table = new.slot, list(new.block_ids[0])
                prompt.start = new.num_computed_tokens // self._size
                self._by_slot[new.slot] = prompt
        for _, slot, _, block_ids in output.block_appends:
            if slot in self._by_slot:
                self._by_slot[slot].table += block_ids

    def _is_there(self, block_hash: bytes) -> bool:
        """Every rank has its part."""
        return all(block_path(folder, block_hash).exists() for folder in self._folders)

    def _unsaved(self, prompt: _Prompt) -> list[tuple[bytes, int]]:
        """(hash, block id) of what it computed and files do not have."""
        found = [
            (block_hash, block_id)
            for block_hash, block_id in zip(prompt.hashes[prompt.start :], prompt.table[prompt.start :], strict=False)
            if not self._is_there(block_hash)
        ]
        prompt.num_saved += len(found) * self._size
        self._tokens.inc(len(found) * self._size, direction="saved")
        return found

    def request_finished(self, request_id: str, block_ids: BlockIds) -> TransferEnd:
        """Keep the blocks for one more step when its first token was its last: they are saved with the next one."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return TransferEnd()
        if self._computed.pop(request_id, None) is not None:
            prompt.table = list(block_ids[0])
            unsaved = self._unsaved(prompt)
            if unsaved:
                self._leaving[request_id] = unsaved
        params = None
        if prompt.wants.is_asked:
            params = {"num_loaded_tokens": prompt.num_loaded, "num_saved_tokens": prompt.num_saved}
        return TransferEnd(keeps_blocks=request_id in self._leaving, params=params)

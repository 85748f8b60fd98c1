"""A fake KV connector: its half in the scheduler, and its half in the fake device, which agree on the metadata between them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pelton.kv_cache.interface import BlockIds
from pelton.kv_transfer.interface import SchedulerConnector
from pelton.messages.request import EngineRequest
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.testing.fake_model import running_hashes
from pelton.testing.fake_store import JUNK, FakeStore


class _Load(msgspec.Struct):
    """Tokens `first` to `first + count` of a prompt, whose KV is brought into blocks."""

    request_id: str
    token_ids: list[int]
    block_ids: list[list[int]]  # per group
    first: int
    count: int
    is_later: bool


class _Metadata(msgspec.Struct):
    loads: list[_Load] = []
    sends: list[str] = []


class FakeConnector(SchedulerConnector):
    """Knows the KV of some prompts' heads: `num_remote(request)` tokens, None for "ask again"."""

    name = "fake"

    def __init__(
        self,
        num_remote: Callable[[EngineRequest], int | None] = lambda request: 0,
        *,
        is_later: Callable[[EngineRequest], bool] = lambda request: False,
        sends: Callable[[str], bool] = lambda request_id: False,
    ) -> None:
        self.num_remote = num_remote
        self.is_later = is_later
        self.sends = sends
        self.asked: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self._first: dict[str, int] = {}
        self._metadata = _Metadata()

    def num_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        self._first[request.request_id] = num_computed_tokens
        known = self.num_remote(request)
        if known is None:
            return None, False
        known = min(known, len(request.prompt_token_ids))
        return max(known - num_computed_tokens, 0), self.is_later(request)

    def after_allocation(self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        tables, first = [list(ids) for ids in block_ids], self._first[request.request_id]
        load = _Load(
            request.request_id, request.prompt_token_ids, tables, first, num_external_tokens, self.is_later(request)
        )
        self._metadata.loads.append(load)

    def build_metadata(self, output: SchedulerOutput) -> bytes:
        metadata, self._metadata = self._metadata, _Metadata()
        return msgspec.msgpack.encode(metadata)

    def request_finished(self, request_id: str, block_ids: BlockIds) -> bool:
        self.finished.append(request_id)
        if any(block_ids) and self.sends(request_id):
            self._metadata.sends.append(request_id)
            return True
        return False


class FakeTransfers:
    """Does what `FakeConnector` asks for: loads before a step computes, at once or some steps later."""

    def __init__(self, store: FakeStore) -> None:
        self.num_steps = 2  # that a late transfer takes
        self.is_bad: Callable[[str], bool] = lambda request_id: False  # whether a request's load brings junk
        self._store = store
        self._arrived: list[_Load] = []  # with the newest step
        self._receiving: list[tuple[int, _Load]] = []  # (step it arrives with, load)
        self._sending: list[tuple[int, str]] = []

    def begin(self, output: SchedulerOutput) -> None:
        """Before a step computes."""
        self._arrived = []
        if FakeConnector.name not in output.extensions:
            return
        metadata = msgspec.msgpack.decode(output.extensions[FakeConnector.name], type=_Metadata)
        done = output.step_id + self.num_steps
        self._receiving += [(done, load) for load in metadata.loads if load.is_later]
        self._sending += [(done, request_id) for request_id in metadata.sends]
        self._arrived = [load for load in metadata.loads if not load.is_later]
        for load in self._arrived:
            self._bring(load)

    def finish(self, result: ModelOutput) -> None:
        """Report what has arrived and gone by this step."""
        now = result.step_id
        late = [load for due, load in self._receiving if due <= now]
        self._receiving = [(due, load) for due, load in self._receiving if due > now]
        for load in late:
            self._bring(load)
            result.finished_receiving.append(load.request_id)
        for load in late + self._arrived:
            if self.is_bad(load.request_id):
                for group, table in enumerate(load.block_ids):
                    size = self._store.specs[group].block_size
                    end = -(-(load.first + load.count) // size)
                    result.invalid_block_ids += [block for block in table[load.first // size : end] if block]
        result.finished_sending = [request_id for due, request_id in self._sending if due <= now]
        self._sending = [(due, request_id) for due, request_id in self._sending if due > now]

    def _bring(self, load: _Load) -> None:
        values, is_bad = running_hashes(load.token_ids), self.is_bad(load.request_id)
        for group, table in enumerate(load.block_ids):
            for position in range(load.first, load.first + load.count):
                self._store.put(group, table, position, JUNK if is_bad else values[position])

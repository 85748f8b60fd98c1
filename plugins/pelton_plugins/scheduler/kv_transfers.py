"""KV that comes from, or goes to, somewhere else: requests whose blocks a connector reads or writes.

Without a connector nothing is ever transferred, and everything here says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pelton.errors import EngineError, PeltonError, PluginError
from pelton.kv_cache.interface import BlockIds, KVCacheManager
from pelton.kv_transfer.interface import SchedulerConnector, TransferEnd
from pelton.messages.request import EngineRequest
from pelton.messages.step import ModelOutput
from pelton.metrics.stats import KV_FETCH_STAGES
from pelton.plugins import FIX_IT
from pelton.scheduler.request import RequestStatus
from pelton_plugins.scheduler.request import RequestState

if TYPE_CHECKING:
    from pelton_plugins.scheduler.allocations import Allocations
    from pelton_plugins.scheduler.request_table import RequestTable
    from pelton_plugins.scheduler.step import OpenStep, StepBuilder

logger = logging.getLogger(__name__)


class KVTransfers:
    def __init__(
        self, connector: SchedulerConnector | None, kv: KVCacheManager, *, num_groups: int, named: str | None = None
    ) -> None:
        """named: the connector in the settings."""
        if (named or connector is not None) and not isinstance(connector, SchedulerConnector):
            raise PluginError(
                f"The KV connector {named!r} gives {connector!r} from for_scheduler; it has to give a SchedulerConnector. {FIX_IT}"
            )
        self._connector = connector
        self._kv = kv
        self._num_groups = num_groups
        self._sending: dict[str, int] = {}  # finished, with its last step; the connector still reads the blocks
        self._abandoned: set[str] = set()  # finished; the connector still writes their blocks
        self._undecided: set[str] = set()  # waiting; the connector has to be asked again
        self._has_news = False  # the connector has something to tell although no row runs

    @property
    def holds_blocks(self) -> bool:
        """Blocks of finished requests come back when a transfer is over."""
        return bool(self._sending or self._abandoned)

    def holds(self, request_id: str) -> bool:
        return request_id in self._sending or request_id in self._abandoned

    def wants_bare_step(self, table: RequestTable, num_open: int) -> bool:
        """A step without rows, so that the connector's workers are told and asked."""
        return self._connector is not None and (
            self._has_news or (not num_open and (self.holds_blocks or table.is_receiving()))
        )

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """Around a call of the connector: what fails there says so to the client, and is logged in full."""
        try:
            yield
        except PeltonError:
            raise
        except Exception as error:
            assert self._connector is not None
            made_by = f"{type(self._connector).__module__}:{type(self._connector).__qualname__}"
            logger.exception("The KV connector %r (%s) failed in %s.", self._connector.name, made_by, method)
            raise EngineError(
                f"The KV connector {self._connector.name!r} ({made_by}) failed in {method}: {type(error).__name__}: {error}"
            ) from error

    # Towards a request.

    def check(self, request: EngineRequest) -> None:
        """Raise `RequestError` for transfer parameters that the connector does not take."""
        if self._connector is not None:
            self._connector.check_request(request)

    def note_valid(self, request: RequestState) -> None:
        """Note that the first token since its start has come back: what was computed for it until then is finite."""
        if self._connector is not None:
            with self._named("request_computed"):
                self._connector.request_computed(request.request_id)

    def may_bring(self, request: RequestState) -> bool:
        """Return whether a connector is asked for the request's KV."""
        return not (self._connector is None or request.skip_connector or request.skip_prefix_lookup)

    def num_external_tokens(self, request: RequestState, num_local: int) -> tuple[int | None, bool]:
        """Tokens that can be brought after the first `num_local`, and whether they come later. None: ask again."""
        if self._connector is None or not self.may_bring(request):
            return 0, False
        with self._named("num_matched_tokens"):
            matched, is_later = self._connector.num_matched_tokens(request.request, num_local)
        if matched is None:
            self._undecided.add(request.request_id)
            return None, False
        self._undecided.discard(request.request_id)
        return max(min(matched, len(request.token_ids) - 1 - num_local), 0), is_later

    def bring(self, request: RequestState, block_ids: BlockIds, num_external: int) -> None:
        """With the step that is being made."""
        assert self._connector is not None
        with self._named("after_allocation"):
            self._connector.after_allocation(request.request, block_ids, num_external)

    def bring_later(
        self, request: RequestState, cached: BlockIds | None, num_local: int, num_external: int, step: StepBuilder
    ) -> bool:
        """Blocks for tokens that arrive later. False, and nothing done, when there are none."""
        new_ids = self._kv.allocate(
            request, 0, cached_blocks=cached, num_cached_tokens=num_local,
            num_external_tokens=num_external, delay_caching=True,
        )  # fmt: skip
        if new_ids is None:
            return False
        step.copies += self._kv.take_copies()
        block_ids = self._kv.block_ids(request.request_id)
        request.status = RequestStatus.RECEIVING
        request.tables = [list(ids) for ids in block_ids]
        request.num_computed_tokens = num_local + num_external
        request.connector_tokens = num_external
        self.bring(request, block_ids, num_external)
        self._has_news = True
        return True

    # Steps, and ends.

    def count_fetches(self, table: RequestTable) -> dict[str, int]:
        """Requests whose KV is brought later, by `KV_FETCH_STAGES`; empty without a connector."""
        if self._connector is None:
            return {}
        found = table.receiving()
        num_ready = sum(request.is_remote_ready for request in found)
        return dict(zip(KV_FETCH_STAGES, (len(self._undecided), len(found) - num_ready, num_ready), strict=True))

    def describe(self, step: OpenStep, table: RequestTable) -> None:
        """Tell the workers what they need to know about this step."""
        if self._connector is None:
            return
        self._has_news = False
        try:
            with self._named("build_metadata"):
                metadata = self._connector.build_metadata(step.output)
                if not isinstance(metadata, bytes):
                    raise TypeError(f"it gives {metadata!r}, not bytes")
            step.output.extensions = {self._connector.name: metadata}
        except Exception as error:  # without it the workers would compute on KV that is not there
            for request in step.requests:
                table.fail(request, error, "describing the KV transfer of")
            table.drop_finished_rows()

    def keeps(self, request: RequestState) -> bool:
        """Tell the connector that a request is over; True when it still reads or writes its blocks."""
        if self._connector is None:
            return False
        request_id = request.request_id
        self._undecided.discard(request_id)
        has_blocks = bool(request.tables)
        try:
            block_ids = self._kv.block_ids(request_id) if has_blocks else tuple([] for _ in range(self._num_groups))
            end = self._connector.request_finished(request_id, block_ids)
            if isinstance(end, TransferEnd):
                request.kv_transfer_params, end = end.params, end.keeps_blocks
            is_sending = end and has_blocks
        except Exception:
            logger.exception("KV connector %s failed at the end of %s.", self._connector.name, request_id)
            is_sending = False
        if request.is_receiving:
            self._abandoned.add(request_id)
            return True
        if is_sending:
            self._sending[request_id] = request.last_step_id
        return is_sending

    def take_in(self, result: ModelOutput, table: RequestTable, allocations: Allocations) -> None:
        """Take in what arrived, and what was sent."""
        if self._connector is None:
            return
        for request_id in result.finished_receiving:
            request = table.requests.get(request_id)
            if request_id in self._abandoned:
                self._abandoned.remove(request_id)
                self._kv.free(request_id)
            elif request is not None and request.status is RequestStatus.RECEIVING:
                request.is_remote_ready = True
                if request.restarts:
                    request.restarts = False
                    table.preempt(request)
                else:
                    self._kv.cache_blocks(request, request.num_computed_tokens)
        for request_id in result.finished_sending:
            last_step_id = self._sending.pop(request_id, None)
            if last_step_id is not None:
                allocations.release_sent(request_id, last_step_id)
        self._connector.update(result)

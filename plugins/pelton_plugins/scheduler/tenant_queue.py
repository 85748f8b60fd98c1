"""The waiting queue of a policy with shares: one queue a tenant, and the policy says whose head is next."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.scheduler.policy import SchedulingPolicy
from pelton.scheduler.request import RequestStatus, ScheduledRequest
from pelton_plugins.scheduler.queue import RequestQueue
from pelton_plugins.scheduler.request import RequestState


class TenantQueue(RequestQueue):
    """Within a tenant in policy order. Preempted requests come first, whoever they are of: they have been charged already."""

    def __init__(self, policy: SchedulingPolicy, running: Sequence[ScheduledRequest]) -> None:
        self._policy = policy
        self._running = running
        self._tenants: dict[str, RequestQueue] = {}  # those that have requests here
        self._preempted = RequestQueue(policy)
        self._queue_of: dict[str, RequestQueue] = {}

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue_of

    def push(self, request: RequestState) -> None:
        queue = self._preempted
        if request.status is not RequestStatus.PREEMPTED:
            tenant = request.request.tenant
            found = self._tenants.get(tenant)
            if found is None:
                self._policy.arrived(tenant, self._tenants.keys())
                found = self._tenants[tenant] = RequestQueue(self._policy)
            queue = found
        try:
            queue.push(request)
        finally:
            if queue is not self._preempted and not len(queue):
                del self._tenants[request.request.tenant]
        self._queue_of[request.request_id] = queue

    def peek(self) -> RequestState | None:
        if len(self._preempted):
            return self._preempted.peek()
        tenants = self._tenants
        if not tenants:
            return None
        if len(tenants) == 1:
            return next(iter(tenants.values())).peek()
        return tenants[self._policy.next_tenant(tenants.keys(), self._running)].peek()

    def remove(self, request: RequestState) -> bool:
        queue = self._queue_of.pop(request.request_id, None)
        if queue is None:
            return False
        queue.remove(request)
        if queue is not self._preempted and not len(queue):
            del self._tenants[request.request.tenant]
        return True

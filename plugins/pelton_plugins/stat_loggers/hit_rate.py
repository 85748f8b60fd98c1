"""The prefix cache's hit rate over the most recent queries, for the log line.

Prometheus gets counters instead, so that whoever reads them chooses the window.
"""

from __future__ import annotations

from collections import deque

WINDOW_QUERIES = 1000


class HitRateWindow:
    """Share of the tokens looked up that were found, over the last `max_queries` queries (requests that looked up)."""

    def __init__(self, max_queries: int = WINDOW_QUERIES) -> None:
        self.max_queries = max_queries
        self._parts: deque[tuple[int, int, int]] = deque()  # queries, tokens looked up, tokens found
        self._queries = 0
        self._tokens = 0
        self._hits = 0

    def observe(self, num_queries: int, num_tokens: int, num_hits: int) -> None:
        """Add what one step looked up; whole steps leave at the other end once more than `max_queries` are held."""
        if num_queries <= 0:
            return
        self._parts.append((num_queries, num_tokens, num_hits))
        self._queries += num_queries
        self._tokens += num_tokens
        self._hits += num_hits
        while self._queries > self.max_queries and len(self._parts) > 1:
            queries, tokens, hits = self._parts.popleft()
            self._queries -= queries
            self._tokens -= tokens
            self._hits -= hits

    @property
    def num_queries(self) -> int:
        return self._queries

    @property
    def hit_rate(self) -> float:
        """0 to 1; 0 when nothing was looked up yet."""
        return self._hits / self._tokens if self._tokens else 0.0

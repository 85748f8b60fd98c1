"""Estimates of what finished sequences cost: operations and bytes of one device, from the shapes that its worker reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.metrics.stats import FinishedRequestStats

if TYPE_CHECKING:
    from pelton.messages.report import DeviceReport


class Work:
    """Estimates for one engine. Drafts, padding and what was computed again after a preemption are not in it."""

    def __init__(self, report: DeviceReport) -> None:
        self.weights_bytes = report.weights_bytes
        self._token_flops, self._output_flops = (report.work.get(name, 0.0) for name in ("token_flops", "output_flops"))
        self._context_flops = _by_window(report.work, "context_flops")
        self._context_bytes = _by_window(report.work, "context_bytes")

    def of(self, stats: FinishedRequestStats) -> dict[str, float]:
        """Amounts by the counter that they belong to."""
        first, prompt = stats.num_cached_tokens, stats.num_cached_tokens + num_computed_prompt_tokens(stats)
        last = prompt + max(stats.num_generation_tokens - 1, 0)  # the last token is sampled, and not computed
        flops = (last - first) * self._token_flops + stats.num_generation_tokens * self._output_flops
        flops += sum(each * attended(first, last, window) for window, each in self._context_flops.items())
        read = sum(each * attended(prompt, last, window) for window, each in self._context_bytes.items())
        return {
            "estimated_flops_per_gpu": flops,
            "estimated_read_bytes_per_gpu": read,
            "estimated_write_bytes_per_gpu": (last - first) * sum(self._context_bytes.values()),
        }


def num_computed_prompt_tokens(stats: FinishedRequestStats) -> int:
    """Prompt tokens that were computed; none of a request that ended before its turn came."""
    has_begun = stats.queue_time_s is not None or stats.num_generation_tokens > 0
    return stats.num_prompt_tokens - stats.num_cached_tokens if has_begun else 0


def attended(first: int, last: int, window: int) -> int:
    """Sum, over the tokens first .. last - 1 of a sequence, of the tokens that each attends to, itself among them; window 0: all."""
    if window:
        full = max(last - max(first, window), 0)  # tokens that see a whole window
        return full * window + (attended(first, min(last, window), 0) if first < window else 0)
    return (last * (last + 1) - first * (first + 1)) // 2


def _by_window(work: dict[str, float], name: str) -> dict[int, float]:
    return {int(key.split()[1]): value for key, value in work.items() if key.startswith(name + " ")}

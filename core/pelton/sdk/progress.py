"""The progress bar of `LLM.generate`: requests done, tokens per second, time left; one line on stderr."""

from __future__ import annotations

import sys
import time

REFRESH_TTY_S = 0.1
REFRESH_LOG_S = 10.0
BAR_WIDTH = 24


class ProgressBar:
    """Rewrites one line on a terminal; elsewhere writes a line every ten seconds and one at the end."""

    def __init__(self, description: str, total: int) -> None:
        self._description = description
        self._total = total
        self._done = self._input_tokens = self._output_tokens = 0
        self._is_tty = sys.stderr is not None and sys.stderr.isatty()
        self._start = time.monotonic()
        self._interval = REFRESH_TTY_S if self._is_tty else REFRESH_LOG_S
        self._next = self._start + self._interval

    def update(self, done: int, input_tokens: int, output_tokens: int) -> None:
        """Add to what was done. Cheap: called every step."""
        self._done += done
        self._input_tokens += input_tokens
        self._output_tokens += output_tokens
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval
            self._write(now, end="" if self._is_tty else "\n")

    def close(self) -> None:
        self._write(time.monotonic(), end="\n")

    def _write(self, now: float, end: str) -> None:
        if sys.stderr is not None:
            print(f"\r\x1b[K{self.line(now)}" if self._is_tty else self.line(now), end=end, file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        elapsed = max(now - self._start, 1e-6)
        filled = BAR_WIDTH * self._done // max(self._total, 1)
        left = f"{elapsed * (self._total - self._done) / self._done:.0f} s left" if self._done else "..."
        return (
            f"{self._description} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {self._done}/{self._total} "
            f"in {elapsed:.1f} s, {left}; tokens/s: {self._input_tokens / elapsed:.0f} in, "
            f"{self._output_tokens / elapsed:.0f} out"
        )

"""Traces of torch's profiler: what a worker's process and its device do between two calls."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pelton.errors import ConfigError, RequestError


class Profiling:
    """At most one trace at a time, which is in memory until it is written."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._file = Path()

    def start(self, folder: str, rank: int) -> None:
        """Raises `RequestError` while one runs, and `ConfigError` for a folder that cannot be written."""
        if self._profile is not None:
            raise RequestError("A profile runs already; end it with /stop_profile.")
        self._file = Path(folder).absolute() / f"pelton-rank{rank}-{os.getpid()}-{time.time_ns()}.pt.trace.json.gz"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
        except OSError as error:
            raise ConfigError(f"profile_dir {folder} cannot be written: {error.strerror}.") from error
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        found = profile(activities=kinds)
        found.start()
        self._profile = found

    def stop(self) -> str:
        """Write the trace; return its file. Raises `RequestError` when none runs."""
        if self._profile is None:
            raise RequestError("No profile runs; start one with /start_profile.")
        found, self._profile = self._profile, None
        found.stop()
        found.export_chrome_trace(str(self._file))
        return str(self._file)

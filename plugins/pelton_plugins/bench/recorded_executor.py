"""The executor `recorded`: the one that the engine would have, with its steps written to a file at its end."""

from __future__ import annotations

import time

import msgspec

from pelton.config.plugin_settings import read_settings
from pelton.engine.core import make_executor, resolve_sizes, with_step_budget
from pelton.errors import ConfigError
from pelton.executor.interface import Executor, ExecutorContext
from pelton_plugins.bench.record import circumstances, write_json
from pelton_plugins.bench.recorded_settings import SETTINGS, RecordedSettings
from pelton_plugins.bench.steps import StepRecorder, record


def recorded(context: ExecutorContext) -> Executor:
    """Make the executor that is named, or the best for the engine's sizes. Raises `ConfigError` without a path for its steps."""
    config, replace = context.config, msgspec.structs.replace
    settings = read_settings(config, SETTINGS, RecordedSettings)
    if settings.path is None:
        raise ConfigError("recorded.path is not set; give a file for the steps in plugin_config.")
    rank = config.parallel.data_parallel_rank
    path = f"{settings.path}.{rank}" if rank else settings.path
    inner = replace(config, parallel=replace(config.parallel, distributed_executor_backend=settings.executor))
    executor = make_executor(inner, context.model, context.plugins, context.metrics)
    recorder = StepRecorder(executor)
    shutdown, began = executor.shutdown, time.monotonic() + settings.after_s

    def write_and_shut_down() -> None:
        if recorder.rows:
            resolved = with_step_budget(resolve_sizes(config, context.model, context.plugins), recorder.fit)
            told = record(resolved, context.model, executor, recorder)
            told |= circumstances(executor.report().device, {})
            write_json(path, told)
            recorder.rows = []
        shutdown()

    executor.shutdown = write_and_shut_down  # type: ignore[method-assign]
    recorder.begins_at = began
    return executor

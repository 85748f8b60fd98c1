"""`ExpertGroup`: engines that share their experts live and die together."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pelton.config.parallel import ParallelConfig
from pelton.errors import ConfigError
from pelton.logging import get_logger

if TYPE_CHECKING:
    from pelton_plugins.data_parallel.client import _Engine

LOOK_S = 0.25
"""How often engines that a signal may hold are looked at; one that is held at two looks counts as hung: the others wait for it."""

GIVEN_UP = ".given-up"
"""A file beside the folder where ranks meet, which those that end remove; `shared_experts/meeting.py` looks for it."""

logger = get_logger(__name__)


class ExpertGroup:
    """A folder where the engines' ranks meet, and what follows for the others when one of them is gone."""

    def __init__(self, parallel: ParallelConfig) -> None:
        if len(parallel.engine_indexes) < parallel.data_parallel_size:
            raise ConfigError(
                f"data_parallel_size_local is {len(parallel.engine_indexes)} of {parallel.data_parallel_size} engines, which does not go "
                "with enable_expert_parallel: engines that share their experts are all on one host. Leave one of them off."
            )
        folder = f"{tempfile.gettempdir()}/pelton-experts-{os.urandom(16).hex()}"
        self.parallel = msgspec.structs.replace(parallel, data_parallel_store=folder)
        """With the folder: engines make it. Front ends that start none have no use for it."""
        self._given_up = Path(folder + GIVEN_UP)
        self.close = weakref.finalize(self, _remove, folder, self._given_up)

    def give_up(self) -> None:
        """One did not start: those that wait for it at the meeting end."""
        self._given_up.touch()

    def end_others(self, dead: _Engine, engines: Collection[_Engine]) -> None:
        """They are in the middle of a step that never ends, and cannot go on without its experts. All start again, and meet."""
        for other in engines:
            if other is not dead and other.is_up and other.client.error is None:
                other.client.kill(f"engine {dead.index}, with which it shares its experts, is gone.")

    @staticmethod
    async def watch(engines: Collection[_Engine]) -> None:
        """Kill an engine whose process a signal holds."""
        held: set[int] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            now = {engine.index for engine in engines if engine.is_up and _is_stopped(getattr(engine.client, "pid", 0))}
            for engine in list(engines) if len(engines) > 1 else ():
                if engine.index in now & held:
                    logger.error("Engine %d is held by a signal, and others wait for it. It is killed.", engine.index)
                    engine.client.kill("it was held by a signal.")
            held = now


def _remove(folder: str, given_up: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    given_up.unlink(missing_ok=True)


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"

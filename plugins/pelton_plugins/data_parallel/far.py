"""`FarConnection`: the connection to an engine on another host."""

from __future__ import annotations

from typing import ClassVar

from pelton.engine.process_client import EngineConnection


class FarConnection(EngineConnection):
    """An engine whose process here is a stand-in: it ends when the engine does."""

    program: ClassVar[str] = "pelton_plugins.data_parallel.stand_in"

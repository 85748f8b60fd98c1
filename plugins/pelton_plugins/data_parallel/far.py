"""`FarConnection`: the connection to an engine on another host."""

from __future__ import annotations

from typing import ClassVar

from pelton.engine.process_client import EngineConnection


class FarConnection(EngineConnection):
    """Its process is a stand-in on this host, whose end is the engine's end."""

    program: ClassVar[str] = "pelton_plugins.data_parallel.stand_in"

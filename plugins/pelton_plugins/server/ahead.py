"""The engine's process, started before the server's modules are imported and the model is found."""

from __future__ import annotations

import threading

from pelton.config import EngineConfig
from pelton.engine.process_client import EngineConnection
from pelton.engine.protocol import Prepare
from pelton.executor.select import find_executor
from pelton.plugins import Plugins


class EngineAhead:
    """A process that imports what its executor needs in any case, and has that start its ranks. `close` ends it where no client has
    taken it."""

    def __init__(self, config: EngineConfig, plugins: Plugins) -> None:
        entry = find_executor(config.parallel, plugins)
        self.imports = ("pelton.engine.core", *getattr(entry, "imports", ()))
        prepare = None
        if getattr(entry, "ahead", "") and not config.parallel.has_several_engines:
            prepare = Prepare(config, [plugin.name for plugin in plugins.loaded if not plugin.is_builtin])
        self._connection: EngineConnection | None = EngineConnection(imports=self.imports, prepare=prepare)
        self._lock = threading.Lock()
        self.pid = self._connection.process.pid

    def take(self) -> EngineConnection | None:
        """Return its connection, once."""
        with self._lock:  # engines start side by side
            taken, self._connection = self._connection, None
            return taken

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close(0.0)

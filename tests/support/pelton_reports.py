"""Less work for pytest in each of thousands of tests: no log handlers on loggers of other packages, and no messages of a worker about
set-ups and teardowns that passed, which nobody is shown."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from _pytest.logging import catching_logs


def catch_own_logs() -> None:
    """Let pytest catch the logs of the root and of Pelton alone.

    pytest 9 adds six handlers a test to each logger that does not propagate; torch alone has forty of them.
    """
    if "attached_loggers" not in getattr(catching_logs, "__slots__", ()):
        return  # another pytest

    def enter(self: Any) -> Any:
        root, own = logging.getLogger(), logging.getLogger("pelton")
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        for logger in (root,) if own.propagate else (root, own):
            logger.addHandler(self.handler)
            self.attached_loggers.append(logger)
        return self.handler

    catching_logs.__enter__ = enter  # type: ignore[method-assign]


def send_what_is_shown(config: pytest.Config) -> None:
    """Hold back messages of a worker that change nothing of what pytest prints: three of six a test."""
    # With these all reports are read.
    shows_all = config.option.durations is not None or config.option.xmlpath or config.option.verbose > 0
    if shows_all or not hasattr(config, "workerinput"):
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            _hold_back(plugin)


def _hold_back(interactor: Any) -> None:
    send = interactor.sendevent

    def send_shown(name: str, **given: Any) -> None:
        report = given.get("data", {}) if name == "testreport" else {}
        is_quiet = report.get("outcome") == "passed" and report.get("when") in ("setup", "teardown")
        if name != "logstart" and not is_quiet:
            send(name, **given)

    interactor.sendevent = send_shown

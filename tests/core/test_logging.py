"""One logger, concise lines, phases that are timed."""

from __future__ import annotations

import logging
import re

import pytest

from pelton import logging as pelton_logging
from pelton.logging import Progress, get_logger, phase, setup


@pytest.fixture(autouse=True)
def restore_logger():
    logger = logging.getLogger("pelton")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.manager._clear_cache()


def test_lines_are_one_line_on_stderr(capsys):
    setup("info")
    setup("info")  # a second call adds no second handler
    get_logger("pelton.engine").info("ready in %d s", 3)
    get_logger("pelton.engine").debug("not shown")
    get_logger("third_party").warning("from outside")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert re.fullmatch(r"INFO \d\d:\d\d:\d\d ready in 3 s", lines[0])
    assert re.fullmatch(r"WARNING \d\d:\d\d:\d\d from outside", lines[1])
    assert len(lines) == 2


def test_a_phase_is_said_timed_and_added_up(capsys):
    setup("info")
    seconds: dict[str, float] = {}
    for _ in range(2):
        with phase("load weights", seconds, total=100, unit="B") as progress:
            progress.advance(60)
            assert str(progress) == "load weights: 60% of 100 B"
    assert list(seconds) == ["load weights"] and seconds["load weights"] >= 0.0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2].split(":")[0] for line in lines] == ["load weights ...", "load weights"] * 2


def test_a_phase_that_fails_says_so_and_raises(capsys):
    setup("info")
    with pytest.raises(ValueError, match="broken"), phase("profile"):
        raise ValueError("broken")
    assert "profile: failed after" in capsys.readouterr().err


def test_progress_writes_a_line_every_few_seconds_to_a_log(capsys, monkeypatch):
    setup("info")
    now = [0.0]
    monkeypatch.setattr(pelton_logging.time, "monotonic", lambda: now[0])
    progress = Progress("download", total=10 * 2**20, unit="B")
    for _ in range(20):
        now[0] += 1.0
        progress.advance(2**19)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("download: 25% of 10.0 MiB") and lines[-1].endswith("download: 100% of 10.0 MiB")

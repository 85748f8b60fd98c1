"""Conformance of commands of the `pelton` program: what any of them has to keep, run with pytest.

Subclass `CommandConformance` in a test module and set `run`; and `good`, arguments with which it ends soon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from pelton.errors import PeltonError


class CommandConformance:
    run: ClassVar[Callable[[list[str]], int]]
    good: ClassVar[Sequence[str] | None] = None

    def test_help_is_shown_and_is_no_failure(self, capsys: pytest.CaptureFixture[str]) -> None:
        try:
            status = type(self).run(["--help"])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        assert status == 0
        assert capsys.readouterr().out.strip(), "help belongs on stdout"

    def test_an_unknown_flag_is_the_users_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        try:
            status = type(self).run(["--no-such-flag-at-all"])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except PeltonError as error:
            assert "no-such-flag" in str(error)
            return
        assert status != 0

    def test_runs(self) -> None:
        if self.good is None:
            pytest.skip("`good` is not set")
        assert type(self).run(list(self.good)) == 0

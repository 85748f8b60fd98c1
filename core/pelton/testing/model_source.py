"""Conformance of model sources: what any implementation has to keep, run with pytest.

Subclass `ModelSourceConformance` in a test module, set `source`, and give it `known` where a name can be had offline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from pelton.errors import ConfigError
from pelton.model.source import ModelSource, SourceRequest

OTHERS = ("", ".", "no-such-model", "owner/no-such-model", "/no/such/folder", "other-scheme://name", "a\0b", "x" * 5000)


class ModelSourceConformance:
    source: ClassVar[ModelSource]

    def known(self, folder: Path) -> str | None:
        """Return a name that can be had without a network, made in `folder` where need be."""
        return None

    def refused(self, folder: Path) -> str | None:
        """Return a name that is this source's, and cannot be had."""
        return None

    @pytest.mark.parametrize("name", OTHERS, ids=[str(index) for index in range(len(OTHERS))])
    def test_a_name_that_is_not_its_own_is_left_to_others(self, name: str) -> None:
        assert _ask(self, name) is None

    def test_gives_a_path_that_is_there(self, tmp_path: Path) -> None:
        name = self.known(tmp_path)
        if name is None:
            pytest.skip("`known` gives no name")
        for needs_weights in (True, False):
            found = _ask(self, name, needs_weights=needs_weights)
            assert isinstance(found, str) and Path(found).exists(), f"{name!r} gives {found!r}"
        assert _ask(self, name) == _ask(self, name)

    def test_what_cannot_be_had_is_one_line_for_the_operator(self, tmp_path: Path) -> None:
        name = self.refused(tmp_path)
        if name is None:
            pytest.skip("`refused` gives no name")
        with pytest.raises(ConfigError) as told:
            _ask(self, name)
        assert "\n" not in str(told.value) and str(told.value)


def _ask(suite: ModelSourceConformance, name: str, **more: Any) -> str | None:
    return type(suite).source(SourceRequest(name=name, **more))  # of the class: a function there is not a method

"""Conformance of plugins' settings and adjustments: what any of them has to keep, run with pytest.

Subclass `SettingsConformance` and set `settings_class`, or `AdjustmentConformance` and give it `adjustments`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import pytest

from pelton.config import EngineConfig
from pelton.config.engine import convert_section, flat_home


def _fields_with_text(settings_class: type) -> set[str]:
    """Return the fields of a class that have a text below them in its source."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(settings_class))).body
    assert isinstance(found, ast.ClassDef)
    return {
        field.target.id
        for field, text in zip(found.body, found.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
        and text.value.value.strip()
    }


class SettingsConformance:
    settings_class: ClassVar[type[msgspec.Struct]]

    def test_is_a_frozen_value_with_defaults(self) -> None:
        made = self.settings_class()
        assert made == self.settings_class(), "two of them with the same values differ"
        assert self.settings_class.__struct_config__.frozen, "declare it with frozen=True"

    def test_a_field_that_it_does_not_have_is_refused(self) -> None:
        with pytest.raises(msgspec.ValidationError, match="no_such_field"):
            msgspec.convert({"no_such_field": 1}, self.settings_class)

    def test_every_field_says_what_it_is_for(self) -> None:
        bases = [
            base
            for base in self.settings_class.__mro__
            if base.__module__.partition(".")[0] not in ("builtins", "msgspec")
        ]
        told = {name for base in bases for name in _fields_with_text(base)}
        silent = [name for name in self.settings_class.__struct_fields__ if name not in told]
        assert not silent, f"write a line of text below {', '.join(silent)}"

    def test_survives_as_plain_data(self) -> None:
        """It goes to other processes."""
        made = self.settings_class()
        assert msgspec.convert(msgspec.to_builtins(made), self.settings_class) == made


class AdjustmentConformance:
    settings: ClassVar[dict[str, Any]] = {}
    """Flat settings to start from."""

    def adjustments(self, config: EngineConfig) -> Mapping[str, tuple[Any, str]] | None:
        """Call your `pelton_config_adjustments`."""
        raise NotImplementedError

    def test_names_settings_with_good_values_and_reasons(self) -> None:
        config = EngineConfig.from_flat(**self.settings)
        for name, change in (self.adjustments(config) or {}).items():
            section, field = flat_home(name)
            assert isinstance(change, tuple) and len(change) == 2, f"{name}: return (value, reason)"
            assert isinstance(change[1], str) and change[1].strip(), f"{name}: say why"
            values = {**msgspec.structs.asdict(getattr(config, section)), field: change[0]}
            convert_section(section, values)

    def test_says_the_same_of_equal_settings(self) -> None:
        """Every process asks, and must come to the same."""
        first, second = (self.adjustments(EngineConfig.from_flat(**self.settings)) for _ in range(2))
        assert first == second

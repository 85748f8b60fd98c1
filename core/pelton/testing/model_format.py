"""Conformance of model formats: what any implementation has to keep, run with pytest.

Subclass `ModelFormatConformance` in a test module, set `format_class`, and give it `write`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest

from pelton.errors import ConfigError
from pelton.model.formats import ModelFormat


class ModelFormatConformance:
    format_class: ClassVar[type[ModelFormat]]

    def write(self, folder: Path) -> Path:
        """Write a small model of this form into `folder`; return its path."""
        raise NotImplementedError

    def test_knows_its_own_form_from_others(self, tmp_path: Path) -> None:
        form, path = self.format_class(), self.write(tmp_path)
        assert form.matches(path)
        for name, content in (("notes.txt", b"text"), ("weights.bin", b"\0" * 8), ("empty", b"")):
            (tmp_path / name).write_bytes(content)
            assert not form.matches(tmp_path / name), f"{name} is taken for this form"
        assert not form.matches(tmp_path / "not-there")

    def test_config_has_what_an_engine_asks_for(self, tmp_path: Path) -> None:
        form, path = self.format_class(), self.write(tmp_path)
        config = form.read_config(path)
        assert isinstance(config.get("architectures"), list) and config["architectures"]
        assert isinstance(config.get("vocab_size"), int)
        json.dumps(config)  # it goes to workers as plain data
        json.dumps(form.read_generation_config(path))
        name = form.weights_format(path)
        assert isinstance(name, str) and name

    def test_the_tokenizer_is_the_models(self, tmp_path: Path) -> None:
        form, path = self.format_class(), self.write(tmp_path)
        tokenizer = form.load_tokenizer(path)
        ids = tokenizer.encode("The cat sat.", add_special_tokens=False)
        assert ids and max(ids) < form.read_config(path)["vocab_size"]
        assert tokenizer.decode(ids).strip() == "The cat sat."

    def test_what_is_broken_is_one_line_with_the_file(self, tmp_path: Path) -> None:
        form, path = self.format_class(), self.write(tmp_path)
        for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
            file.write_bytes(b"\xff broken")
        with pytest.raises(ConfigError) as told:
            form.read_config(path)
        assert str(tmp_path) in str(told.value)

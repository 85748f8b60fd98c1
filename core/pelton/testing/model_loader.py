"""Conformance of weight loaders: what any implementation has to keep, run with pytest.

Subclass `WeightLoaderConformance` in a test module, set `loader_class`, and give it `write`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.loading import WeightLoader
from pelton.model.resolved import ResolvedModel


def some_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (12, 8), "layers.0.norm.weight": (8,), "layers.0.out.weight": (6, 8), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class WeightLoaderConformance:
    loader_class: ClassVar[type[WeightLoader]]

    def write(self, folder: Path, weights: dict[str, Tensor]) -> Path:
        """Write a checkpoint of these float32 tensors into `folder`; return the path that a model source would give."""
        raise NotImplementedError

    def make(self, path: Path) -> WeightLoader:
        model = ResolvedModel(
            name="under-test", path=str(path), weights_format="under-test", hf_config={}, architecture="X", dtype="float32",
            max_model_len=64, vocab_size=12, eos_token_ids=[0], generation_config={}, tokenizer_path=None,
        )  # fmt: skip
        return self.loader_class(EngineConfig(), model)

    def test_gives_every_tensor_once_as_it_was_written(self, tmp_path: Path) -> None:
        expected = some_weights()
        loader = self.make(self.write(tmp_path, expected))
        loader.expect({name: tuple(tensor.shape) for name, tensor in expected.items()})
        found: dict[str, Tensor] = {}
        for name, weight in loader.weights():
            assert name not in found, f"{name} comes twice"
            assert tuple(weight.shape) == tuple(expected[name].shape)
            found[name] = weight.read().clone()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert loader.total_bytes >= 0

    def test_slices_are_those_of_the_tensor(self, tmp_path: Path) -> None:
        expected = some_weights()
        for name, weight in self.make(self.write(tmp_path, expected)).weights():
            for dim, size in enumerate(weight.shape):
                for start, stop in ((0, size), (size // 3, size), (0, size // 2), (size // 2, size // 2)):
                    part = weight.read(dim, start, stop)
                    assert torch.equal(part, expected[name].narrow(dim, start, stop - start)), f"{name} {dim} {start}"

    def test_filling_gives_what_reading_gives(self, tmp_path: Path) -> None:
        expected = some_weights()
        for name, weight in self.make(self.write(tmp_path, expected)).weights():
            target = torch.full_like(expected[name], torch.nan)
            filled = weight.fill(target)
            wanted = expected[name] if filled else torch.full_like(target, torch.nan)
            assert torch.equal(target.nan_to_num(7), wanted.nan_to_num(7)), f"fill says {filled} for {name}"

    def test_what_is_broken_is_one_line_with_the_file(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, some_weights())
        for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
            file.write_bytes(b"\xff broken")
        with pytest.raises(ConfigError) as told:
            for _, weight in self.make(path).weights():
                weight.read()
        assert str(tmp_path) in str(told.value)

"""Conformance of models that generate, and of quantization methods under them: what any has to keep, run with pytest.

Subclass `ModelConformance` in a test module, set `model_class` and `hf_config`, the config.json of a small one. Weights are
random; compare with a reference of your own besides, where there is one (`pelton.testing.models` asks transformers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pelton.config import EngineConfig
from pelton.model.loading import LazyWeight
from pelton.model.registry import find_model
from pelton.model.resolved import ResolvedModel
from pelton.plugins import load_plugins
from pelton.quantization.interface import QuantizationMethod
from pelton.testing.executor import tiny_model
from pelton.testing.model_driver import ModelDriver, TensorWeight

PROMPTS: dict[str, Sequence[int]] = {
    "short": [5],
    "long": [(7 * index) % 60 + 3 for index in range(23)],
    "other": [9, 8, 7, 6],
}


def random_weights(expected: dict[str, tuple[int, ...]], seed: int = 0) -> Iterator[tuple[str, LazyWeight]]:
    """Draw a tensor for each name: norms around 1, matrices so that products keep their size."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in sorted(expected.items()):
        drawn = torch.randn(shape, generator=generator)
        yield name, TensorWeight(drawn * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * drawn)


def drive(model_class: Any, hf_config: dict[str, Any], *, num_blocks: int = 64, **fields: Any) -> ModelDriver:
    """Make a model of `model_class` with random weights, to be run by hand."""
    return ModelDriver(
        model_class=model_class, hf_config=hf_config, weights=random_weights, num_blocks=num_blocks, block_size=4,
        plugins=load_plugins(), **fields,
    )  # fmt: skip


class ModelConformance:
    model_class: ClassVar[Any]
    hf_config: ClassVar[dict[str, Any]]
    """config.json of a small one; a vocabulary of 64 at least."""
    tolerance: ClassVar[float] = 1e-4
    """Of logits in float32, between steps of other shapes."""

    def make(self, **fields: Any) -> ModelDriver:
        return drive(type(self).model_class, self.hf_config, **fields)

    def assert_close(self, found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, atol=self.tolerance, rtol=self.tolerance)

    def test_logits_are_numbers_over_the_vocabulary(self) -> None:
        for logits in self.make().step(PROMPTS).values():
            assert logits.shape[1] == self.hf_config["vocab_size"]
            assert torch.isfinite(logits).all()
            assert logits.dtype == torch.float32, f"compute_logits gives {logits.dtype}, not torch.float32"

    def test_reads_every_weight_that_it_asks_for(self) -> None:
        driven = self.make()
        expected = driven.build.weights.expected()
        assert expected, "it expects no weight: make its layers with `config` and `prefix`"
        assert set(driven.used_weights) == set(expected)

    def test_a_row_gives_in_a_batch_what_it_gives_alone(self) -> None:
        together = self.make().step(PROMPTS)
        for name, prompt in PROMPTS.items():
            self.assert_close(together[name], self.make().step({name: prompt})[name])

    @pytest.mark.parametrize("sizes", [(1, 22), (8, 8, 7), (22, 1), (1,) * 23], ids=str)
    def test_a_prompt_in_pieces_gives_what_it_gives_at_once(self, sizes: Sequence[int]) -> None:
        prompt, driven, parts, start = PROMPTS["long"], self.make(), [], 0
        for size in sizes:
            parts.append(driven.step({"r": prompt[start : start + size]})["r"])
            start += size
        self.assert_close(torch.cat(parts), self.make().step({"r": prompt})["r"])

    def test_padding_changes_nothing(self) -> None:
        plain, padded = self.make(), self.make()
        decode: dict[str, Sequence[int]] = {name: [11] for name in PROMPTS}
        for work in (PROMPTS, decode):
            expected, found = plain.step(work), padded.step(work, num_padding=3)
            for name in work:
                self.assert_close(found[name], expected[name])

    def test_requests_that_ended_leave_nothing_behind(self) -> None:
        driven = self.make(num_blocks=16)
        for name in ("first", "second"):
            driven.step({name: PROMPTS["long"]})
            driven.finish(name)
        self.assert_close(driven.step({"r": PROMPTS["other"]})["r"], self.make().step({"r": PROMPTS["other"]})["r"])


class QuantizationConformance:
    """A method, under a small Llama. Set `factory`, what the entry loads."""

    factory: ClassVar[Callable[[EngineConfig, ResolvedModel], QuantizationMethod]]
    tolerance: ClassVar[float] = 0.5
    """Most that logits may differ from those of plain weights, as a share of their own spread."""

    def make(self, *, is_plain: bool = False, **hf_fields: Any) -> ModelDriver:
        model = tiny_model()
        fields: dict[str, Any] = {} if is_plain else {"quantization": type(self).factory(EngineConfig(), model)}
        architecture = find_model(load_plugins().entries("pelton_models"), model.architecture).resolve()
        config = {**model.hf_config, "hidden_size": 64, "intermediate_size": 96, **hf_fields}
        return drive(architecture, config, **fields)

    def test_has_a_name(self) -> None:
        name = type(self).factory(EngineConfig(), tiny_model()).name
        assert isinstance(name, str) and name

    @pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
    def test_logits_are_near_those_of_plain_weights(self, bias: bool) -> None:
        fields = {"attention_bias": bias, "mlp_bias": bias}
        found, plain = self.make(**fields).step(PROMPTS), self.make(is_plain=True, **fields).step(PROMPTS)
        for name in PROMPTS:
            assert torch.isfinite(found[name]).all()
            off = (found[name] - plain[name]).abs().max() / plain[name].std()
            assert off <= self.tolerance, f"logits are off by {off:.3f} of their spread"

    def test_a_row_gives_in_a_batch_what_it_gives_alone(self) -> None:
        together = self.make().step(PROMPTS)
        for name, prompt in PROMPTS.items():
            torch.testing.assert_close(together[name], self.make().step({name: prompt})[name], atol=1e-3, rtol=1e-3)

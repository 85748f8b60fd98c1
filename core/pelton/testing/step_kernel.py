"""Conformance of whole-step kernels: a decode step by the kernel equals the step of the model's layers, run with pytest.

Subclass `StepKernelConformance` in a test module and say what is tested, and for which model:

    class TestMine(StepKernelConformance):
        kernel_class = MyKernel
        model_class = LlamaForCausalLM
        hf_config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pelton.attention.metadata import ForwardBatch
from pelton.ops.selector import reasons_against
from pelton.testing.model import drive
from pelton.testing.model_driver import ModelDriver
from pelton.worker.step_kernel import StepKernel, StepNeeds

PROMPTS: dict[str, Sequence[int]] = {
    "one": [5],
    "block": [9, 8, 7, 6],
    "long": [(7 * index) % 60 + 3 for index in range(21)],
}
"""The driver's blocks have four tokens: the next token of one begins a block."""


class StepKernelConformance:
    kernel_class: ClassVar[type[StepKernel]]
    model_class: ClassVar[Any]
    hf_config: ClassVar[dict[str, Any]]
    """config.json of a small model that the kernel serves; a vocabulary of 64 at least."""
    tolerance: ClassVar[float] = 1e-4
    """Of logits, and of what is written to the cache."""

    def needs(self, **changes: Any) -> StepNeeds:
        build = self._drive().build
        needs = StepNeeds(
            architecture=self.hf_config["architectures"][0], hf=build.hf, device_type="cpu", dtype=build.dtype_name,
            block_size=build.block_size, max_num_seqs=build.max_num_seqs,
        )  # fmt: skip
        return replace(needs, **changes)

    def test_serves_the_model_and_says_why_not_another(self) -> None:
        assert reasons_against(self.kernel_class, self.needs()) == []
        for changes in ({"architecture": "NobodysForCausalLM"}, {"dtype": "float8_e5m2"}):
            reasons = reasons_against(self.kernel_class, self.needs(**changes))
            assert reasons and all(isinstance(reason, str) and reason for reason in reasons), (
                f"it says nothing against {changes}"
            )

    @pytest.mark.parametrize("needs", [
        {"kv_dtype": "fp8"}, {"quantization": "nobodys"}, {"tp_size": 2},
    ], ids=lambda needs: next(iter(needs)))  # fmt: skip
    def test_refuses_what_it_has_not_read_about(self, needs: dict[str, Any]) -> None:
        (name,) = needs
        if name in self.kernel_class.handles:
            pytest.skip("it handles this")
        assert reasons_against(self.kernel_class, self.needs(**needs))

    @pytest.mark.parametrize("names", [["one"], ["block"], ["long"], ["one", "block", "long"]], ids="-".join)
    @pytest.mark.parametrize("num_padding", [0, 3])
    def test_equals_the_composed_step(self, names: list[str], num_padding: int) -> None:
        """For some steps in turn, each row's logits and all that is in the cache afterwards."""
        composed, driven, kernel = self._pair()
        for driver in (composed, driven):
            driver.step({name: PROMPTS[name] for name in names})
        for token in range(11, 17):
            work = {name: [token + index] for index, name in enumerate(names)}
            expected = composed.step(work, num_padding=num_padding)
            found = kernel.step(work, num_padding)
            for name in names:
                assert found[name].dtype is torch.float32 and found[name].shape == expected[name].shape
                torch.testing.assert_close(found[name], expected[name], atol=self.tolerance, rtol=self.tolerance)
        for mine, theirs in zip(_known_cache(driven, names), _known_cache(composed, names), strict=True):
            torch.testing.assert_close(mine, theirs, atol=self.tolerance, rtol=self.tolerance)

    def test_steps_of_the_layers_go_on_behind_it(self) -> None:
        composed, driven, kernel = self._pair()
        for driver in (composed, driven):
            driver.step(PROMPTS)
        kernel.step({name: [11] for name in PROMPTS}, 0)
        composed.step({name: [11] for name in PROMPTS})
        after = [driver.step({"long": [12, 13, 14]})["long"] for driver in (composed, driven)]
        torch.testing.assert_close(after[1], after[0], atol=self.tolerance, rtol=self.tolerance)

    def test_a_row_gives_in_a_batch_what_it_gives_alone(self) -> None:
        _, driven, together = self._pair()
        _, other, alone = self._pair()
        for driver in (driven, other):
            driver.step(PROMPTS)
        found = together.step({name: [11] for name in PROMPTS}, 0)
        for name in PROMPTS:
            torch.testing.assert_close(
                alone.step({name: [11]}, 0)[name], found[name], atol=self.tolerance, rtol=self.tolerance
            )

    def test_what_others_left_in_the_cache_is_not_read(self) -> None:
        composed, driven, kernel = self._pair()
        for driver in (composed, driven):
            driver.step(PROMPTS)
        used = {block for tables in driven._tables.values() for block in tables[0]}
        for layer in driven.build.cache_layers.values():
            for cache in (layer.k_cache, layer.v_cache):  # type: ignore[attr-defined]
                rest = [block for block in range(cache.shape[0]) if block not in used]
                cache[rest] = torch.nan
        work: dict[str, Sequence[int]] = {name: [11] for name in PROMPTS if name != "block"}  # no new block
        expected, found = composed.step(work), kernel.step(work, 2)
        for name in work:
            torch.testing.assert_close(found[name], expected[name], atol=self.tolerance, rtol=self.tolerance)

    def _drive(self) -> ModelDriver:
        return drive(type(self).model_class, self.hf_config)

    def _pair(self) -> tuple[ModelDriver, ModelDriver, _Driven]:
        """Two equal models, the second with a kernel."""
        made: list[StepKernel] = []

        def model_class(*, config: Any) -> Any:
            model = type(self).model_class(config=config)
            made.append(self.kernel_class(model, config))
            config.ops.read_by(made[0])
            return model

        driven = drive(model_class, self.hf_config)
        return self._drive(), driven, _Driven(driven, made[0])


@dataclass
class _Driven:
    """Decode steps of a driver's requests by a kernel."""

    driver: ModelDriver
    kernel: StepKernel

    def step(self, work: Mapping[str, Sequence[int]], num_padding: int) -> dict[str, Tensor]:
        def run(batch: ForwardBatch) -> Tensor:
            return self.kernel(batch)

        model = self.driver.model
        forward, compute_logits = model.forward, model.compute_logits
        model.forward, model.compute_logits = run, lambda logits, rows: logits[rows]
        try:
            return self.driver.step(work, num_padding=num_padding)
        finally:
            model.forward, model.compute_logits = forward, compute_logits


def _known_cache(driver: ModelDriver, names: Sequence[str]) -> list[Tensor]:
    """Keys and values of the requests' tokens."""
    found = []
    for layer in driver.build.cache_layers.values():
        for cache in (layer.k_cache, layer.v_cache):  # type: ignore[attr-defined]
            for name in names:
                blocks = cache[driver._tables[name][0]]
                found.append(blocks.flatten(0, 1)[: driver._computed[name]])
    return found

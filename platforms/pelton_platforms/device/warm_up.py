"""Warm-up steps: every kind of step that requests can ask for, run on padding, so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from pelton.sampling.tails import FULL, Sample, Variant, Verify
from pelton.worker.inputs import StepShape
from pelton_platforms.device.graphs.capture_plan import CapturePlan
from pelton_platforms.device.graphs.dispatcher import default_sizes
from pelton_platforms.device.graphs.graph_runner import GraphRunner
from pelton_platforms.device.steps.model_runner import ModelRunner
from pelton_platforms.device.steps.step_shapes import padding_shape

_SHORT = 16
_PROMPTS = (_SHORT, 64, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of prompts: attention, and what lies between two layers, have kernels for few and for many."""
_RARE = (Variant(has_logprobs=True), Variant(has_mask=True), Variant(has_mask=True, has_logprobs=True))
"""Variants of sampling that no graph is captured with at the start."""


@dataclass(frozen=True, slots=True)
class WarmUpPlan:
    """Steps of nothing but padding; each is run by a call."""

    steps: tuple[Callable[[], None], ...]
    """Every kind of step that requests ask for, but for those of `sentinels`."""
    sentinels: tuple[Callable[[], None], ...]
    """They need kernels that hardly a request asks for, and some of every other kind: an earlier start that has compiled these has
    compiled them all."""

    @classmethod
    def make(cls, runner: ModelRunner) -> WarmUpPlan:
        steps = [] if runner.graphs is None else list(_captured(runner, runner.graphs))
        steps += [partial(runner.run_padding, shape, piecewise=True) for shape in _piecewise_shapes(runner)]
        steps += [partial(runner.run_padding, shape, runner.tails.variants) for shape in _eager_shapes(runner)]
        rare = _RARE if FULL in runner.tails.variants else ()
        last = padding_shape(1, runner.state.max_model_len)
        sentinels: list[Callable[[], None]] = [runner.run_prompt_logprobs, partial(runner.run_padding, last, rare)]
        if runner.ops.adapters is not None:
            steps += _adapted(runner)
            sentinels.append(partial(runner.run_padding, last, has_adapters=True))
        return cls(tuple(steps), tuple(sentinels))

    def all(self) -> tuple[Callable[[], None], ...]:
        return self.steps + self.sentinels

    def longest_first(self) -> tuple[Callable[[], None], ...]:
        """All of them, those of long prompts first: their kernels take a compiler longest."""
        return self.steps[::-1] + self.sentinels


def run_with_few_layers(model: Any, steps: Iterable[Callable[[], None]]) -> None:
    """Run steps through one layer of each kind."""
    with few_layers(model):
        for step in steps:
            step()


@contextmanager
def few_layers(model: Any) -> Iterator[None]:
    """Leave a model that is a chain of layers its first one, whose residual is missing, and then one of each kind, or as many in all as
    the model's `warm_up_layers_of_a_kind` says. The others launch the same kernels: going through 28 layers of every step took 25 s of a
    first start on the H200 machine."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        yield
        return
    kinds: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(_kind(layer), []).append(index)
    count = getattr(model, "warm_up_layers_of_a_kind", 1)
    some = (place for places in kinds.values() for place in places[: max(count, 1 + (places[0] == 0))])
    _set_layers(model, nn.ModuleList(layers[index] for index in sorted({0, *some})))
    try:
        yield
    finally:
        _set_layers(model, layers)


def _set_layers(model: nn.Module, layers: nn.ModuleList) -> None:
    """Set them where a model keeps them: torch would put a module beside a property of that name."""
    own = getattr(type(model), "layers", None)
    if isinstance(own, property) and own.fset is not None:
        own.fset(model, layers)
    else:
        model.layers = layers


def _kind(layer: nn.Module) -> Hashable:
    """Return what layers that launch the same kernels have in common."""
    return tuple((name, type(module), _shapes(module), _settings(module)) for name, module in layer.named_modules())


def _shapes(module: nn.Module) -> Hashable:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return tuple((name, tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors)


def _settings(module: nn.Module) -> Hashable:
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if name not in ("group_id", "metadata_index")  # groups of one kind differ in their tables alone
        and (isinstance(value, int | float | None) or (is_dataclass(value) and not _has_tensors(value)))
    )


def _has_tensors(value: Any) -> bool:
    return any(isinstance(getattr(value, field.name), Tensor) for field in fields(value))


def _captured(runner: ModelRunner, graphs: GraphRunner) -> Iterator[Callable[[], None]]:
    """Every size that is captured; sampling, and attention behind a common prefix, are the same for many of them."""
    first = runner.tails.variants[0]
    for mode, key in CapturePlan.make(graphs.dispatcher, runner.tails.variants).captures:
        size = key.num_reqs
        is_power = size & (size - 1) == 0
        if key.uniform_query_len == 1 and key.tail == Sample(first) and is_power and _shares_prefix(runner, size):
            yield partial(graphs.warm_up, mode, replace(key, has_common_prefix=True), captures=False)
        if is_power or key.tail in (None, Sample(first), Verify(first)):
            yield partial(graphs.warm_up, mode, key, captures=False)


def _adapted(runner: ModelRunner) -> Iterator[Callable[[], None]]:
    """Steps with adapters: products have kernels of their own there, which follow the number of tokens. All else is as without."""
    longest, most_tokens = runner.state.max_model_len, runner.buffers.max_num_tokens
    for num_rows in _powers(min(runner.state.max_num_seqs, most_tokens)):
        yield partial(runner.run_padding, padding_shape(1, longest, num_rows - 1), has_adapters=True)
    for num_tokens in _PROMPTS:
        if num_tokens <= most_tokens:
            yield partial(runner.run_padding, padding_shape(num_tokens, longest), has_adapters=True)


def _eager_shapes(runner: ModelRunner) -> Iterator[StepShape]:
    """Rows of one token, where no graphs serve them; prompts alone, at their beginning and behind a long context; prompts
    beside rows of one token."""
    longest, most_tokens = runner.state.max_model_len, runner.buffers.max_num_tokens
    if runner.graphs is None or not runner.graphs.dispatcher.most_decode_rows:
        for num_rows in default_sizes(min(runner.state.max_num_seqs, most_tokens)):
            yield padding_shape(1, longest, num_rows - 1)
            if _shares_prefix(runner, num_rows):
                for blocks in (_widths(runner), tuple(width // 2 for width in _widths(runner))):
                    yield replace(padding_shape(1, longest, num_rows - 1), common_prefix_blocks=blocks)
    for num_tokens in _PROMPTS:
        if num_tokens <= most_tokens:
            for max_seq_len in sorted({min(num_tokens, longest), longest}):
                yield padding_shape(num_tokens, max_seq_len)
    for num_rows in _powers(min(runner.state.max_num_seqs - 1, most_tokens - _SHORT)):
        yield padding_shape(_SHORT, longest, num_rows)


def _piecewise_shapes(runner: ModelRunner) -> Iterator[StepShape]:
    """Rows of one token, alone and beside a prompt. Prompts alone are among the sizes that are captured."""
    most_tokens = 0 if runner.graphs is None else runner.graphs.dispatcher.most_piece_tokens
    longest, most_rows = runner.state.max_model_len, runner.state.max_num_seqs
    for num_rows in _powers(min(most_rows, most_tokens)):
        yield padding_shape(1, longest, num_rows - 1)
    for num_rows in _powers(min(most_rows - 1, most_tokens - _SHORT)):
        yield padding_shape(_SHORT, longest, num_rows)


def _powers(most: int) -> list[int]:
    """Powers of two, and `most` itself; none when it is below 1."""
    return sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}) if most > 0 else []


def _shares_prefix(runner: ModelRunner, num_rows: int) -> bool:
    """Return whether some group's attention reads a prefix of the longest kind once for so many rows."""
    lengths = [width * size for width, size in zip(_widths(runner), runner.state.block_sizes, strict=True)]
    return any(
        backend.group_id >= 0 and backend.uses_common_prefix(num_rows, lengths[backend.group_id])
        for backend in runner.backends
    )


def _widths(runner: ModelRunner) -> tuple[int, ...]:
    """Blocks of the longest row, by group."""
    return tuple(table.shape[1] for table in runner.state.block_tables)

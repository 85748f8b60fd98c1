"""How many tokens a step may have so that it lasts no longer than it should: by a measurement at the start.

A large model on a slow device computes a few tokens a second, a small one on a fast device thousands: no one number of tokens
suits both. While a step runs nobody gets a token, and nothing can be stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pelton.attention.interface import AttentionNeeds
from pelton.layers.embedding import VocabMatrix
from pelton.layers.linear import LinearModule
from pelton.messages.report import StepFit
from pelton_platforms.device.steps.step_shapes import padding_shape

if TYPE_CHECKING:
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.steps.model_runner import ModelRunner

LEAST_PROMPT_TOKENS = 64
"""Of a step beside a row for each request that may run: fewer would read the weights too often, whatever the speed."""
_TRIED_TOKENS = (4, 32, 128)
_ENOUGH_S = 0.06
"""Of a step that says the speed well enough: the next larger one is not tried any more."""
_SLOW_S = 0.25
"""The same of the first step: where few tokens take no longer, more may take little more."""
_MOST_TRIES = 3
_SHARED = 1.2
"""A step that takes longer than it should by this factor was held up."""


class Speed(NamedTuple):
    """Speed of large steps, as measured."""

    tokens_s: float
    is_shared: bool = False
    """Other programs were using the cores during the measurement: the speed alone is higher."""


def measure_speed(
    run: Callable[[int], None],
    most: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] | None = None,
    agree: Callable[[float, float], tuple[float, ...]] | None = None,
) -> Speed:
    """Tokens a second of steps with many, by `run(num_tokens)`, which computes one and waits for it; never with more than
    `most`. It starts with few tokens, so that a slow device has done after one step, and a fast one in an eighth of a second. A step
    that is slower, a token, than a smaller one is tried again: other work has held it up.

    cpu_clock: seconds of all threads of this process, where they compute the step. Alone it lasts no longer than all of them
    together take, whatever it takes beside other work. agree: from this rank's two measurements of a step to those that all ranks take:
    they have to run the same steps.
    """
    found = Speed(0.0)
    for num_tokens in [count for count in _TRIED_TOKENS if count <= most] or [most]:
        for _ in range(_MOST_TRIES):
            started, cpu_started = clock(), cpu_clock() if cpu_clock else 0.0
            run(num_tokens)
            seconds = wall_s = max(clock() - started, 1e-9)
            if cpu_clock:
                seconds = min(wall_s, max(cpu_clock() - cpu_started, 1e-9))
            if agree:
                seconds, wall_s = agree(seconds, wall_s)
            speed = num_tokens / seconds
            is_held_up = speed < found.tokens_s / _SHARED
            if speed >= found.tokens_s:
                found = Speed(speed, wall_s > _SHARED * seconds)
            if not is_held_up:
                break
        if seconds > (_SLOW_S if num_tokens == _TRIED_TOKENS[0] else _ENOUGH_S):
            break
    return found._replace(is_shared=found.is_shared or is_held_up)


def fitting_tokens(speed: float, target_s: float, least: int, most: int) -> int:
    """Tokens of a step that takes `target_s` at most, within the bounds whatever the speed: 4, 5, 6 or 7 times a power of two,
    so that the noise of a measurement changes little."""
    fitting = max(int(speed * target_s), 4)
    quarter = 1 << (fitting.bit_length() - 3)
    return min(max(fitting - fitting % quarter, least), most)


def fit_step(loaded: LoadedModel, runner: ModelRunner, target_s: float) -> StepFit:
    """Find how many tokens a step of `target_s` may have. Padding is computed for it: attention over a long context is reckoned by
    its operations."""

    def run(num_tokens: int) -> None:
        runner.run_padding(padding_shape(num_tokens, num_tokens))
        loaded.platform.synchronize()

    cpu_clock = time.process_time if loaded.device.type == "cpu" else None
    parallel = loaded.build.parallel
    groups: list[Any] = [parallel] if parallel.size > 1 else []
    groups += [] if parallel.stages is None else [parallel.stages]

    def slowest(*seconds: float) -> tuple[float, ...]:
        found = torch.tensor([seconds], dtype=torch.float64, device=loaded.device)
        for group in groups:
            found = group.all_gather(found, 0).amax(0, keepdim=True)
        return tuple(found[0].tolist())

    speed = measure_speed(run, loaded.max_num_tokens, cpu_clock=cpu_clock, agree=slowest if groups else None)
    least = max(loaded.max_num_seqs + LEAST_PROMPT_TOKENS, loaded.config.kv_cache.block_size)
    count = fitting_tokens(speed.tokens_s, target_s, least, loaded.max_num_tokens)
    if count < loaded.max_num_tokens:
        loaded.notes.append(budget_note(count, speed))
    layers = loaded.build.cache_layers.values()
    return StepFit(num_tokens=count, context_tokens=context_tokens(loaded.model, layers))


def budget_note(count: int, speed: Speed) -> str:
    """The row of the start table about a budget that a measurement has lowered to `count` tokens."""
    note = f"max_num_batched_tokens {count}: {count / speed.tokens_s:.1f} s a step at the measured {speed.tokens_s:.0f} tokens/s"
    if not speed.is_shared:
        return note
    return f"{note}; other programs were using the cores: a start without them may choose more"


def product_operations(model: Any) -> int:
    """Operations of a token's products, the vocabulary's left out. All experts of a layer count."""
    return 2 * sum(
        module.spec.in_features * module.spec.out_features
        for module in model.modules()
        if isinstance(module, LinearModule) and not isinstance(module, VocabMatrix)
    )


def context_tokens(model: Any, layers: Iterable[Any]) -> int:
    """Tokens of context at which a token's attention in these layers has as many operations as its products; 0 where none
    attends to all. Layers with a window and sparse ones read no more of a long context, and those of other kinds a state."""
    needs = [layer.needs for layer in layers if isinstance(getattr(layer, "needs", None), AttentionNeeds)]
    operations = sum(
        4 * need.num_heads * need.head_dim for need in needs if not (need.sliding_window or need.is_sparse)
    )
    return product_operations(model) // operations if operations else 0

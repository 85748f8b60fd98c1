"""Bring a rank together with those of the other engines that share its experts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError
from pelton.parallel.communicator import CommunicatorContext, GroupContext, make_communicator
from pelton.utils.cache_folder import remove_at_end
from pelton_plugins.executors.shared_experts.exchange import EngineExchange
from pelton_plugins.executors.shared_experts.lock_step import LockStep
from pelton_plugins.executors.shared_experts.meeting import meet

if TYPE_CHECKING:
    import torch

    from pelton.executor.interface import ExecutorContext
    from pelton.platform.interface import Platform

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what config.json calls them
TIMEOUT_S = 300.0
"""Who dies is noticed by the engines' client, which ends all of them. One that lives may be busy for long: it reads weights."""


def check_experts(context: ExecutorContext) -> None:
    """Raise `ConfigError` for expert parallelism of a model without experts, or where it does not go."""
    parallel, hf = context.config.parallel, context.model.hf_config
    if parallel.enable_expert_parallel and not any(hf.get(name) for name in _EXPERT_COUNTS):
        raise ConfigError(
            f"enable_expert_parallel is set, and {context.model.name} ({context.model.architecture}) has no experts: config.json has "
            f"none of {', '.join(_EXPERT_COUNTS)}. Leave it off."
        )
    if not parallel.shares_experts:
        return
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, which does not go with engines that share their experts "
            "(enable_expert_parallel with data_parallel_size). Use tensor_parallel_size."
        )
    if parallel.data_parallel_store is None:
        raise ConfigError(
            f"enable_expert_parallel is set, and of {parallel.data_parallel_size} engines (data_parallel_size) this one is started alone: "
            "engines that share their experts are started together, by one server on one host."
        )


def share_experts(
    context: ExecutorContext,
    platform: Platform,
    group: GroupContext,
    device: torch.device,
    submit: Callable[[Callable[[], None]], Future[Any]],
) -> LockStep:
    """Wait for the ranks of all engines, and make `group.experts`."""
    parallel = context.config.parallel
    assert parallel.data_parallel_store is not None, "see `check_experts`"
    folder, num_engines, engine = (
        Path(parallel.data_parallel_store),
        parallel.data_parallel_size,
        parallel.data_parallel_rank,
    )
    rank, size = engine * group.size + group.rank, num_engines * group.size
    remove_at_end(folder)
    store = meet(folder, rank, size, TIMEOUT_S)
    everyone = CommunicatorContext(
        rank=rank, size=size, device=device, store=f"{store}-all", group="ep", timeout_s=TIMEOUT_S, engine_config=context.config,
    )  # fmt: skip
    place = replace(everyone, rank=engine, size=num_engines, store=f"{store}-{group.rank}", group=f"dp{group.rank}")
    exchange = EngineExchange(make_communicator(context.plugins, place, platform.device_type))
    group.experts = exchange
    return LockStep(
        make_communicator(context.plugins, everyone, platform.device_type),
        exchange,
        submit,
        folder=folder,
        device=device,
    )

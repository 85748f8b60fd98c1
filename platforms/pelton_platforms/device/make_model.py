"""A worker's model on its device: its modules, and what computes beside them (adapters, a drafter, a kernel of the whole step)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pelton.attention.kv_cache import cache_specs
from pelton.errors import ConfigError
from pelton.model.build import make_build_config
from pelton.model.registry import build_model
from pelton_platforms.device.graphs.graph_setup import limits_of_stages
from pelton_platforms.device.host_copy import cuda_copier
from pelton_platforms.device.large_pages import LargePages
from pelton_platforms.device.loaded import LoadedModel
from pelton_platforms.device.step_kernel import make_step_kernel

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.platform.interface import Platform
    from pelton.worker.interface import WorkerContext


def check_dtype(info: ResolvedModel, platform: Platform) -> None:
    """Raises `ConfigError` for a model in a dtype that the platform does not compute in."""
    if info.dtype not in platform.supported_dtypes:
        raise ConfigError(
            f"dtype is {info.dtype!r}, which platform {platform.name!r} does not compute in; use one of "
            f"{', '.join(platform.supported_dtypes)}."
        )


def use_device_memory(build: BuildConfig) -> None:
    """Let the layers of `build` have the memory that this kind of device offers for parameters and caches. Before the first is made."""
    if build.device.type == "cpu":
        build.allocate = LargePages().zeros
    elif build.device.type == "cuda":
        build.weights.make_copier = cuda_copier


@torch.inference_mode()
def make_model(
    context: WorkerContext,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_num_tokens: int,
    choices: dict[str, str],
    notes: list[str],
) -> LoadedModel:
    """Make all of it without weights. choices, notes: see `LoadedModel`; what is chosen and refused here is added to them."""
    config, info, platform, plugins = context.config, context.model, context.platform, context.plugins
    parallel = context.parallel
    if parallel.size > 1:
        from pelton_platforms.device.steps.logit_shares import LogitShares

        parallel = LogitShares(parallel)
    build = make_build_config(
        config, info, plugins, device=device, device_type=platform.device_type, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_tokens, capability=platform.capability(context.rank), parallel=parallel,
    )  # fmt: skip
    use_device_memory(build)
    memory = None
    if config.lora.enable_lora:
        from pelton_platforms.device.adapter_memory import make_adapter_memory

        build.adapters = memory = make_adapter_memory(config, device, max_num_tokens)
    model, adapters = build_model(build, info.architecture, plugins), None
    limits = limits_of_stages(build, model)
    if memory is not None:
        from pelton_platforms.device.adapters import make_adapters

        adapters = make_adapters(build, memory)
    loaded = LoadedModel(
        config=config, info=info, platform=platform, plugins=plugins, rank=context.rank, build=build, model=model,
        specs=cache_specs(build), device=device, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, adapters=adapters,
        graph_limits=limits, choices=choices, notes=notes,
    )  # fmt: skip
    if config.speculative.method is not None or config.speculative.model is not None:
        from pelton_platforms.device.drafters import make_drafter

        loaded = replace(loaded, drafter=make_drafter(loaded))
    return loaded if loaded.drafter is not None else replace(loaded, step_kernel=make_step_kernel(loaded))

"""Facts that the parts of a worker share: a model on its device, and what it was started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pelton_platforms.device.graphs.graph_setup import GraphLimits

if TYPE_CHECKING:
    import torch

    from pelton.config import EngineConfig
    from pelton.kv_cache.spec import KVCacheSpec
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.platform.interface import Platform
    from pelton.plugins import Plugins
    from pelton.spec_decode.drafter import Drafter
    from pelton.worker.step_kernel import StepKernel
    from pelton_platforms.device.adapters import AdapterStore


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Made once the modules are there; their weights may come later."""

    config: EngineConfig
    info: ResolvedModel
    platform: Platform
    plugins: Plugins
    rank: int
    """Of the device on this host."""
    build: BuildConfig
    model: Any
    """A `CausalLM`, or a `PoolingModel`."""
    specs: dict[str, KVCacheSpec]
    device: torch.device
    max_num_seqs: int
    max_num_tokens: int
    adapters: AdapterStore | None
    """None: the engine serves no adapters."""
    step_kernel: StepKernel | None = None
    """Computes decode steps; None: the model's layers do."""
    drafter: Drafter | None = None
    """Makes drafts from weights of its own; None: there are none, or they come from elsewhere."""
    graph_limits: GraphLimits = field(default_factory=GraphLimits)
    """Of all stages."""
    choices: dict[str, str]
    """What plugins chose, by name: rows of the start table."""
    notes: list[str]
    """Notes for the operator on settings that were changed at the start."""

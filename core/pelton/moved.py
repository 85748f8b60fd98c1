"""Old public places of modules and names: plugins still find them there, with a warning, for one minor version.

A module is the same object under both names. It is imported by its old name once in a process, and warned of once.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "pelton.attention.layer": "pelton.layers.attention",
    "pelton.attention.mla": "pelton_plugins.models.latent_attention",
    "pelton.cache_folder": "pelton.utils.cache_folder",
    "pelton.engine.messages": "pelton.messages.outputs",
    "pelton.executor.in_process": "pelton_plugins.executors.in_process",
    "pelton.garbage": "pelton.utils.garbage",
    "pelton.graphs.call_graph": "pelton_platforms.device.graphs.call_graph",
    "pelton.graphs.captures": "pelton_platforms.device.graphs.captures",
    "pelton.graphs.dispatcher": "pelton_platforms.device.graphs.dispatcher",
    "pelton.graphs.modes": "pelton_platforms.device.graphs.modes",
    "pelton.graphs.tape": "pelton_platforms.device.graphs.call_graph",
    "pelton.kv_cache.block_pool": "pelton_plugins.kv_cache.block_pool",
    "pelton.kv_cache.coordinator": "pelton_plugins.kv_cache.coordinator",
    "pelton.kv_cache.manager": "pelton_plugins.kv_cache.manager",
    "pelton.kv_cache.single_type": "pelton_plugins.kv_cache.single_type",
    "pelton.large_pages": "pelton.utils.large_pages",
    "pelton.layers.encoder_attention": "pelton_plugins.models.encoder_attention",
    "pelton.layers.latent_attention": "pelton_plugins.models.latent_attention",
    "pelton.layers.mla": "pelton_plugins.models.mla",
    "pelton.layers.moe": "pelton_plugins.models.experts",
    "pelton.lora.composed": "pelton_backends.reference.composed_lora",
    "pelton.lora.reference": "pelton_backends.reference.lora",
    "pelton.lora.store": "pelton_platforms.device.adapters",
    "pelton.ops.reference_moe": "pelton_backends.reference.moe",
    "pelton.ops.reference_speculation": "pelton_backends.reference.speculation",
    "pelton.ops.reference_step": "pelton_platforms.device.steps.reference_step",
    "pelton.quantization.blocks": "pelton.ops.packed_blocks",
    "pelton.request": "pelton.messages.request",
    "pelton.sampling.filters": "pelton_platforms.device.sampling.filters",
    "pelton.sampling.metadata": "pelton_platforms.device.sampling.metadata",
    "pelton.sampling.penalties": "pelton_platforms.device.sampling.penalties",
    "pelton.sampling.sampler": "pelton_platforms.device.sampling.sampler",
    "pelton.scheduler.adapters": "pelton_plugins.scheduler.adapters",
    "pelton.scheduler.admission": "pelton_plugins.scheduler.admission",
    "pelton.scheduler.allocations": "pelton_plugins.scheduler.allocations",
    "pelton.scheduler.common_prefix": "pelton_plugins.scheduler.common_prefix",
    "pelton.scheduler.deadlines": "pelton_plugins.scheduler.deadlines",
    "pelton.scheduler.drafts": "pelton_plugins.scheduler.drafts",
    "pelton.scheduler.grammars": "pelton_plugins.scheduler.grammars",
    "pelton.scheduler.invalid_blocks": "pelton_plugins.scheduler.invalid_blocks",
    "pelton.scheduler.kv_transfers": "pelton_plugins.scheduler.kv_transfers",
    "pelton.scheduler.output": "pelton.messages.step",
    "pelton.scheduler.preemption": "pelton_plugins.scheduler.preemption",
    "pelton.scheduler.request_checks": "pelton_plugins.scheduler.request_checks",
    "pelton.scheduler.request_table": "pelton_plugins.scheduler.request_table",
    "pelton.scheduler.running": "pelton_plugins.scheduler.running",
    "pelton.scheduler.scheduler": "pelton_plugins.scheduler.scheduler",
    "pelton.scheduler.slots": "pelton_plugins.scheduler.slots",
    "pelton.scheduler.step": "pelton_plugins.scheduler.step",
    "pelton.scheduler.step_results": "pelton_plugins.scheduler.step_results",
    "pelton.spec_decode.rejection": "pelton_platforms.device.steps.rejection",
    "pelton.utils.staging": "pelton_platforms.device.steps.staging",
    "pelton.worker.capture_plan": "pelton_platforms.device.graphs.capture_plan",
    "pelton.worker.drafts": "pelton_platforms.device.steps.drafts",
    "pelton.worker.first_start": "pelton_platforms.device.first_start",
    "pelton.worker.graph_columns": "pelton_platforms.device.graphs.graph_columns",
    "pelton.worker.graph_runner": "pelton_platforms.device.graphs.graph_runner",
    "pelton.worker.graph_setup": "pelton_platforms.device.graphs.graph_setup",
    "pelton.worker.kv_pool": "pelton_platforms.device.kv_pool",
    "pelton.worker.load_weights": "pelton_platforms.device.load_weights",
    "pelton.worker.loaded": "pelton_platforms.device.loaded",
    "pelton.worker.make_runner": "pelton_platforms.device.make_runner",
    "pelton.worker.memory": "pelton_platforms.device.memory",
    "pelton.worker.model_runner": "pelton_platforms.device.steps.model_runner",
    "pelton.worker.readback": "pelton_platforms.device.steps.readback",
    "pelton.worker.reference_step": "pelton_platforms.device.steps.reference_step",
    "pelton.worker.speed": "pelton_platforms.device.speed",
    "pelton.worker.staging": "pelton_platforms.device.steps.staging",
    "pelton.worker.step_adapters": "pelton_platforms.device.steps.step_adapters",
    "pelton.worker.step_drafts": "pelton_platforms.device.steps.step_drafts",
    "pelton.worker.step_ops": "pelton_platforms.device.steps.step_ops",
    "pelton.worker.step_plan": "pelton_platforms.device.steps.step_plan",
    "pelton.worker.step_program": "pelton_platforms.device.steps.step_program",
    "pelton.worker.step_sampler": "pelton_platforms.device.steps.step_sampler",
    "pelton.worker.step_tails": "pelton_platforms.device.steps.step_tails",
    "pelton.worker.warm_up": "pelton_platforms.device.warm_up",
    "pelton.worker.worker": "pelton_platforms.device.worker",
}
"""Old name to new: of other trees only the names, which nothing here imports before it is asked for."""
NAMES = {
    "pelton.layers.encoder": {
        name: f"pelton_plugins.models.encoder_layers.{name}" for name in ("LayerNorm", "Table", "activation")
    },
    "pelton.layers.linear": {
        "PlainWeights": "pelton.quantization.plain.PlainWeights",
        "QuantizationMethod": "pelton.quantization.interface.QuantizationMethod",
        "make_bias": "pelton.quantization.plain.make_bias",
    },
    "pelton.ops.reference": {
        name: f"pelton_backends.reference.ops.{name}"
        for name in (
            "ReferenceAddNorm",
            "ReferenceAddNormGatedLinear",
            "ReferenceAddNormLinear",
            "ReferenceAddNormLogits",
            "ReferenceAllReduce",
            "ReferenceEmbed",
            "ReferenceGated",
            "ReferenceLinear",
            "ReferenceQkNormRopeWriteKv",
        )
    },
    "pelton.sampling.side_tables": {"SideTables": "pelton_platforms.device.steps.side_tables.SideTables"},
    "pelton.scheduler.gates": {
        "AdapterGate": "pelton_plugins.scheduler.gates.AdapterGate",
        "GrammarGate": "pelton_plugins.scheduler.gates.GrammarGate",
        "InFlightGate": "pelton_plugins.scheduler.gates.InFlightGate",
        "PolicyGate": "pelton_plugins.scheduler.gates.PolicyGate",
        "RemoteKVGate": "pelton_plugins.scheduler.gates.RemoteKVGate",
        "SideSlotGate": "pelton_plugins.scheduler.gates.SideSlotGate",
    },
    "pelton.scheduler.policy": {
        "FCFSPolicy": "pelton_plugins.scheduler.policies.FCFSPolicy",
        "PriorityPolicy": "pelton_plugins.scheduler.policies.PriorityPolicy",
        "RequestQueue": "pelton_plugins.scheduler.queue.RequestQueue",
    },
    "pelton.worker.batch_state": {
        "BatchState": "pelton_platforms.device.steps.batch_state.BatchState",
        "HostColumns": "pelton_platforms.device.steps.batch_state.HostColumns",
    },
    "pelton.tokenizer": {"load_tokenizer": "pelton.model.resolve.load_tokenizer"},
}
"""Names that are others now, or elsewhere, by the module that had them: it has `names_of` as its `__getattr__`. Modules of other trees
hold theirs themselves."""


class _OldModules(MetaPathFinder, Loader):
    """Finds a module of `MODULES` by its old name, after all other finders have failed to."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        _warn(old, MODULES[old])
        sys.modules[old] = importlib.import_module(MODULES[old])


def install() -> None:
    """Let old modules be found in this process."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())


def names_of(module: str, names: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module that had `names`, by default those of `NAMES`."""
    known = NAMES[module] if names is None else names

    def get(name: str) -> Any:
        found = known.get(name)
        if found is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", found)
        home, _, new = found.rpartition(".")
        return getattr(importlib.import_module(home), new)

    return get


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is {new} now; import it from there.", DeprecationWarning, stacklevel=3)

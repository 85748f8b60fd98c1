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

_FOLDERS = {
    ("pelton", "pelton.utils"): "cache_folder garbage",
    ("pelton.config", "pelton_plugins.flags"): "settings_file",
    ("pelton.graphs", "pelton_platforms.device.graphs"): "call_graph captures dispatcher modes",
    ("pelton.kv_cache", "pelton_plugins.kv_cache"): "block_pool coordinator manager single_type",
    ("pelton.layers", "pelton_plugins.models"): "encoder_attention latent_attention mla normed",
    ("pelton.sampling", "pelton_platforms.device.sampling"): "filters metadata penalties random sampler",
    ("pelton.scheduler", "pelton_plugins.scheduler"): (
        "adapters admission allocations common_prefix deadlines drafts grammars invalid_blocks kv_transfers "
        "preemption request_checks request_table running scheduler slots step step_results"
    ),
    ("pelton.worker", "pelton_platforms.device"): (
        "first_start kv_pool load_weights loaded make_runner memory speed warm_up worker"
    ),
    ("pelton.worker", "pelton_platforms.device.graphs"): "capture_plan graph_columns graph_runner graph_setup",
    ("pelton.worker", "pelton_platforms.device.steps"): (
        "model_runner readback reference_step staging step_adapters step_drafts step_ops step_plan "
        "step_program step_sampler step_tails"
    ),
}
"""(old package, new package): the modules that have moved from one to the other under their own names."""
MODULES = {f"{old}.{name}": f"{new}.{name}" for (old, new), names in _FOLDERS.items() for name in names.split()} | {
    "pelton.attention.layer": "pelton.layers.attention",
    "pelton.large_pages": "pelton_platforms.device.large_pages",
    "pelton.metrics.buckets": "pelton_plugins.histograms.buckets",
    "pelton.model.host_copy": "pelton_platforms.device.host_copy",
    "pelton.utils.large_pages": "pelton_platforms.device.large_pages",
    "pelton.attention.mla": "pelton_plugins.models.latent_attention",
    "pelton.config.flag_help": "pelton_plugins.flags.help",
    "pelton.config.flag_table": "pelton_plugins.flags.table",
    "pelton.config.flag_values": "pelton_plugins.flags.values",
    "pelton.config.flags": "pelton_plugins.flags.parser",
    "pelton.engine.messages": "pelton.messages.outputs",
    "pelton.executor.in_process": "pelton_plugins.executors.in_process",
    "pelton.graphs.tape": "pelton_platforms.device.graphs.call_graph",
    "pelton.layers.moe": "pelton_plugins.models.experts",
    "pelton.lora.composed": "pelton_backends.reference.composed_lora",
    "pelton.lora.reference": "pelton_backends.reference.lora",
    "pelton.lora.store": "pelton_platforms.device.adapters",
    "pelton.ops.reference_moe": "pelton_backends.reference.moe",
    "pelton.ops.reference_speculation": "pelton_backends.reference.speculation",
    "pelton.ops.reference_step": "pelton_platforms.device.steps.reference_step",
    "pelton.quantization.blocks": "pelton.ops.packed_blocks",
    "pelton.quantization.packed": "pelton_plugins.weight_forms.packed",
    "pelton.request": "pelton.messages.request",
    "pelton.scheduler.output": "pelton.messages.step",
    "pelton.spec_decode.rejection": "pelton_platforms.device.steps.rejection",
    "pelton.utils.staging": "pelton_platforms.device.steps.staging",
}
"""Old name to new: of other trees only the names, which nothing here imports before it is asked for."""
_NAMES = {
    ("pelton.layers.encoder", "pelton_plugins.models.encoder_layers"): "LayerNorm Table activation",
    ("pelton.layers.linear", "pelton.quantization.interface"): "QuantizationMethod",
    ("pelton.layers.linear", "pelton.quantization.plain"): "PlainWeights make_bias",
    ("pelton.lora.peft", "pelton_platforms.device.peft_tensors"): "read_tensors split_name",
    ("pelton.lora.rows", "pelton_platforms.device.adapter_rows"): "AdapterRows",
    ("pelton.ops.packed_blocks", "pelton_plugins.weight_forms.block_writing"): "pack quantize",
    ("pelton.ops.reference", "pelton_backends.reference.linear"): "linear",
    ("pelton.ops.reference", "pelton_backends.reference.ops"): (
        "ReferenceAddNorm ReferenceAddNormGatedLinear ReferenceAddNormLinear ReferenceAddNormLogits ReferenceAllReduce "
        "ReferenceEmbed ReferenceGated ReferenceLinear ReferenceQkNormRopeWriteKv add_residual gated"
    ),
    ("pelton.sampling.side_tables", "pelton_platforms.device.steps.side_tables"): "SideTables side_table_bytes",
    ("pelton.scheduler.gates", "pelton_plugins.scheduler.gates"): (
        "AdapterGate GrammarGate InFlightGate PolicyGate RemoteKVGate SideSlotGate"
    ),
    ("pelton.scheduler.policy", "pelton_plugins.scheduler.policies"): "FCFSPolicy PriorityPolicy",
    ("pelton.scheduler.policy", "pelton_plugins.scheduler.queue"): "RequestQueue",
    ("pelton.tokenizer", "pelton.model.resolve"): "load_tokenizer",
    ("pelton.worker.batch_state", "pelton_platforms.device.steps.batch_state"): "BatchState HostColumns",
    ("pelton.worker.inputs", "pelton_platforms.device.steps.reference_step"): "prepare_inputs",
    ("pelton.worker.inputs", "pelton_platforms.device.steps.step_shapes"): "padding_shape uncached_metadata",
}
"""(old module, new module): the names that have moved from one to the other."""
NAMES: dict[str, dict[str, str]] = {}
for (_old, _new), _names in _NAMES.items():
    NAMES.setdefault(_old, {}).update({name: f"{_new}.{name}" for name in _names.split()})
"""Names that are elsewhere now, by the module that had them: it has `names_of` as its `__getattr__`. Modules of other trees
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

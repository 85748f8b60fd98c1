# mypy: disable-error-code="empty-body"
"""Every extension point of Pelton, on one page.

A plugin is a module named in the entry-point group `pelton`, with functions of these names marked
`@pelton.hookimpl`, and `PELTON_API = ">=1,<2"`: the hook API range it was made for. Hooks return
entries (`pelton.entries`) and import nothing heavy. They are called at start-up only; results of all
plugins are joined, and nothing rests on their order. A hook names only the arguments it uses. Within a
major version hooks and arguments are added, never renamed or taken away; one that will go is `deprecated` first.

API version history: 1.0, first; 1.1, `pelton_http_middleware`; 1.2, `pelton_logits_processors`,
`pelton_communicators`, `pelton_engine_clients`, `pelton_step_kernels`, `pelton_expert_placements`, `pelton_tool_parsers`,
`pelton_reasoning_parsers`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from pelton.entries import (
    BackendEntry,
    CommandEntry,
    Entry,
    LoaderEntry,
    ModelEntry,
    OpEntry,
    PlatformEntry,
    SettingsEntry,
    StatLoggerEntry,
)  # fmt: skip

if TYPE_CHECKING:
    from pelton.config import EngineConfig

API_VERSION = (1, 2)

hookimpl = pluggy.HookimplMarker("pelton")

F = TypeVar("F", bound=Callable[..., Any])
_mark = pluggy.HookspecMarker("pelton")


@dataclass(frozen=True, slots=True)
class Hook:
    """Facts of one extension point: the loader checks plugins against it, and docs/hooks.md is made from it."""

    name: str
    arguments: tuple[str, ...]
    doc: str
    returns: str
    since: str
    """Hook API version that brought it."""
    deprecated: str | None
    """What to use in its place, and the version that takes it away; None while it stays."""


_HOOKS: dict[str, Hook] = {}


def hookspec(*, since: str, deprecated: str | None = None) -> Callable[[F], F]:
    """Declare an extension point."""

    def declare(function: F) -> F:
        signature = inspect.signature(function)
        _HOOKS[function.__name__] = Hook(
            name=function.__name__, arguments=tuple(signature.parameters), doc=inspect.cleandoc(function.__doc__ or ""),
            returns=str(signature.return_annotation), since=since, deprecated=deprecated,
        )  # fmt: skip
        return _mark(function)

    return declare


def hooks() -> dict[str, Hook]:
    """Every extension point by name, in the order of this page."""
    return dict(_HOOKS)


def entry_type(hook: str) -> type[Entry]:
    """Return the class that the entries of `hook` must have."""
    named = re.fullmatch(r"Sequence\[(\w+)\]", _HOOKS[hook].returns)
    assert named is not None, f"{hook} returns no entries"
    found: type[Entry] = globals()[named[1]]
    return found


@hookspec(since="1.0")
def pelton_platforms() -> Sequence[PlatformEntry]:
    """Offer device platforms. A `probe` that answers "not here" is not an error. Called once per process."""


@hookspec(since="1.0")
def pelton_attention_backends(device_type: str) -> Sequence[BackendEntry]:
    """Offer attention backends for `device_type` ("cuda", "rocm", "cpu", or that of a plugin's platform).

    Called once per worker, before weights load. Must not import triton or touch a device: put that behind `load`. Settings of your own
    reach a backend by `AttentionBackend.configured`.
    """


@hookspec(since="1.0")
def pelton_ops(device_type: str) -> Sequence[OpEntry]:
    """Offer implementations of fused ops for `device_type`. Called once per worker, before the model is built. Settings of your own
    reach one by its `configured`."""


@hookspec(since="1.0")
def pelton_fused_ops() -> Sequence[Entry]:
    """Declare fused ops of your own, which your layers then bind: `load` gives a `pelton.ops.interface.FusedOp`, with its needs,
    its tensors and a reference. Implementations of them come through `pelton_ops`. Called once per worker, before that."""


@hookspec(since="1.2")
def pelton_step_kernels(device_type: str) -> Sequence[Entry]:
    """Offer whole-step kernels for `device_type`: `load` gives a `pelton.worker.step_kernel.StepKernel` class, which says what models it
    serves. The best by priority that does not refuse computes decode steps, or the one that the setting `step_kernel` names. Called
    once per worker, before weights load."""


@hookspec(since="1.0")
def pelton_models() -> Sequence[ModelEntry]:
    """Offer model classes by architecture name. Called in the front end and in every worker."""


@hookspec(since="1.0")
def pelton_model_loaders() -> Sequence[LoaderEntry]:
    """Offer weight loaders: what --load-format may name. Called once per worker."""


@hookspec(since="1.0")
def pelton_model_sources() -> Sequence[Entry]:
    """Offer model sources: `load` gives a `pelton.model.source.ModelSource`, a function from a `SourceRequest` to the local
    folder or file, or None when the name is not this source's. Asked by priority in the front-end process only."""


@hookspec(since="1.0")
def pelton_model_formats() -> Sequence[Entry]:
    """Offer forms in which a model lies on disk: `load` gives a `pelton.model.formats.ModelFormat` class. The first by
    priority that matches the path reads config and tokenizer. Called in the front-end process only."""


@hookspec(since="1.0")
def pelton_quantization_methods() -> Sequence[Entry]:
    """Offer quantization methods: what --quantization or a checkpoint's quant_method may name. `load` gives a factory from
    `(EngineConfig, ResolvedModel)` to a `pelton.layers.linear.QuantizationMethod`. Called once per worker, before the
    model is built; the ops that read the method's weight format come through `pelton_ops`."""


@hookspec(since="1.0")
def pelton_executors() -> Sequence[Entry]:
    """Offer executors: `load` gives a `pelton.executor.interface.Executor` class, made from one `ExecutorContext`."""


@hookspec(since="1.0")
def pelton_workers(device_type: str) -> Sequence[Entry]:
    """Offer workers for devices of `device_type`: `load` gives a `pelton.worker.interface.Worker` class, made from one
    `WorkerContext`. The best by priority serves the platforms that name none (`Platform.worker_class`)."""


@hookspec(since="1.2")
def pelton_communicators(device_type: str) -> Sequence[Entry]:
    """Offer communicators between the ranks that share a model, for devices of `device_type`: `load` gives a
    `pelton.parallel.communicator.Communicator` class, made from one `CommunicatorContext`. An executor that runs several workers makes
    the best by priority, or the one that its settings name, in each of them."""


@hookspec(since="1.2")
def pelton_expert_placements() -> Sequence[Entry]:
    """Offer policies that say which rank has which experts: what `eplb_config.policy` may name. `load` gives a
    `pelton.parallel.expert_placement.ExpertPlacement` class."""


@hookspec(since="1.2")
def pelton_engine_clients() -> Sequence[Entry]:
    """Offer clients of several engines: what `data_parallel_routing` may name. `load` gives a factory from `(config, model, plugins,
    start)` to a `pelton.engine.client.EngineClient`, which starts each engine by `start(config, model, plugins)`, with a
    `data_parallel_rank` of its own, and picks one for each request."""


@hookspec(since="1.0")
def pelton_schedulers() -> Sequence[Entry]:
    """Offer whole schedulers: `load` gives a factory that takes one `pelton.scheduler.interface.SchedulerContext`."""


@hookspec(since="1.0")
def pelton_scheduling_policies() -> Sequence[Entry]:
    """Offer scheduling policies: `load` gives a `pelton.scheduler.policy.SchedulingPolicy` class."""


@hookspec(since="1.0")
def pelton_kv_cache_managers() -> Sequence[Entry]:
    """Offer KV-cache managers: what `kv_cache_manager` may name; the best by priority when it is unset. `load` gives a factory
    from one `pelton.kv_cache.interface.KVManagerContext` to a `KVCacheManager`."""


@hookspec(since="1.0")
def pelton_kv_cache_specs() -> Sequence[Entry]:
    """Offer the rules for blocks of new KV-cache specs: `load` gives a `(spec class, manager class)` pair, which a KV-cache manager
    is handed as `KVManagerContext.extra_managers`. docs/plugins.md shows one for the built-in manager."""


@hookspec(since="1.0")
def pelton_stat_loggers() -> Sequence[StatLoggerEntry]:
    """Offer stat loggers: one instance per engine in the front-end process."""


@hookspec(since="1.0")
def pelton_structured_output_backends() -> Sequence[Entry]:
    """Offer structured-output backends: `load` gives a factory from one `pelton.structured.interface.StructuredOutputContext` to a
    `StructuredOutputBackend`. Called with the first constraint, on a thread beside the step loop."""


@hookspec(since="1.2")
def pelton_logits_processors() -> Sequence[Entry]:
    """Offer logits processors, which a request names in `logits_processor_args`: `load` gives a
    `pelton.logits_processors.interface.LogitsProcessor` class. Its arguments are checked in the front end; each worker makes one."""


@hookspec(since="1.0")
def pelton_draft_proposers() -> Sequence[Entry]:
    """Offer draft proposers for speculative decoding: what `speculative_config.method` may name. `load` gives a factory from one
    `pelton.spec_decode.interface.ProposerContext` to a `DraftProposer`, called once, in the engine's process; or a
    `pelton.spec_decode.drafter.Drafter` class, which each worker makes: drafts from weights of its own."""


@hookspec(since="1.0")
def pelton_kv_connectors() -> Sequence[Entry]:
    """Offer KV connectors: what `kv_transfer_config.kv_connector` may name. `load` gives a
    `pelton.kv_transfer.interface.KVConnector`, whose two halves are made in the engine core and in each worker."""


@hookspec(since="1.0")
def pelton_io_processors() -> Sequence[Entry]:
    """Offer IO processors for models that pool: what `io_processor_plugin` may name. `load` gives a factory from one
    `pelton.pooling.io_processor.IOProcessorContext` to an `IOProcessor`. Called once, in the front-end process."""


@hookspec(since="1.0")
def pelton_lora_resolvers() -> Sequence[Entry]:
    """Offer LoRA resolvers: what `lora_resolvers` may name. `load` gives a factory from one
    `pelton.lora.resolver.ResolverContext` to a `LoRAResolver`. Called once, in the front end, when the engine has started."""


@hookspec(since="1.2")
def pelton_tool_parsers() -> Sequence[Entry]:
    """Offer parsers of tool calls: what --tool-call-parser may name. `load` gives a `pelton.parsing.interface.OutputParser` class."""


@hookspec(since="1.2")
def pelton_reasoning_parsers() -> Sequence[Entry]:
    """Offer parsers of reasoning: what --reasoning-parser may name. `load` gives a `pelton.parsing.interface.OutputParser` class."""


@hookspec(since="1.0")
def pelton_config_adjustments(config: EngineConfig) -> Mapping[str, tuple[Any, str]]:
    """Change settings before anything is built: flat setting name to (value, reason). Each change is logged with its reason;
    two plugins that set one field to different values are an error. A setting that the user gave explicitly wins."""


@hookspec(since="1.0")
def pelton_settings() -> Sequence[SettingsEntry]:
    """Offer settings of your own: `load` gives a frozen `msgspec.Struct`. What `plugin_config.<name>` holds (flags
    `--plugin-config.<name>.<field>`, a settings file, `LLM(plugin_config=...)`) is checked against it at the start, in the front
    end; `pelton.config.plugin_settings.read_settings` gives the struct wherever it is used."""


@hookspec(since="1.0")
def pelton_worker_settings(config: EngineConfig, device_type: str) -> Mapping[str, str]:
    """Put settings of your own, `plugin_config.<name>`, to use where a worker for `device_type` runs. Called in each worker, and by
    `pelton backends`, before anything is asked for backends and ops. Returns what was chosen, by name: rows of the start table.
    Raises `ConfigError` for a setting that is wrong."""


@hookspec(since="1.0")
def pelton_cli_commands() -> Sequence[CommandEntry]:
    """Offer commands of the `pelton` program."""


@hookspec(since="1.0")
def pelton_http_routes() -> Sequence[Entry]:
    """Offer HTTP routes: `load` gives `routes(state) -> list` of the server framework's handlers."""


@hookspec(since="1.1")
def pelton_http_middleware() -> Sequence[Entry]:
    """Offer ASGI middleware of the HTTP server: `load` gives `wrap(app, state) -> app`. It sees every request, unknown paths
    included, once that is counted and has its id, and before its key is checked: it may answer a request itself, or change what
    is asked and answered, and opens nothing that the key closes. The highest priority is the outermost."""

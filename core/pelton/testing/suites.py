"""Which conformance suite an entry of each hook is put through, and what of the suite is found out from the entry alone.

A plugin module may name a module of suites of its own, `PELTON_CONFORMANCE = "my_package.conformance"`: subclasses with the
data that no entry says, such as the requests of an IO processor. Everything else that the package offers gets its suite here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pelton import hookspecs
from pelton.entries import Entry
from pelton.errors import PluginError
from pelton.plugins import Plugins

MODULE_OF_SUITES = "PELTON_CONFORMANCE"
"""Attribute of a plugin module."""

ClassBody = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Suite:
    """One conformance suite."""

    load: str
    """module:class"""
    body: Callable[[Any, Any], ClassBody | None] = lambda entry, loaded: None
    """From an entry and what it loads to the attributes of a subclass; None: an author has to write it."""
    needs: str = ""
    """What is missing for `body`: attributes that an author sets."""
    by_hand: str = ""
    """module:class of the suite that an author then subclasses, where it is another."""

    def resolve(self) -> type[Any]:
        module, _, name = self.load.partition(":")
        found: type[Any] = getattr(importlib.import_module(module), name)
        return found


def _configured(loaded: Any) -> Any:
    """Return it as an engine of default settings gets it."""
    from pelton.config import EngineConfig

    configured = getattr(loaded, "configured", None)
    return loaded if configured is None else configured(EngineConfig())


def _attention(entry: Entry, loaded: Any) -> ClassBody:
    return {"backend": _configured(loaded)}


def _op(entry: Any, loaded: Any) -> ClassBody | None:
    """Cases have plain weights: an implementation for a weight format of its own refuses them all, rightly."""
    from pelton.ops.interface import FUSED_OPS
    from pelton.ops.selector import reasons_against
    from pelton.testing.ops import op_cases, ops_with_cases

    if entry.op not in ops_with_cases():
        return None
    implementation = _configured(loaded)
    if "weight_format" in getattr(implementation, "handles", ()):
        with suppress(Exception):  # which the suite reports
            if all(reasons_against(implementation, case.needs) for case in op_cases(entry.op)):
                return None
    return {"op": FUSED_OPS[entry.op], "implementation": implementation}


def _made(method: str) -> Callable[[Entry, Any], ClassBody]:
    """A suite whose `method` is given a context and makes what is tested."""
    return lambda entry, loaded: {method: lambda self, context, *_: loaded(context)}


def _set(attribute: str) -> Callable[[Entry, Any], ClassBody]:
    return lambda entry, loaded: {attribute: loaded}


def _kv_manager(entry: Entry, loaded: Any) -> ClassBody:
    from pelton.kv_cache.interface import KVManagerContext

    def make_manager(self: Any, plan: Any, config: Any, max_model_len: int, max_num_batched_tokens: int) -> Any:
        return loaded(
            KVManagerContext(
                plan=plan, config=config, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
            )
        )

    return {"make_manager": make_manager}


def _proposer(entry: Entry, loaded: Any) -> ClassBody | None:
    """A drafter, which workers make, needs a model."""
    from pelton.spec_decode.drafter import Drafter

    is_drafter = isinstance(loaded, type) and issubclass(loaded, Drafter)
    return None if is_drafter else _made("make_proposer")(entry, loaded)


SUITES: Mapping[str, Suite] = {
    "pelton_platforms": Suite("pelton.testing.platform:PlatformConformance", _set("platform_class")),
    "pelton_attention_backends": Suite("pelton.testing.attention:AttentionBackendConformance", _attention),
    "pelton_ops": Suite(
        "pelton.testing.ops:OpConformance",
        _op,
        "op, implementation and cases, and the reference of a weight format of your own",
    ),
    "pelton_step_kernels": Suite(
        "pelton.testing.step_kernel:StepKernelConformance", needs="kernel_class, model_class and hf_config"
    ),
    "pelton_models": Suite("pelton.testing.model:ModelConformance", needs="model_class and hf_config"),
    "pelton_model_loaders": Suite(
        "pelton.testing.model_loader:WeightLoaderConformance", needs="loader_class and write"
    ),
    "pelton_model_sources": Suite("pelton.testing.model_source:ModelSourceConformance", _set("source")),
    "pelton_model_formats": Suite("pelton.testing.model_format:ModelFormatConformance", needs="format_class and write"),
    "pelton_quantization_methods": Suite("pelton.testing.model:QuantizationConformance", _set("factory")),
    "pelton_executors": Suite("pelton.testing.executor:ExecutorConformance", _set("executor_class")),
    "pelton_workers": Suite("pelton.testing.worker:WorkerConformance", _set("worker_class")),
    "pelton_communicators": Suite(
        "pelton.testing.communicator:CommunicatorConformance", lambda entry, loaded: {"load": entry.load}
    ),
    "pelton_expert_placements": Suite(
        "pelton.testing.expert_placement:ExpertPlacementConformance", _set("policy_class")
    ),
    "pelton_engine_clients": Suite(
        "pelton.testing.engine_client:EngineClientConformance", lambda entry, loaded: {"load": entry.load}
    ),
    "pelton_schedulers": Suite("pelton.testing.scheduler:SchedulerConformance", _made("make_scheduler")),
    "pelton_scheduling_policies": Suite(
        "pelton.testing.scheduling_policy:SchedulingPolicyConformance", _set("policy_class")
    ),
    "pelton_kv_cache_managers": Suite("pelton.testing.kv_cache:KVCacheManagerConformance", _kv_manager),
    "pelton_kv_cache_specs": Suite("pelton.testing.cache_specs:CacheSpecConformance", needs="specs and managers"),
    "pelton_stat_loggers": Suite("pelton.testing.stat_logger:StatLoggerConformance", _set("logger_class")),
    "pelton_structured_output_backends": Suite(
        "pelton.testing.structured_output:StructuredOutputConformance", needs="backend, good and bad"
    ),
    "pelton_logits_processors": Suite(
        "pelton.testing.logits_processor:LogitsProcessorConformance", needs="processor_class and good_args"
    ),
    "pelton_draft_proposers": Suite(
        "pelton.testing.draft_proposer:DraftProposerConformance",
        _proposer,
        "model and speculative_config",
        "pelton.testing.draft_proposer:DrafterConformance",
    ),
    "pelton_kv_connectors": Suite(
        "pelton.testing.kv_connector:KVConnectorConformance", needs="connector and extra_config"
    ),
    "pelton_io_processors": Suite(
        "pelton.testing.io_processor:IOProcessorConformance", needs="good_data, bad_data and make_processor"
    ),
    "pelton_lora_resolvers": Suite(
        "pelton.testing.lora_resolver:LoRAResolverConformance", needs="make_resolver, and prepare and known_name"
    ),
    "pelton_tool_parsers": Suite(
        "pelton.testing.output_parser:OutputParserConformance", needs="parser_class and samples"
    ),
    "pelton_reasoning_parsers": Suite(
        "pelton.testing.output_parser:OutputParserConformance", needs="parser_class and samples"
    ),
    "pelton_http_routes": Suite("pelton.testing.http:HTTPConformance", needs="calls"),
    "pelton_http_middleware": Suite("pelton.testing.http:HTTPConformance", needs="calls"),
    "pelton_settings": Suite("pelton.testing.settings:SettingsConformance", _set("settings_class")),
    "pelton_cli_commands": Suite(
        "pelton.testing.command:CommandConformance", lambda entry, loaded: {"run": staticmethod(loaded)}
    ),
}
"""By hook. Hooks without entries are tested by `suites_of` itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Suites for what one plugin offers."""

    classes: dict[str, type[Any]]
    """By the name that a report shows."""
    without: dict[str, str]
    """What gets no suite, and why."""


def suites_of(module: Any, plugins: Plugins, name: str) -> Plan:
    """Collect the suites for the plugin `name`, whose hooks are in `module`. Raises `PluginError` for a module that cannot be had."""
    classes = _own_classes(module, name)
    bases = {f"{base.__module__}:{base.__qualname__}" for found in classes.values() for base in found.__mro__}
    covered = {hook for hook, suite in SUITES.items() if suite.load in bases}
    without: dict[str, str] = {}
    for hook, offer in _offers_of(plugins, name):
        suite = SUITES.get(hook)
        label = f"{hook.removeprefix('pelton_')} {offer.name}"
        if hook in covered:
            continue
        if hook == "pelton_fused_ops":  # its implementations are what is tested
            declared = offer.resolve()
            if not any(getattr(found, "op", None) is declared for found in classes.values()):
                without[label] = _by_hand("pelton.testing.ops:OpConformance", "this op, an implementation and cases")
            continue
        if suite is None:
            without[label] = "there is no suite for this kind; resolved only"
            continue
        body = suite.body(offer, offer.resolve())
        if body is None:
            by_hand = suite.by_hand or suite.load
            if by_hand not in bases:
                without[label] = _by_hand(by_hand, suite.needs)
            continue
        body = {key: staticmethod(v) if _is_plain_function(key, v) else v for key, v in body.items()}
        classes[label] = type("TestIt", (suite.resolve(),), dict(body))
    if hasattr(module, "pelton_config_adjustments") and "pelton.testing.settings:AdjustmentConformance" not in bases:
        from pelton.testing.settings import AdjustmentConformance

        def adjustments(self: Any, config: Any) -> Any:
            return module.pelton_config_adjustments(config)

        classes["config_adjustments"] = type("TestIt", (AdjustmentConformance,), {"adjustments": adjustments})
    return Plan(classes, without)


def _by_hand(suite: str, needs: str) -> str:
    """Return what an author of a plugin has to write."""
    return f"write a subclass of {suite.replace(':', '.')} with {needs}, in the module that {MODULE_OF_SUITES} of the plugin names"


def _is_plain_function(key: str, value: Any) -> bool:
    """Functions that a suite calls through its class, which must not become methods."""
    return key in ("source", "factory") and not isinstance(value, (type, staticmethod))


def _own_classes(module: Any, name: str) -> dict[str, type[Any]]:
    """Test classes of the module that the plugin names."""
    path = getattr(module, MODULE_OF_SUITES, None)
    if path is None:
        return {}
    try:
        found = importlib.import_module(path)
    except Exception as error:
        raise PluginError(
            f"Plugin {name!r} names {path!r} as {MODULE_OF_SUITES}, which fails to import: {type(error).__name__}: {error}."
        ) from error
    return {
        key.removeprefix("Test"): value
        for key, value in vars(found).items()
        if key.startswith("Test") and isinstance(value, type) and value.__module__ == path
    }


def _offers_of(plugins: Plugins, name: str) -> list[tuple[str, Any]]:
    """(hook, entry) of everything that this plugin offers for devices that are here."""
    here = [entry.resolve().device_type for entry in plugins.entries("pelton_platforms") if entry.probe() is None]
    found: dict[tuple[str, str], tuple[str, Any]] = {}
    for hook in hookspecs.hooks().values():
        if hook.arguments == ():
            asked = [plugins.offers(hook.name)] if hook.returns.startswith("Sequence") else []
        elif hook.arguments == ("device_type",):
            asked = [plugins.offers(hook.name, device_type=device_type) for device_type in dict.fromkeys(here)]
        else:
            continue
        for offer in (one for offers in asked for one in offers if one.plugin.name == name):
            found[hook.name, offer.entry.name] = hook.name, offer.entry
    return list(found.values())

"""From an architecture's name to a model: which plugin offers it, and is its class one we can make."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pelton.entries import GENERATE, POOL, ModelEntry
from pelton.errors import ConfigError, PluginError
from pelton.logging import get_logger
from pelton.plugins import FIX_IT, blamed

if TYPE_CHECKING:
    from torch import nn

    from pelton.model.build import BuildConfig
    from pelton.plugins import Plugins

SIGNATURE = '__init__(self, *, config: BuildConfig, prefix: str = "")'
ANY = "*"
AUTO = "auto"
OTHER_NAMES = {"vllm": "pelton"}
"""Of implementations, in the setting `model_impl`."""
KINDS = (GENERATE, POOL)
"""Of `ModelEntry.kind`."""
HEAD_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification", "Model")
"""Architectures that are a causal model without its output head, and with one of another kind or none."""
CAUSAL_SUFFIX = "ForCausalLM"

logger = get_logger(__name__)

ADVICE = "Check the values in the model's config.json and in --hf-overrides; if they are right, fix the model's plugin."


def entries_of(entries: Iterable[ModelEntry], implementation: str) -> list[ModelEntry]:
    """Return those that the setting `model_impl` allows. Raises `ConfigError` where none has such an implementation."""
    known = list(entries)
    wanted = OTHER_NAMES.get(implementation, implementation)
    found = [entry for entry in known if wanted in (AUTO, entry.implementation)]
    if known and not found:
        there = ", ".join([AUTO, *sorted({entry.implementation for entry in known})])
        raise ConfigError(f"model_impl is {implementation!r}; there is {there}.")
    return found


def find_model(entries: Iterable[ModelEntry], architecture: str) -> ModelEntry:
    """The entry with the highest priority that offers `architecture`, else one that offers "*".

    Raises `ConfigError` listing what there is, and `PluginError` when two claim it with one priority.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.priority, entry.name))
    for wanted in (architecture, causal_name(architecture), ANY):
        claims = [entry for entry in ordered if wanted in entry.architectures]
        if len(claims) > 1:
            first, second = claims[:2]
            if first.priority == second.priority:
                raise PluginError(
                    f"{first} and {second} both offer architecture {wanted!r} with priority {first.priority}. "
                    "Leave one out with PELTON_PLUGINS, or give one a higher priority."
                )
            logger.info("%s takes architecture %r (priority %d) from %s", first, wanted, first.priority, second)
        if claims:
            return _runnable(claims[0])
    known = ", ".join(sorted({name for entry in ordered for name in entry.architectures})) or "none"
    raise ConfigError(
        f"No model plugin offers architecture {architecture!r}. There is: {known}. "
        "Install a plugin for it, or name one of these in config.json's architectures."
    )


def causal_name(architecture: str) -> str:
    """The architecture of the causal model that this one is, but for its head: `Qwen3ForCausalLM` for `Qwen3Model`."""
    suffix = next((suffix for suffix in HEAD_SUFFIXES if architecture.endswith(suffix)), None)
    return architecture if suffix is None else architecture.removesuffix(suffix) + CAUSAL_SUFFIX


def find_named(entries: Sequence[ModelEntry], *architectures: str) -> ModelEntry | None:
    """The entry with the highest priority that names the first of `architectures`, else the next; None where there is none."""
    for wanted in architectures:
        claims = [entry for entry in entries if wanted in entry.architectures]
        if claims:
            return min(claims, key=lambda entry: (-entry.priority, entry.name))
    return None


def _runnable(entry: ModelEntry) -> ModelEntry:
    if entry.kind not in KINDS:
        raise ConfigError(f"{entry} is a model to {entry.kind}; this Pelton runs models to {', '.join(KINDS)}.")
    return entry


def load_model_class(entry: ModelEntry) -> type[nn.Module]:
    """Import the class and check that it is made as we make it."""
    model_class: Any = entry.resolve()
    parameters = dict(inspect.signature(model_class).parameters)
    config, prefix = parameters.pop("config", None), parameters.pop("prefix", None)
    by_keyword = all(one is not None and one.kind is one.KEYWORD_ONLY for one in (config, prefix))
    if parameters or not by_keyword or getattr(prefix, "default", None) != "":
        raise PluginError(
            f"Model {entry.name!r} ({entry.load}) is made with {inspect.signature(model_class)}; models must have {SIGNATURE}."
        )
    interface, own_method = ("PoolingModel", "pool") if entry.kind == POOL else ("CausalLM", "compute_logits")
    for method in ("forward", own_method, "load_weights"):
        if not callable(getattr(model_class, method, None)):
            raise PluginError(
                f"Model {entry.name!r} ({entry.load}) has no {method}; see pelton.model.interface.{interface}."
            )
    return model_class  # type: ignore[no-any-return]


def build_model(config: BuildConfig, architecture: str, plugins: Plugins) -> Any:
    """The model with its weights allocated, not loaded: a `CausalLM`, or a `PoolingModel` where `config.pooling` is set."""
    settings = getattr(config, "engine_config", None)
    implementation = AUTO if settings is None else settings.model.model_impl
    entry = find_model(entries_of(plugins.entries("pelton_models"), implementation), architecture)
    from torch import nn  # front ends find a model's entry without it

    with blamed(f"Model {entry.name!r}", entry.load, ADVICE):
        model_class = load_model_class(entry)
        model = model_class(config=config)
        if not isinstance(model, nn.Module):
            raise PluginError(f"{entry} makes a {type(model).__name__}; it has to make a torch.nn.Module. {FIX_IT}")
        if config.parallel.stages is not None and not config.runs_in_stages:
            raise ConfigError(
                f"pipeline_parallel_size is {config.parallel.stages.size}; {architecture} does not run in stages. Use tensor_parallel_size."
            )
        return (model if config.pooling is None or entry.kind == POOL else _as_pooling(entry, model, config)).eval()


def _as_pooling(entry: ModelEntry, model: Any, config: BuildConfig) -> Any:
    if not callable(getattr(model, "as_pooling", None)):
        raise ConfigError(
            f"{entry} generates, and its class has no as_pooling. Set runner to generate, or give it that method "
            "(pelton.layers.decoder.Decoder has it)."
        )
    return model.as_pooling(config=config)

"""From an architecture's name to a model: which plugin offers it, and is its class one we can make."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pelton.entries import ModelEntry
from pelton.errors import ConfigError, PluginError
from pelton.plugins import blamed

if TYPE_CHECKING:
    from torch import nn

    from pelton.model.build import BuildConfig
    from pelton.plugins import Plugins

SIGNATURE = '__init__(self, *, config: BuildConfig, prefix: str = "")'
ADVICE = (
    "Check the values in the model's config.json and in --hf-overrides; if they are right, mend the model's plugin."
)


def find_model(entries: Iterable[ModelEntry], architecture: str) -> ModelEntry:
    """The first entry by (-priority, name) that offers `architecture`. Raises `ConfigError` listing what there is."""
    ordered = sorted(entries, key=lambda entry: (-entry.priority, entry.name))
    for entry in ordered:
        if architecture in entry.architectures:
            return entry
    known = ", ".join(sorted({name for entry in ordered for name in entry.architectures})) or "none"
    raise ConfigError(
        f"No model plugin offers architecture {architecture!r}. There is: {known}. "
        "Install a plugin for it, or name one of these in config.json's architectures."
    )


def load_model_class(entry: ModelEntry) -> type[nn.Module]:
    """Import the class and check that it is made as we make it."""
    model_class: Any = entry.resolve()
    parameters = dict(inspect.signature(model_class).parameters)
    config, prefix = parameters.pop("config", None), parameters.pop("prefix", None)
    is_right = (
        config is not None
        and prefix is not None
        and config.kind is config.KEYWORD_ONLY
        and prefix.kind is prefix.KEYWORD_ONLY
        and prefix.default == ""
        and not parameters
    )
    if not is_right:
        raise PluginError(
            f"Model {entry.name!r} ({entry.load}) is made with {inspect.signature(model_class)}; models must have {SIGNATURE}."
        )
    for method in ("forward", "compute_logits", "load_weights"):
        if not callable(getattr(model_class, method, None)):
            raise PluginError(
                f"Model {entry.name!r} ({entry.load}) has no {method}; see pelton.model.interface.CausalLM."
            )
    return model_class  # type: ignore[no-any-return]


def build_model(config: BuildConfig, architecture: str, plugins: Plugins) -> Any:
    """The model with its weights allocated, not loaded: a `CausalLM`."""
    entry = find_model(plugins.entries("pelton_models"), architecture)
    with blamed(f"Model {entry.name!r}", entry.load, ADVICE):
        model_class = load_model_class(entry)
        model = model_class(config=config)
        return model.eval()

"""The drafter of a worker: weights of its own that make drafts, where the settings name such a method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError
from pelton.model.resolve import text_config
from pelton.plugins import calling, make
from pelton.spec_decode.drafter import Drafter, DrafterContext
from pelton.spec_decode.select import find_checkpoint
from pelton.worker.step_kernel import NO_KERNEL

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.entries import Entry
    from pelton.plugins import Plugins
    from pelton_platforms.device.loaded import LoadedModel

HOOK = "pelton_draft_proposers"


def make_drafter(loaded: LoadedModel) -> Drafter | None:
    """Make it once the model's modules are there; None where drafts come from elsewhere. Raises `ConfigError` where the worker, or the
    drafter, does not go with the settings."""
    entry = find_drafter(loaded.config, loaded.plugins)
    if entry is None:
        return None
    _check_ranks(entry, loaded.config)
    if loaded.info.is_pooling:
        raise ConfigError(f"speculative_config.method is {entry.name!r}, and the model is run to pool. Leave it out.")
    kernel = loaded.config.compilation.step_kernel
    if kernel not in (None, NO_KERNEL):
        raise ConfigError(
            f"step_kernel is {kernel!r}, which leaves a drafter no hidden states, and speculative_config.method is {entry.name!r}. Leave "
            "one of them out."
        )
    context = DrafterContext(
        config=loaded.config.speculative, engine_config=loaded.config, info=loaded.info, model=loaded.model,
        build=loaded.build, plugins=loaded.plugins,
    )  # fmt: skip
    drafter = make(entry, Drafter, context).eval()  # type: ignore[type-abstract]
    loaded.choices["drafts"] = f"{entry.name}, up to {drafter.num_drafts} a row"
    return drafter


def _check_ranks(entry: Entry, config: EngineConfig) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size, is_taken = getattr(config.parallel, name), name[0] == "t" and entry.resolve().runs_on_ranks
        if size > 1 and not is_taken:
            raise ConfigError(
                f"{name} is {size}, and speculative_config.method {entry.name!r} does not run on the ranks of it. Set {name} to 1, or use "
                "ngram."
            )


def find_drafter(config: EngineConfig, plugins: Plugins) -> Entry | None:
    """The entry of the method that the settings name, or that the checkpoint is for; None where its drafts are not made by a drafter."""
    settings = config.speculative
    if settings.method is not None:
        entry: Entry = plugins.find(HOOK, settings.method, setting="speculative_config.method")
        return entry if _drafter_class(entry) is not None else None
    if settings.model is None:
        return None
    path, model_format = find_checkpoint(config, plugins)
    hf_config = text_config(model_format.read_config(path), {})
    drafters = [(entry, drafter) for entry in plugins.entries(HOOK) if (drafter := _drafter_class(entry)) is not None]
    for entry, drafter in drafters:
        with calling(entry):
            if drafter.reads(hf_config):
                return entry
    raise ConfigError(
        f"speculative_config.model is {settings.model!r}, whose config.json (architectures {hf_config.get('architectures')!r}) says "
        f"no method; set speculative_config.method to one of {', '.join(entry.name for entry, _ in drafters)}."
    )


def _drafter_class(entry: Entry) -> type[Drafter] | None:
    found: Any = entry.resolve()
    return found if isinstance(found, type) and issubclass(found, Drafter) else None

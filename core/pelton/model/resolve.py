"""From a model's name to all that must be known before weights are read. No torch.

Sources say where the model lies, formats read it there; what remains (overrides, dtype, context length, end tokens,
sampling defaults) is decided here, once, in the front end: every other process gets the `ResolvedModel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig
from pelton.config.plugin_settings import check_plugin_settings
from pelton.entries import ModelEntry
from pelton.errors import ConfigError, PluginError
from pelton.model.formats import ModelFormat, read_json
from pelton.model.pooling import PoolingFolder
from pelton.model.registry import ANY, causal_name, entries_of, find_named
from pelton.model.resolve_pooling import ModelFacts, resolve_pooling
from pelton.model.resolved import ResolvedModel
from pelton.model.source import SourceRequest
from pelton.plugins import FIX_IT, Plugins, calling
from pelton.sampling_params import MODEL_DEFAULTS

if TYPE_CHECKING:
    from pelton.tokenizer.interface import Tokenizer

DUMMY_FORMAT = "dummy"
DEFAULT_MAX_MODEL_LEN = 2048
CONTEXT_FIELDS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "model_max_length",
)  # fmt: skip
UNSTRETCHED_ROPE_TYPES = ("default", "llama3", "longrope", "su", "mrope", "proportional")
"""Scalings whose context field holds the stretched length already."""
SAMPLING_DEFAULTS = {**{name: name for name in MODEL_DEFAULTS}, "max_new_tokens": "max_tokens"}
"""generation_config.json's field to the one of `SamplingParams`."""


POSITIVE_INTEGERS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
POSITIVE_NUMBERS = ("rms_norm_eps", "rope_theta")


def resolve_model(config: EngineConfig, plugins: Plugins) -> ResolvedModel:
    """Find and describe the model of `config`. Raises `ConfigError` that says what was tried."""
    check_plugin_settings(config, plugins)
    model = config.model
    path = locate(model.model, config, plugins, needs_weights=config.load.load_format not in (DUMMY_FORMAT, "streamed"))
    model_format = find_format(path, plugins)
    notes: list[str] = []

    found_config = model_format.read_config(path)
    hf_config = text_config(found_config, model.hf_overrides)
    _check_numbers(hf_config, path)
    own_generation = model_format.read_generation_config(path)
    architecture, folder = _architecture(hf_config, path), model_format.read_pooling(path)
    entries = entries_of(plugins.entries("pelton_models"), model.model_impl)
    if (named := find_named(entries, architecture)) is not None:
        hf_config = {**dict(named.config_defaults), **hf_config}
    used = find_named(entries, architecture, causal_name(architecture), ANY)
    pooling = resolve_pooling(config, ModelFacts(hf_config, architecture, folder, entries))
    return ResolvedModel(
        name=model.model,
        path=str(path),
        weights_format=_weights_format(config, model_format, path),
        hf_config=hf_config,
        raw_config=merge(found_config, model.hf_overrides),
        architecture=architecture,
        dtype=_dtype(config, plugins, hf_config, notes),
        max_model_len=_max_model_len(
            model.max_model_len, _context_fields(hf_config, architecture, entries), notes, folder
        ),
        vocab_size=_vocab_size(hf_config, path),
        eos_token_ids=_eos_token_ids(hf_config, own_generation, model.hf_overrides),
        generation_config=_sampling_defaults(config, own_generation),
        tokenizer_path=_tokenizer_path(config, plugins, path),
        pooling=pooling,
        made_of="" if used is None else used.description,
        notes=notes,
    )


def locate(name: str, config: EngineConfig, plugins: Plugins, *, needs_weights: bool = True) -> Path:
    """Ask every source, by priority, for the local path of `name`."""
    request = SourceRequest(
        name=name, revision=config.model.revision, download_dir=config.load.download_dir, needs_weights=needs_weights, config=config
    )  # fmt: skip
    refused = []
    for entry in plugins.entries("pelton_model_sources"):
        with calling(entry):
            found = entry.resolve()(request)
        if found is not None:
            if not isinstance(found, (str, Path)):
                raise PluginError(f"{entry} answers {found!r}; a model source gives a path, or None. {FIX_IT}")
            return Path(found)
        refused.append(f"{entry.name} ({entry.doc})")
    raise ConfigError(
        f"No model source knows {name!r}. Asked: {'; '.join(refused) or 'none, no source is installed'}. "
        "Check the spelling, or give the path of a folder or .gguf file that exists."
    )


def find_format(path: Path, plugins: Plugins) -> ModelFormat:
    """The format that `path` has."""
    entries = plugins.entries("pelton_model_formats")
    for entry in entries:
        model_format: ModelFormat = entry.resolve()()
        if model_format.matches(path):
            return model_format
    known = "; ".join(f"{entry.name} ({entry.doc})" for entry in entries)
    raise ConfigError(f"{path} has none of the forms that models come in: {known or 'no format is installed'}.")


def load_tokenizer(config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> Tokenizer | None:
    """Load a resolved model's tokenizer, with the settings' chat template where they have one; None when none is wanted."""
    if model.tokenizer_path is None:
        return None
    path = Path(model.tokenizer_path)
    tokenizer = find_format(path, plugins).load_tokenizer(path)
    if config.model.chat_template is not None:
        tokenizer.set_chat_template(config.model.chat_template)
    return tokenizer


def text_config(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's fields, with overrides: nested mappings are merged, all else is replaced.

    A multimodal config keeps them under `text_config`; what only the outer level says (architectures, dtype, end tokens), and
    whether the head is the embedding, holds for the text model too, and an override of a text field may be given at either level.
    """
    merged = merge(raw, overrides)
    nested = merged.get("text_config", merged.get("llm_config"))  # Nemotron 3 Omni's name
    if not isinstance(nested, dict):
        return merged
    outer = {key: value for key, value in merged.items() if not key.endswith("_config") or key == "quantization_config"}
    own = {key: merged[key] for key in ("architectures", "tie_word_embeddings") if merged.get(key) is not None}
    text = {**outer, **nested, **own}
    return merge(text, {key: value for key, value in overrides.items() if key != "text_config"})


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with `changes`, going into nested mappings."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _weights_format(config: EngineConfig, model_format: ModelFormat, path: Path) -> str:
    wanted = config.load.load_format
    return model_format.weights_format(path) if wanted == "auto" else wanted


def _architecture(hf_config: Mapping[str, Any], path: Path) -> str:
    names = hf_config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise ConfigError(
        f"The config of {path} names no architecture (architectures is {names!r}). "
        """Say it with --hf-overrides '{"architectures": ["LlamaForCausalLM"]}'."""
    )


def _dtype(config: EngineConfig, plugins: Plugins, hf_config: Mapping[str, Any], notes: list[str]) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    stated = hf_config.get("dtype") or hf_config.get("torch_dtype")
    name = str(stated).removeprefix("torch.") if stated is not None else None
    if name in ("float32", "bfloat16", "float16"):
        return name
    from pelton.platform.select import select_platform

    default = select_platform(config, plugins).default_dtype
    if name is not None:
        notes.append(f"The checkpoint's dtype {name!r} is not a compute dtype; using {default}.")
    return default


def _vocab_size(hf_config: Mapping[str, Any], path: Path) -> int:
    size = hf_config.get("vocab_size")
    if isinstance(size, int) and size > 0:
        return size
    raise ConfigError(
        f"The config of {path} has vocab_size {size!r}; expected a positive number. Set it with --hf-overrides."
    )


def _check_numbers(hf_config: Mapping[str, Any], path: Path) -> None:
    """Check the numbers that models compute with. A field may be missing or null, and some models have a list, a value a layer."""
    for names, kind, what in ((POSITIVE_INTEGERS, Integral, "integer"), (POSITIVE_NUMBERS, Real, "number")):
        for name in names:
            value = hf_config.get(name)
            if value is None or isinstance(value, list):
                continue
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf"):
                raise ConfigError(
                    f"The config of {path} has {name} {value!r}; expected a positive {what}. Set it with --hf-overrides."
                )


def _context_fields(
    hf_config: Mapping[str, Any], architecture: str, entries: Sequence[ModelEntry]
) -> Mapping[str, Any]:
    """The config without the positions that no token has."""
    reserved = max((entry.reserved_positions for entry in entries if architecture in entry.architectures), default=0)
    stated = hf_config.get("max_position_embeddings")
    if not reserved or not isinstance(stated, int):
        return hf_config
    return {**hf_config, "max_position_embeddings": stated - reserved}


def _max_model_len(wanted: int | None, hf_config: Mapping[str, Any], notes: list[str], folder: PoolingFolder) -> int:
    derived = context_length(hf_config)
    if wanted is None and folder.max_seq_length is not None:
        return min(folder.max_seq_length, derived or folder.max_seq_length)
    if derived is None:
        if wanted is None:
            notes.append(f"The config states no context length; max_model_len is {DEFAULT_MAX_MODEL_LEN}.")
        return wanted or DEFAULT_MAX_MODEL_LEN
    if wanted is not None and wanted > derived:
        raise ConfigError(
            f"max_model_len is {wanted}, but the model's context length is {derived} tokens. Lower max_model_len to at most "
            f"{derived}, or, if the model does work beyond it, say so with --hf-overrides (max_position_embeddings)."
        )
    return wanted or derived


def context_length(hf_config: Mapping[str, Any]) -> int | None:
    """Tokens of context that the config promises, RoPE scaling included; None when it does not say."""
    stated = [value for name in CONTEXT_FIELDS if isinstance(value := hf_config.get(name), int) and value > 0]
    if not stated:
        return None
    length = min(stated)
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters")
    if not isinstance(rope, Mapping) or str(hf_config.get("model_type", "")).startswith("gemma3"):
        return length  # Gemma 3 states the stretched length
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "default"
    if kind in UNSTRETCHED_ROPE_TYPES:
        return length
    factor = rope.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
        raise ConfigError(f"RoPE scaling {kind!r} has factor {factor!r}; expected a positive number.")
    original = rope.get("original_max_position_embeddings")
    base = original if kind == "yarn" and isinstance(original, int) and original > 0 else length
    return int(base * factor)


def _eos_token_ids(
    hf_config: Mapping[str, Any], own_generation: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[int]:
    """Both files' ids: chat models often name the end of a turn in generation_config.json only. So this holds whatever the
    `generation_config` setting says of sampling defaults. What the user overrides is the whole truth, though."""
    text_overrides = overrides.get("text_config")
    if "eos_token_id" in overrides or (isinstance(text_overrides, Mapping) and "eos_token_id" in text_overrides):
        return _token_ids(hf_config.get("eos_token_id"))
    return _token_ids(hf_config.get("eos_token_id"), own_generation.get("eos_token_id"))


def _token_ids(*stated: Any) -> list[int]:
    """Distinct ids from fields that hold one id, a list of ids or nothing; in order."""
    ids: dict[int, None] = {}
    for value in stated:
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
                ids[token_id] = None
    return list(ids)


def _sampling_defaults(config: EngineConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    where = config.model.generation_config
    fields: Mapping[str, Any]
    if where == "auto":
        fields = own
    elif where in ("pelton", "vllm"):
        fields = {}
    else:
        file = Path(where) if where.endswith(".json") else Path(where) / "generation_config.json"
        if not file.is_file():
            raise ConfigError(
                f"generation_config is {where!r}, but there is no {file}. Use auto, pelton, or a folder that holds one."
            )
        fields = read_json(file)
    defaults = {
        SAMPLING_DEFAULTS[key]: value for key, value in fields.items() if key in SAMPLING_DEFAULTS and value is not None
    }
    for key, value in config.model.override_generation_config.items():
        if key not in SAMPLING_DEFAULTS:
            raise ConfigError(
                f"override_generation_config has {key!r}; sampling defaults are {', '.join(sorted(SAMPLING_DEFAULTS))}."
            )
        defaults[SAMPLING_DEFAULTS[key]] = value
    return defaults


def _tokenizer_path(config: EngineConfig, plugins: Plugins, model_path: Path) -> str | None:
    if config.model.skip_tokenizer_init:
        return None
    if config.model.tokenizer is None:
        return str(model_path)
    return str(locate(config.model.tokenizer, config, plugins, needs_weights=False))

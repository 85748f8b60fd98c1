"""Pooling as a sentence-transformers folder describes it: modules.json, and a folder for each module behind the model itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pelton.errors import ConfigError
from pelton.model.formats import MAX_JSON_BYTES, read_json
from pelton.model.pooling import ACTIVATIONS, DenseSpec, PoolingFolder

MODULES = "modules.json"
LENGTHS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
           "sentence_camembert_config.json", "sentence_xlm-roberta_config.json")  # fmt: skip
POOLING_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


def read_sentence_transformers(folder: Path) -> PoolingFolder:
    """Empty where there is no modules.json. Raises `ConfigError` naming the file for a module that Pelton has not."""
    file = folder / MODULES
    if not file.is_file():
        return PoolingFolder()
    pooling_type: str | None = None
    normalizes, dense = False, []
    for module in _modules(file):
        kind, path = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if kind == "Transformer":
            if path:
                raise ConfigError(f"{file} has the model itself in {path!r}; give that folder, or move its files up.")
        elif kind == "Pooling":
            pooling_type = _pooling_type(_inside(folder, path, file) / "config.json")
        elif kind == "Normalize":
            normalizes = True
        elif kind == "Dense":
            if normalizes:
                raise ConfigError(
                    f"{file} has a Dense module behind Normalize; Pelton runs them in the other order only."
                )
            dense.append(_dense(_inside(folder, path, file), path))
        else:
            raise ConfigError(
                f"{file} has a module {kind!r}, which Pelton has not; it runs Transformer, Pooling, Dense and Normalize."
            )
    return PoolingFolder(
        pooling_type=pooling_type,
        normalize=normalizes,
        dense=dense,
        max_seq_length=_max_seq_length(folder),
        is_embedding=True,
    )


def _modules(file: Path) -> list[Mapping[str, Any]]:
    """modules.json is a list."""
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(f"{file} has {file.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read.")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not readable as JSON: {error}. Download it again, or fix it.") from error
    if not isinstance(found, list) or not all(isinstance(module, Mapping) for module in found):
        raise ConfigError(f"{file} holds no list of modules; download it again.")
    return sorted(found, key=lambda module: int(module.get("idx", 0)))


def _inside(folder: Path, path: str, file: Path) -> Path:
    if not path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise ConfigError(f"{file} has a module in {path!r}; expected a folder beside it.")
    return folder / path


def _pooling_type(file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"{file} is missing; download the model again.")
    config = read_json(file)
    named = config.get("pooling_mode")
    modes = [mode for key, mode in POOLING_MODES.items() if config.get(key)]
    if isinstance(named, str):
        modes = [{"lasttoken": "last"}.get(named, named)]
    others = [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value and key not in POOLING_MODES
    ]
    if len(modes) != 1 or others or modes[0] not in POOLING_MODES.values():
        raise ConfigError(
            f"{file} asks for {', '.join([*modes, *others]) or 'no pooling'}; Pelton pools by one of "
            f"{', '.join(POOLING_MODES.values())}."
        )
    return modes[0]


def _dense(folder: Path, path: str) -> DenseSpec:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{file} is missing; download the model again.")
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(
            f"{folder} has no model.safetensors; Pelton reads no pickled weights. Save the model with safetensors."
        )
    config = read_json(file)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1].lower()
    if name not in ACTIVATIONS:
        raise ConfigError(f"{file} has the activation {name!r}; Pelton has {', '.join(ACTIVATIONS)}.")
    sizes: list[Any] = [config.get(key) for key in ("in_features", "out_features")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"{file} has in_features and out_features {sizes}; expected positive numbers.")
    return DenseSpec(
        path=path, in_features=sizes[0], out_features=sizes[1], has_bias=bool(config.get("bias", True)), activation=name
    )


def _max_seq_length(folder: Path) -> int | None:
    for name in LENGTHS:
        if (folder / name).is_file():
            value = read_json(folder / name).get("max_seq_length")
            return value if isinstance(value, int) and value > 0 else None
    return None

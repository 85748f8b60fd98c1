"""The file of `--config`: settings by their names, in JSON, TOML or YAML."""

from __future__ import annotations

import importlib
import json
from typing import Any

from pelton.errors import ConfigError

YAML = (".yaml", ".yml")


def read_settings_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read()
        if path.endswith(".toml"):
            import tomllib

            return tomllib.loads(text.decode())
        found = _read_yaml(path, text) if path.endswith(YAML) else json.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"--config {path} is not valid {'TOML' if path.endswith('.toml') else 'JSON'}: {error}."
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f'--config {path} holds no object; write settings by name, such as {{"max_num_seqs": 8}}.')
    return found


def _read_yaml(path: str, text: bytes) -> Any:
    """Plain data only. PyYAML comes with many packages, and not with Pelton."""
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"--config {path} is YAML, which needs the package pyyaml. Run `pip install pyyaml`, or write JSON or TOML."
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}.") from error

"""The file of `--config`: settings by their names, in JSON or TOML."""

from __future__ import annotations

import json
from typing import Any

from pelton.errors import ConfigError


def read_settings_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read()
        if path.endswith(".toml"):
            import tomllib

            return tomllib.loads(text.decode())
        found = json.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(
            f"--config {path} is no valid {'TOML' if path.endswith('.toml') else 'JSON'}: {error}."
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f'--config {path} holds no JSON object; write settings by name, such as {{"max_num_seqs": 8}}.'
        )
    return found

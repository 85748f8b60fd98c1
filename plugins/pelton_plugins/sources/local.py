"""Models that lie on this machine: a folder, or a .gguf file."""

from __future__ import annotations

from pathlib import Path

from pelton.errors import ConfigError
from pelton.model.source import SourceRequest


def resolve(request: SourceRequest) -> str | None:
    """The path itself; the one .gguf file of a folder without config.json."""
    path = Path(request.name).expanduser()
    if not path.exists():
        if path.is_absolute() or request.name.startswith((".", "~")) or request.name.endswith(".gguf"):
            raise ConfigError(f"There is no {path}; give the path of a model folder or .gguf file that exists.")
        return None
    if path.is_file():
        if path.suffix == ".gguf":
            return str(path)
        raise ConfigError(f"{path} is a file, but no .gguf file; give the folder that holds config.json.")
    if (path / "config.json").exists() or not request.needs_weights:
        return str(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(
            f"{path} has {len(files)} .gguf files; name one of them: {', '.join(file.name for file in files)}."
        )
    if not files and "/" not in request.name.strip("/") and not any(path.iterdir()):
        return None  # an empty folder that happens to bear a known model's name
    return str(files[0] if files else path)

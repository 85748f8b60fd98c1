"""Models of the Hugging Face hub, by id: downloaded once, with progress, into the hub's own cache.

Only configs, tokenizers and safetensors are fetched, never pickled weights. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN
mean what they mean to huggingface_hub.
"""

from __future__ import annotations

import re

from pelton.errors import ConfigError
from pelton.model.source import SourceRequest

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["*.json", "*.jinja", "*.txt"]  # .txt: merges and vocabularies
WEIGHTS = ["*.safetensors"]
NEVER = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "original/*", "consolidated*", "onnx/*"]


def resolve(request: SourceRequest) -> str | None:
    """The snapshot's folder. A name that is not of the form owner/name is not the hub's."""
    if REPO_ID.fullmatch(request.name) is None:
        return None
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{request.name!r} looks like a hub id, but huggingface_hub is missing: pip install huggingface_hub"
        ) from error
    try:
        return snapshot_download(
            request.name,
            revision=request.revision,
            cache_dir=request.download_dir,
            allow_patterns=FILES + (WEIGHTS if request.needs_weights else []),
            ignore_patterns=NEVER,
            local_files_only=constants.HF_HUB_OFFLINE,
        )
    except (OSError, ValueError, errors.HfHubHTTPError, errors.OfflineModeIsEnabled) as error:
        raise ConfigError(_why(request, error, offline=constants.HF_HUB_OFFLINE)) from error


def _why(request: SourceRequest, error: Exception, *, offline: bool) -> str:
    from huggingface_hub import errors

    where = f"{request.name!r} is not a local folder, and the hub "
    if offline:
        return f"{where}may not be asked (HF_HUB_OFFLINE is set); it is not in the cache. Unset it, or give a local folder."
    if isinstance(error, errors.GatedRepoError):
        return f"{where}asks for consent first: accept the model's terms on its page, and set HF_TOKEN."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{where}has no revision {request.revision!r} of it. Check --revision."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{where}has no such model (or it is private: set HF_TOKEN). Check the spelling."
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{where}could not be reached: {first_line}. Check the network, or give a local folder."

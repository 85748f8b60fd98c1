"""`lora_hf_hub_resolver`: the adapter `owner/name` is that repository, `owner/name/sql` its folder `sql`.

Clients name adapters, so that only repositories of the operator's list are ever downloaded, and of those only the adapter's files.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pelton.config.plugin_settings import read_settings
from pelton.errors import ConfigError
from pelton.logging import get_logger
from pelton.lora.peft import CONFIG_NAME, WEIGHT_NAMES
from pelton.lora.request import LoRARequest
from pelton.lora.resolver import ResolverContext
from pelton_plugins.lora_resolvers.filesystem import check_folder, find_folder
from pelton_plugins.lora_resolvers.settings import NAME, ResolverSettings

logger = get_logger(__name__)


class HubResolver:
    def __init__(self, context: ResolverContext) -> None:
        self._context = context
        self._repositories = read_settings(context.config, NAME, ResolverSettings).hub_repositories
        for repository in self._repositories:
            if len([part for part in repository.split("/") if part not in ("", ".", "..")]) != 2:
                raise ConfigError(
                    f"plugin_config.lora_resolvers.hub_repositories has {repository!r}; write owner/name."
                )
        if not self._repositories:
            raise ConfigError(
                "plugin_config.lora_resolvers.hub_repositories is empty: list the repositories that lora_hf_hub_resolver may "
                "download from, or leave it out of lora_resolvers."
            )

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        repository = "/".join(lora_name.split("/")[:2])
        if repository not in self._repositories:
            return None
        folder = await asyncio.to_thread(self._download, repository, lora_name.removeprefix(repository).strip("/"))
        if folder is None:
            return None
        await asyncio.to_thread(check_folder, folder, lora_name, self._context)
        return LoRARequest(lora_name, 1, str(folder))

    def _download(self, repository: str, subfolder: str) -> Path | None:
        """The adapter's local folder; None where the repository has none."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        if subfolder and any(part in ("", ".", "..") or "*" in part or "[" in part for part in subfolder.split("/")):
            return None
        prefix = f"{subfolder}/" if subfolder else ""
        load: Any = snapshot_download
        try:
            found = Path(load(repository, allow_patterns=[prefix + name for name in (CONFIG_NAME, *WEIGHT_NAMES)]))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            logger.warning("lora_hf_hub_resolver: %s: %s", repository, (str(error).splitlines() or [""])[0])
            return None
        # Files of a snapshot are links into the hub's cache; its folders are folders.
        return find_folder(found.resolve(), subfolder) if subfolder else found

"""Environment variables of vLLM's that Pelton does not read. Who sets one in vain is told so, and what to use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pelton import env


@dataclass(frozen=True, slots=True)
class OtherVariable:
    """A variable of vLLM's, and what does the same here."""

    name: str
    setting: str
    """Flat name of the setting; empty for none. A command that has no such setting says nothing."""
    use: str
    variable: str = ""
    """Variable here that spells it too."""


OTHER_VARIABLES = (
    OtherVariable("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "allow_runtime_lora_updating", "--allow-runtime-lora-updating"),
    OtherVariable("VLLM_API_KEY", "api_key", "--api-key or PELTON_API_KEY", env.API_KEY.name),
    OtherVariable("VLLM_ATTENTION_BACKEND", "attention_backend", "--attention-backend"),
    OtherVariable("VLLM_LOGGING_LEVEL", "log_level", "--log-level or PELTON_LOG_LEVEL", env.LOG_LEVEL.name),
    OtherVariable("VLLM_LORA_RESOLVER_CACHE_DIR", "lora_resolvers", "--plugin-config.lora_resolvers.cache_dir"),
    OtherVariable("VLLM_PLUGINS", "", "PELTON_PLUGINS", env.PLUGINS.name),
)
_ASK_FOR_NOTHING = ("", "0", "false")


def unread(environ: Mapping[str, str], known: Collection[str], given: Collection[str]) -> Iterator[str]:
    """One line for each that is set, where nothing that is read says the same. Values may be secrets: none is shown.

    known: flat names of the command's settings; given: those that it was given.
    """
    for one in OTHER_VARIABLES:
        asks = environ.get(one.name, "").lower() not in _ASK_FOR_NOTHING
        if asks and one.setting in ("", *known) and one.setting not in given and one.variable not in environ:
            yield f"Environment variable {one.name} is vLLM's and not read; use {one.use}."

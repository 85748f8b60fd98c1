"""`LoRARequest`: how a user names an adapter."""

from __future__ import annotations

import os

import msgspec

from pelton import limits
from pelton.errors import RequestError


class LoRARequest(msgspec.Struct, frozen=True, kw_only=False):
    """An adapter in a folder, with vLLM's names: `LoRARequest("sql", 1, "/adapters/sql")`.

    Requests with the same three values share one adapter. Give another `lora_int_id` when the folder's content has changed:
    the adapter is read again, and nothing that was cached for the old one is used.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    """A PEFT folder on the engine's machine: adapter_config.json and adapter_model.safetensors."""

    def __post_init__(self) -> None:
        name, most = self.lora_name, limits.MAX_ADAPTER_NAME_CHARS
        if not isinstance(name, str) or not 1 <= len(name) <= most or not name.isprintable():  # it is logged
            wrong = f"lora_name must be a string of 1 to {most} printable characters"
            raise RequestError(wrong, param="lora_name", value=name)
        if type(self.lora_int_id) is not int or not 1 <= self.lora_int_id < 2**63:
            raise RequestError(
                f"lora_int_id must be an integer from 1 to {2**63 - 1}", param="lora_int_id", value=self.lora_int_id
            )
        if not isinstance(self.lora_path, str | os.PathLike) or not os.fspath(self.lora_path):
            raise RequestError("lora_path must be the folder of the adapter", param="lora_path", value=self.lora_path)

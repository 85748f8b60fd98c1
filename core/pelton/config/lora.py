"""Settings of LoRA adapters."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

MAX_LORAS = 1024
MAX_LORA_RANK = 256


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters beside the model: how many, how large, and where they come from."""

    enable_lora: bool = False
    """Serve LoRA adapters. Memory for max_loras of them is taken at the start."""
    max_loras: int = 1
    """Most different adapters in one batch: each has a place on the device."""
    max_lora_rank: int = 16
    """Largest rank of an adapter; memory and time grow with it."""
    lora_target_modules: list[str] = msgspec.field(default_factory=list)
    """Matrices that take adapters, such as q_proj v_proj; the others have neither memory nor time for them. All when empty."""
    max_cpu_loras: int | None = None
    """Adapters kept in host memory, those on the device among them; max_loras and at least 8 when unset."""
    lora_modules: list[str] = msgspec.field(default_factory=list)
    """Adapters that are loaded at the start, each as name=path."""
    allow_runtime_lora_updating: bool = False
    """Let clients load and unload adapters over HTTP, and resolvers load those that requests name."""
    lora_resolvers: list[str] = msgspec.field(default_factory=list)
    """Resolvers that are asked for adapters of unknown names, in this order, such as lora_filesystem_resolver."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_loras <= MAX_LORAS:
            raise ConfigError(f"max_loras is {self.max_loras}; use 1 to {MAX_LORAS}, such as 8.")
        if not 1 <= self.max_lora_rank <= MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank is {self.max_lora_rank}; use 1 to {MAX_LORA_RANK}, such as 16.")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            most = f"use at least max_loras, {self.max_loras}: adapters on the device are kept on the host too."
            raise ConfigError(f"max_cpu_loras is {self.max_cpu_loras}; {most}")
        for module in self.lora_modules:
            split_module(module)
        if self.lora_modules and not self.enable_lora:
            raise ConfigError(
                f"lora_modules is {self.lora_modules}, and enable_lora is off. Set --enable-lora, or leave lora_modules out."
            )
        if self.lora_resolvers and not (self.enable_lora and self.allow_runtime_lora_updating):
            raise ConfigError(
                f"lora_resolvers is {self.lora_resolvers}, and resolvers load adapters while the server runs: set --enable-lora and "
                "--allow-runtime-lora-updating too."
            )

    @property
    def num_host_adapters(self) -> int:
        return self.max_cpu_loras if self.max_cpu_loras is not None else max(self.max_loras, 8)

    def modules(self) -> list[tuple[str, str]]:
        """(name, path) of each of `lora_modules`."""
        return [split_module(module) for module in self.lora_modules]


def split_module(module: str) -> tuple[str, str]:
    """name=path as a pair. Raises `ConfigError`."""
    name, equals, path = module.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"lora_modules has {module!r}; write name=path, such as sql=/adapters/sql.")
    return name, path

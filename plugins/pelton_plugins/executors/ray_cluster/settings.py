"""Settings of the executor `ray`."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

SETTINGS = "ray"
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the executor that has its ranks in a Ray cluster."""

    address: str | None = None
    """Of the cluster; RAY_ADDRESS, or the one of this host, when unset."""
    placement: str = "PACK"
    """How ranks lie on hosts, by Ray's words: PACK (few hosts), SPREAD, STRICT_PACK (one host) or STRICT_SPREAD (a host each)."""
    num_cpus: float = 1.0
    """Cores that each rank asks for."""
    num_gpus: float | None = None
    """GPUs that each rank asks for; when unset 1, and 0 where the engine's own host has none and no `device` is set."""
    resources: dict[str, float] = {}
    """Further resources of the cluster that each rank asks for."""
    start_timeout_s: float = 120.0
    """How long the cluster may take to place the ranks."""

    def __post_init__(self) -> None:
        if self.placement not in STRATEGIES:
            raise ConfigError(f"ray.placement is {self.placement!r}; use one of {', '.join(STRATEGIES)}.")
        if not self.start_timeout_s > 0:
            raise ConfigError(f"ray.start_timeout_s is {self.start_timeout_s}; use seconds above 0.")

"""Settings of load balancing between the ranks of expert parallelism: experts change their places."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError


class EPLBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When experts move from rank to rank, and who says where to."""

    enable_eplb: bool = False
    """Experts change places between steps, so that each rank's together get as many tokens as another's."""
    window_size: int = 1000
    """Steps before a move whose tokens count."""
    step_interval: int = 3000
    """Steps between two moves."""
    num_redundant_experts: int = 0
    """Places beyond one for each expert: the most loaded ones have copies there."""
    log_balancedness: bool = False
    """Log at each move how even the load was: the mean over ranks by the largest."""
    policy: str = "default"
    """Name of the policy that says where experts go."""

    def __post_init__(self) -> None:
        for name in ("window_size", "step_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"eplb_config.{name} is {getattr(self, name)}; use at least 1.")
        if self.num_redundant_experts < 0 or (self.num_redundant_experts and not self.enable_eplb):
            raise ConfigError(
                f"eplb_config.num_redundant_experts is {self.num_redundant_experts}; use 0, or more with enable_eplb."
            )

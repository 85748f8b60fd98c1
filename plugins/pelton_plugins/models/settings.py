"""Settings of the models that come with Pelton: `plugin_config.models`."""

from __future__ import annotations

import msgspec

NAME = "models"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all models."""

    count_expert_load: bool = False
    """Each layer of experts counts the tokens that each expert was given, on the device; the worker's call `expert_load` reads it."""

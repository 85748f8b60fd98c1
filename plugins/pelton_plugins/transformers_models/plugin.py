"""The model of last resort: any causal language model that transformers can build."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import ModelEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_models() -> Sequence[ModelEntry]:
    return [
        ModelEntry(
            name="transformers",
            load="pelton_plugins.transformers_models.model:TransformersForCausalLM",
            architectures=("*",),
            priority=10,
            implementation="transformers",
            doc="any causal model that transformers builds and whose attention goes through its interface",
        )
    ]

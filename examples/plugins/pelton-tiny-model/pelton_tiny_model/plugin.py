"""Offers `TinyForCausalLM`: what a model plugin has to say. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import ModelEntry

PELTON_API = ">=1,<2"


@hookimpl
def pelton_models() -> Sequence[ModelEntry]:
    return [
        ModelEntry(
            name="tiny",
            load="pelton_tiny_model.model:TinyForCausalLM",
            architectures=("TinyForCausalLM",),
            doc="a small decoder: attention and a gated MLP, tied embeddings",
        )
    ]

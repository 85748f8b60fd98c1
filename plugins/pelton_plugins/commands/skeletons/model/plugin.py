"""A model: a decoder under an architecture name of its own.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import ModelEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_models() -> Sequence[ModelEntry]:
    architectures = ("SkeletonForCausalLM",)  # what config.json's `architectures` names
    return [ModelEntry(name="skeleton", load="pelton_skeleton.model:SkeletonForCausalLM", architectures=architectures)]

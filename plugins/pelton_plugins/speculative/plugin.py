"""Offers the built-in draft proposers."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_draft_proposers() -> Sequence[Entry]:
    return [
        Entry(
            name="ngram",
            load="pelton_plugins.speculative.ngram:NgramProposer",
            doc="looks up the end of the text earlier in it, and proposes what followed there",
        ),
        Entry(
            name="medusa",
            load="pelton_plugins.speculative.medusa:MedusaDrafter",
            doc="heads of a checkpoint that read the model's hidden state, each a token further on",
        ),
        Entry(
            name="eagle",
            load="pelton_plugins.speculative.eagle:EagleDrafter",
            doc="a layer of a checkpoint that goes on from the model's hidden states and embedding",
        ),
        Entry(
            name="eagle3",
            load="pelton_plugins.speculative.eagle3:Eagle3Drafter",
            doc="the same from hidden states of several depths, with an output head of its own",
        ),
        Entry(
            name="draft_model",
            priority=10,  # it would take any checkpoint
            load="pelton_plugins.speculative.draft_model:DraftModel",
            doc="a small model of the same vocabulary",
        ),
    ]

"""Conformance of this package's draft proposer."""

from __future__ import annotations

from pelton.spec_decode.interface import DraftProposer, ProposerContext
from pelton.testing.draft_proposer import DraftProposerConformance

from pelton_skeleton.proposer import SkeletonProposer


class TestSkeletonProposer(DraftProposerConformance):
    def make_proposer(self, context: ProposerContext) -> DraftProposer:
        return SkeletonProposer(context)

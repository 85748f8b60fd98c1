"""Conformance of this package's communicator."""

from __future__ import annotations

from pelton.testing.communicator import CommunicatorConformance


class TestSkeletonCommunicator(CommunicatorConformance):
    load = "pelton_skeleton.communicator:SkeletonCommunicator"

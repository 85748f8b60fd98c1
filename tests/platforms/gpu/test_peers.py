"""Collectives through peers' memory: in Triton's interpreter between processes of this host, and on a GPU that two ranks share."""

import os
from pathlib import Path

import pytest
import torch

from pelton.testing.communicator import CommunicatorConformance

pytestmark = pytest.mark.usefixtures("forks")
SUPPORT = Path(__file__).parents[2] / "support"


class TestHostPeers(CommunicatorConformance):
    load = "pelton_host_peers:HostPeers"

    @pytest.fixture(autouse=True)
    def interpreted(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestPeersOfOneDevice(CommunicatorConformance):
    load = "pelton_platforms.gpu.peers.communicator:PeerCommunicator"
    device = "cuda:0"

"""Tensors of any size and stride arrive whole, and no buffer is written while the device may still read it."""

import pytest
import torch

from pelton_platforms.device.host_copy import HostCopier


class OrderedEvent:
    """Fails when it is recorded again before somebody waited for it: its buffer would be overwritten in flight."""

    def __init__(self):
        self.is_pending = False

    def record(self):
        assert not self.is_pending
        self.is_pending = True

    def synchronize(self):
        self.is_pending = False


@pytest.mark.parametrize(
    "shape, part_bytes",
    [((7, 3), 1024), ((7, 3), 24), ((5, 4, 3), 16), ((100,), 64), ((), 8), ((0, 4), 8), ((3, 0), 8), ((1, 33), 64)],
)
@pytest.mark.parametrize("source_dtype", [torch.float64, torch.bfloat16])
def test_arrives_whole(shape, part_bytes, source_dtype):
    events = (OrderedEvent(), OrderedEvent())
    copier = HostCopier(events, pin_memory=False, part_bytes=part_bytes)
    for _ in range(3):
        source, target = torch.randn(shape).to(source_dtype), torch.full(shape, torch.nan)
        copier.copy(source, target)
        assert torch.equal(target, source.float())
    copier.finish()
    assert not events[0].is_pending and not events[1].is_pending


def test_strides_of_source_and_target_do_not_matter():
    copier = HostCopier((OrderedEvent(), OrderedEvent()), pin_memory=False, part_bytes=40)
    source, target = torch.randn(9, 6).t()[1:5], torch.zeros(4, 18)
    copier.copy(source, target[:, ::2])
    assert torch.equal(target[:, ::2], source) and not target[:, 1::2].any()

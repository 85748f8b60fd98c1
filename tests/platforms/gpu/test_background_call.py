"""What is made on a thread while a start goes on."""

from __future__ import annotations

import threading

import pytest

from pelton.errors import EngineError
from pelton_platforms.gpu.background_call import BackgroundCall
from pelton_platforms.gpu.peers.communicator import PeerCommunicator


def test_it_is_there_when_it_is_asked_for():
    may_end = threading.Event()
    call = BackgroundCall(lambda: may_end.wait(60))
    assert not call.has_succeeded and BackgroundCall.last is call
    may_end.set()
    assert call.result() is True and call.has_succeeded
    BackgroundCall.wait_for_last()
    assert BackgroundCall.last is None


def test_what_fails_is_raised_by_its_result_alone():
    def fail() -> None:
        raise ValueError("no ranks")

    call = BackgroundCall(fail)
    BackgroundCall.wait_for_last()
    for _ in range(2):
        with pytest.raises(ValueError, match="no ranks"):
            call.result()
    assert not call.has_succeeded


def test_one_is_made_at_a_time_in_order():
    made, may_end = [], threading.Event()
    BackgroundCall(lambda: (may_end.wait(60), made.append("first")))
    threading.Timer(0.05, may_end.set).start()
    second = BackgroundCall(lambda: made.append("second"))
    assert made[:1] == ["first"]
    second.result()
    assert made == ["first", "second"]
    BackgroundCall.wait_for_last()


def test_no_kernel_waits_for_another_rank_while_nccl_is_made():
    """The first collective, of whichever group, waits; what kept NCCL from being made is raised where it is used."""
    order, may_end = [], threading.Event()
    one, other = (PeerCommunicator.__new__(PeerCommunicator) for _ in range(2))
    for communicator in (one, other):
        communicator._has_failed, communicator._nccl = [0], None

    def fail() -> None:
        may_end.wait(60)
        order.append("made")
        raise EngineError("a rank is missing")

    one._nccl = BackgroundCall(fail)
    threading.Timer(0.05, may_end.set).start()
    other.check()
    order.append("launched")
    assert order == ["made", "launched"]
    assert other.nccl is None
    with pytest.raises(EngineError, match="a rank is missing"):
        _ = one.nccl
    one.shutdown()

"""Time limits: what ended before its own leaves nothing behind, neither memory nor an end for the next of its name."""

from __future__ import annotations

from pelton.messages.outputs import FinishReason
from pelton.testing.scheduler import Harness, make_request


def test_what_ended_in_time_is_not_kept_until_its_limit_passes():
    harness = Harness(prefix_caching=False)
    harness.add(make_request("long", 3, 120, timeout_s=7200.0))
    for index in range(50):
        harness.add(make_request(f"r{index}", 3, 1, timeout_s=3600.0))
        harness.step()
    heap = harness.scheduler._deadlines._heap
    assert len(heap) <= 2 * 2
    assert not any(hasattr(part, "token_ids") for entry in heap for part in entry)
    assert harness.scheduler.next_deadline() == 7200.0


def test_limits_pass_in_order_whatever_was_dropped_between():
    harness = Harness(num_blocks=200, max_num_seqs=40)
    for index in range(40):
        harness.add(make_request(f"r{index}", 3, 100, timeout_s=100.0 - index))
    harness.scheduler.finish_requests([f"r{index}" for index in range(40) if index % 4], FinishReason.ABORT)
    for index in range(40, 60):
        harness.add(make_request(f"r{index}", 3, 100, timeout_s=30.5))
    ended = []
    while (deadline := harness.scheduler.next_deadline()) is not None:
        harness.scheduler.expire(deadline)
        outputs = harness.take_outputs()
        ended.append((deadline, [o.request_id for o in outputs if o.finish_reason is FinishReason.ERROR]))
    assert ended[0] == (30.5, [f"r{index}" for index in range(40, 60)])
    assert ended[1:] == [(100.0 - index, [f"r{index}"]) for index in range(36, -1, -4)]
    harness.run()
    harness.check_empty()


def test_an_id_that_is_used_again_does_not_inherit_a_limit():
    harness = Harness()
    harness.add(make_request("a", 3, 1, timeout_s=5.0))
    harness.step()
    harness.add(make_request("a", 3, 20))
    assert harness.scheduler.next_deadline() is None
    harness.scheduler.expire(6.0)
    harness.run_and_check()
    harness.add(make_request("a", 3, 1, timeout_s=5.0))
    harness.run()
    harness.add(make_request("a", 3, 20, timeout_s=9.0))
    assert harness.scheduler.next_deadline() > 9.0
    harness.scheduler.expire(6.0)
    harness.run_and_check()

"""Fair shares: the gap between tenants that both wait is bounded, whatever they send; and the queue behind it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.messages.outputs import EventType, FinishReason
from pelton.testing.scheduler import Harness, make_request
from pelton.testing.scheduling_policy import SchedulingPolicyConformance
from pelton_plugins.scheduler.fair_policy import MAX_TENANTS, FairPolicy
from pelton_plugins.scheduler.tenant_queue import TenantQueue


def policy_with(**fields: Any) -> FairPolicy:
    policy = FairPolicy(clock=lambda: 0.0)
    policy.configure(EngineConfig.from_flat(plugin_config={"fair": fields}))
    policy._clock = Ticks()
    return policy


class Ticks:
    """Every look at the clock is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class TestConformance(SchedulingPolicyConformance):
    policy_class = FairPolicy


def of(tenant: str, name: str, num_prompt: int, num_new: int) -> Any:
    request = make_request(name, num_prompt, num_new)
    request.tenant = tenant
    return request


def order(harness: Harness) -> list[str]:
    """Request ids in the order in which they were admitted."""
    found: list[str] = []
    for _ in range(10_000):
        output = harness.launch()
        found += [] if output is None else [new.request_id for new in output.new]
        if not harness.scheduler.has_unfinished_requests():
            return found
        harness.retire()
    raise AssertionError("it does not end")


def test_a_tenant_of_many_requests_does_not_hold_up_one_of_few() -> None:
    harness = Harness(policy=policy_with(), max_num_seqs=1)
    for index in range(20):
        harness.add(of("many", f"m{index}", 4, 4))
    for index in range(3):
        harness.add(of("few", f"f{index}", 4, 4))
    admitted = order(harness)
    assert [admitted.index(f"f{index}") for index in range(3)] == [0, 2, 4]  # in turns
    assert [name for name in admitted if name[0] == "m"] == [f"m{index}" for index in range(20)]


def test_weights_are_shares() -> None:
    harness = Harness(policy=policy_with(weights={"gold": 3.0}), max_num_seqs=1)
    for index in range(24):
        harness.add(of("gold", f"g{index}", 4, 4))
        harness.add(of("plain", f"p{index}", 4, 4))
    first = order(harness)[:16]
    assert sum(name[0] == "g" for name in first) == 12


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1.0, 4.0])),
    max_num_seqs=st.sampled_from([1, 2, 4]),
)
def test_the_gap_between_two_that_wait_is_bounded(seed: int, weights: tuple[float, float], max_num_seqs: int) -> None:
    """Theorem 4.4 of the paper: 2 max(w_in L_in, w_out M), M the tokens that a batch may make, by weight."""
    chooser = random.Random(seed)
    policy = policy_with(weights={"a": weights[0], "b": weights[1]})
    harness = Harness(policy=policy, max_num_seqs=max_num_seqs)
    sizes = {
        "a": (chooser.choice((1, 4, 30)), chooser.choice((1, 4, 20))),
        "b": (chooser.choice((1, 30)), chooser.choice((1, 20))),
    }
    for index in range(30):
        for tenant, (num_prompt, num_new) in sizes.items():
            harness.add(of(tenant, f"{tenant}{index}", num_prompt, num_new))
    longest_in, longest_out = (max(size[i] for size in sizes.values()) for i in (0, 1))
    bound = 2 * max(longest_in, 2.0 * max_num_seqs * longest_out) / min(weights) + 2.0 / min(weights)
    waiting = harness.scheduler._table.waiting
    assert isinstance(waiting, TenantQueue)
    for _ in range(5000):
        harness.step()
        if len(waiting._tenants) < 2:
            break
        policy._look(harness.scheduler._table.running, policy._clock())
        assert abs(policy.served("a") - policy.served("b")) <= bound
    harness.run_and_check()


def test_who_was_idle_has_saved_nothing() -> None:
    policy = policy_with()
    harness = Harness(policy=policy, max_num_seqs=1)
    for index in range(12):
        harness.add(of("busy", f"b{index}", 4, 4))
    for _ in range(20):
        harness.step()
    for index in range(12):
        harness.add(of("new", f"n{index}", 4, 4))
    assert [name[0] for name in order(harness)[:8]].count("n") == 4  # in turns, not the new one's debt first


def test_preempted_requests_come_first_and_are_charged_once() -> None:
    policy = policy_with()
    harness = Harness(policy=policy, num_blocks=20)
    for index in range(4):
        harness.add(of("ab"[index % 2], f"r{index}", 12, 30))
    harness.run_and_check()
    assert any(EventType.PREEMPTED in harness.events(f"r{index}") for index in range(4))
    assert policy.served("a") == policy.served("b") == 2 * (12 + 2.0 * 30)


def test_aborted_requests_leave_no_trace() -> None:
    policy = policy_with()
    harness = Harness(policy=policy, max_num_seqs=1)
    for index in range(6):
        harness.add(of("ab"[index % 2], f"r{index}", 4, 8))
    harness.step()
    harness.scheduler.finish_requests([f"r{index}" for index in range(6)], FinishReason.ABORT)
    for _ in range(5):
        harness.step()
    waiting = harness.scheduler._table.waiting
    assert len(waiting) == 0 and not waiting._tenants and not policy._made_by  # type: ignore[attr-defined]


def test_counters_do_not_pile_up() -> None:
    policy = policy_with()
    for index in range(MAX_TENANTS + 5):
        policy._served[str(index)] = float(index)
    policy.arrived("new", [])
    assert len(policy._served) <= MAX_TENANTS


@pytest.mark.parametrize("fields", [{"weights": {"a": 0}}, {"input_weight": -1.0}, {"output_weight": 0.0}])
def test_bad_shares_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use a number above 0"):
        policy_with(**fields)


def test_a_tenant_that_comes_back_has_what_its_running_requests_make_counted_once() -> None:
    policy = policy_with()
    policy._served, policy._making = {"long": 1.0, "waits": 20.0}, {"long": 4.0}
    policy.arrived("long", ["waits"])
    assert policy.served("long") == policy.served("waits") == 20.0


def test_a_tenant_that_has_more_than_those_that_wait_keeps_it() -> None:
    policy = policy_with()
    policy._served, policy._making = {"long": 1.0, "waits": 3.0}, {"long": 4.0}
    policy.arrived("long", ["waits"])
    assert policy.served("long") == 5.0

"""What a sleep does to weights on a device: their storages are emptied, and filled again under everything that refers to them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pelton.errors import NotSupportedError
from pelton_platforms.device import sleeping
from pelton_platforms.device.sleeping import KEEP_WEIGHTS, Sleep


def test_weights_come_back_into_the_storages_that_ops_are_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(24.0).view(4, 6)
    merged, bound = weight[:2], weight.T  # what ops hold
    expected, started = bound.clone(), []
    worker = SimpleNamespace(
        runner=SimpleNamespace(connectors={}), loaded=object(), adapters=None, plan="plan", build="build",
        device=torch.device("cpu"), drop_runner=lambda: started.append("dropped"),
        initialize_kv_cache=started.append, warm_up=lambda: started.append("warm"),
    )  # fmt: skip
    monkeypatch.setattr(sleeping, "_device_storages", lambda worker: [weight.untyped_storage()])
    monkeypatch.setattr(sleeping, "with_num_blocks", lambda plan, count: (plan, count))
    monkeypatch.setattr(sleeping, "bind_caches", lambda plan, build: started.append((plan, build)))
    sleep = Sleep(worker, KEEP_WEIGHTS)  # type: ignore[arg-type]
    assert weight.untyped_storage().nbytes() == 0
    assert started == ["dropped", (("plan", 2), "build")], "layers hold a pool of two blocks, not the old one"
    assert sleep.wake_up(["weights"]) is False
    assert torch.equal(bound, expected) and torch.equal(merged, expected.T[:2])
    assert sleep.wake_up([]) is True
    assert started[2:] == ["plan", "warm"]


def test_connectors_hold_on_to_the_pool() -> None:
    worker = SimpleNamespace(runner=SimpleNamespace(connectors={"store": object()}))
    with pytest.raises(NotSupportedError, match="KV connector store holds on to the KV pool"):
        Sleep(worker, KEEP_WEIGHTS)  # type: ignore[arg-type]

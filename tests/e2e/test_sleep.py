"""Sleep and wake-up of an engine: memory comes back, requests are refused meanwhile, and ids are as before."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from pelton_e2e import generate, make_llm, make_prompts
from pelton_lora import make_adapter

from pelton import LLM, LoRARequest
from pelton.errors import NotSupportedError, RequestError
from pelton_platforms.device import sleeping

POOL_BYTES = 512 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pelton.testing.models import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("sleep")
    path = str(make_tiny_checkpoint(folder / "model", "llama", with_tokenizer=False))
    make_adapter(folder / "adapter", path, seed=1, strength=0.3)
    return folder


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def outputs(llm: LLM, prompts: list[list[int]], adapter: LoRARequest) -> list[list[int]]:
    from pelton_e2e import greedy

    given = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(2)]
    found = llm.generate(given, greedy(), use_tqdm=False, lora_request=[None, adapter] * len(prompts))
    return [list(one.outputs[0].token_ids) for one in found]


def test_ids_are_the_same_after_either_level(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "gc", gc)  # looks at old objects too, as outside of tests
    prompts, adapter = make_prompts(320, (1, 17, 48)), LoRARequest("adapter", 1, str(folder / "adapter"))
    with make_llm(
        str(folder / "model"), kv_cache_memory_bytes=POOL_BYTES, enable_lora=True, max_loras=2
    ) as llm:  # fmt: skip
        expected = outputs(llm, prompts, adapter)
        assert expected[0] != expected[1], "the adapter has an effect"
        for level in (2, 1):
            before = mapped_bytes()
            llm.sleep(level)
            llm.sleep(level)  # it sleeps already
            assert mapped_bytes() < before - POOL_BYTES // 2, "the pool's memory is back"
            with pytest.raises(RequestError, match="The engine sleeps") as refused:
                generate(llm, prompts)
            assert refused.value.status == 503
            with pytest.raises(RequestError, match="weights still sleep"):
                llm.wake_up(["kv_cache"])
            with pytest.raises(RequestError, match="tags has cache; use weights and kv_cache"):
                llm.wake_up(["cache"])
            if level == 1:
                llm.wake_up(["weights"])
                llm.wake_up(["kv_cache"])
            else:
                llm.wake_up()
            llm.wake_up()  # it is awake
            assert outputs(llm, prompts, adapter) == expected


def test_no_sleep_while_requests_run(folder: Path) -> None:
    from pelton_e2e import greedy

    with make_llm(str(folder / "model")) as llm:
        for level in (0, 3, "1"):
            with pytest.raises(RequestError, match=r"Use 1 .* or 2"):
                llm.sleep(level)  # type: ignore[arg-type]
        engine = llm.llm_engine
        engine.add_request("running", {"prompt_token_ids": [5, 6, 7]}, greedy(50))
        engine.step()
        with pytest.raises(RequestError, match="Requests run"):
            llm.sleep()
        while engine.has_unfinished_requests():
            engine.step()
        llm.sleep()
        llm.wake_up()
        assert engine.client.call("worker.execute_dummy_batch") is None
        assert len(generate(llm, [[5, 6, 7]])[0]) > 0


def test_a_worker_without_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pelton_platforms.device.worker import DeviceWorker

    monkeypatch.delattr(DeviceWorker, "sleep")
    with make_llm(str(folder / "model")) as llm:
        with pytest.raises(NotSupportedError, match="DeviceWorker has no method 'sleep'"):
            llm.sleep()
        assert len(generate(llm, [[5, 6, 7]])[0]) > 0

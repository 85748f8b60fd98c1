"""`DeviceWorker` with tiny real models: transformers' greedy ids, chunked, with drafts, resumed, overlapped."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from pelton_worker_fakes import Driver, Running, make_worker

from pelton.errors import ConfigError
from pelton.scheduler.output import GrammarMasks
from pelton.testing.models import VOCAB_SIZE, load_reference, make_tiny_checkpoint, reference_greedy

PROMPTS = [[7], [5, 80, 81], list(range(40, 73)), [11, 12] * 9]
COUNT = 24


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3"])
def model(request, tmp_path_factory):
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("worker") / request.param, request.param)
    return path, reference_greedy(load_reference(path), PROMPTS, COUNT)


@pytest.fixture
def driver(model):
    worker = make_worker(model[0])
    yield Driver(worker.runner)
    worker.shutdown()


def ordered(requests: list[Running]) -> list[tuple[Running, int]]:
    return sorted(((r, len(r.token_ids)) for r in requests), key=lambda row: row[1] != 1)


@torch.inference_mode()
def test_batch_is_transformers_greedy(model, driver):
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    driver.step(ordered(requests))
    driver.decode(requests, COUNT - 1)
    assert [request.output for request in requests] == model[1]


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prefill_beside_decodes(model, driver, chunk):
    first = driver.add(0, PROMPTS[1])
    driver.step([(first, 3)])
    second = driver.add(1, PROMPTS[2])
    while second.num_computed < len(PROMPTS[2]):
        rows = [(first, 1), (second, min(chunk, len(PROMPTS[2]) - second.num_computed))]
        driver.step(rows)
    driver.decode([second], 10)
    assert second.output == model[1][2][:11]
    assert first.output[:COUNT] == model[1][1][: len(first.output)]


@torch.inference_mode()
def test_drafts_accepted_and_rejected(model, driver):
    expected = model[1][3]
    request = driver.add(2, PROMPTS[3])
    driver.step([(request, len(PROMPTS[3]))])
    driver.step([(request, 1)], {2: expected[1:5]})
    assert request.output == expected[:6]
    driver.step([(request, 1)], {2: [expected[6], (expected[7] + 1) % 320, expected[8]]})
    assert request.output == expected[:8]
    driver.decode([request], 4)
    assert request.output == expected[:12]


@torch.inference_mode()
def test_resume_recomputes_prompt_and_output(model, driver):
    requests = [driver.add(slot, PROMPTS[index]) for slot, index in enumerate((1, 2))]
    driver.step(ordered(requests))
    driver.decode(requests, 5)
    driver.resume(requests[0], 4)
    driver.step([(requests[1], 1), (requests[0], len(requests[0].token_ids))])
    driver.decode(requests, 8)
    assert requests[0].output == model[1][1][: len(requests[0].output)]
    assert requests[1].output == model[1][2][: len(requests[1].output)]


@torch.inference_mode()
@torch.inference_mode()
def sampled(path, mode: str) -> list[list[int]]:
    """Random rows, some under masks, in steps of other sizes each time."""
    worker, chooser = make_worker(path, cudagraph_mode=mode), random.Random(2)
    driver = Driver(worker.runner)
    requests = [driver.add(slot, prompt, seed=slot, temperature=1.0) for slot, prompt in enumerate(PROMPTS)]
    driver.step(ordered(requests))
    for _ in range(20):
        rows = [(request, 1) for request in chooser.sample(requests, chooser.randint(1, len(requests)))]
        if chooser.random() < 0.5:
            driver.step(rows)
            continue
        output = driver.plan(rows, grammar_rows=[0])
        assert driver.runner.execute(output) is None
        allowed = bytes(chooser.randrange(256) for _ in range(VOCAB_SIZE // 8))
        result = driver.runner.sample(GrammarMasks(step_id=output.step_id, bitmask=allowed, num_masks=[1]))
        driver.take(rows, None, result)
    assert (worker.runner.graphs is not None) == (mode != "NONE")
    worker.shutdown()
    return [request.output for request in requests]


def test_recorded_steps_sample_what_others_sample(model):
    """Tapes of all sizes compute in one room: logits that a step leaves there are read before the next one."""
    expected = sampled(model[0], "NONE")
    assert sampled(model[0], "FULL_DECODE_ONLY") == expected


def test_report_and_specs(model):
    worker = make_worker(model[0])
    report = worker.report()
    assert report.platform == "cpu" and report.device.startswith("cpu: ")
    assert report.attention_backend in ("native", "sdpa") and report.attention_reason
    assert {"device", "build model", "load weights", "allocate KV cache", "warm up"} <= set(report.phase_s)
    parameters = sum(p.nbytes for p in worker.model.parameters())
    assert parameters <= report.weights_bytes < 2 * parameters
    assert msgspec.msgpack.encode(report)
    assert worker.available_kv_cache_bytes() == 512 * 2**20


def test_pool_starts_as_zeros(model):
    worker = make_worker(model[0])
    assert all(not page.any() for page in worker.runner.pool.pages)


def test_dummy_weights_need_no_checkpoint(model, tmp_path):
    (tmp_path / "config.json").write_text((model[0] / "config.json").read_text())
    workers = [make_worker(tmp_path, load_format="dummy", skip_tokenizer_init=True, seed=seed) for seed in (0, 0, 1)]
    states = [dict(worker.model.named_parameters()) for worker in workers]
    for name, weight in states[0].items():
        assert bool(weight.isfinite().all()) and float(weight.float().abs().max()) < 3, name
        assert torch.equal(weight, states[1][name])
    assert any(not torch.equal(weight, states[2][name]) for name, weight in states[0].items())
    driver = Driver(workers[0].runner)
    request = driver.add(0, PROMPTS[1])
    with torch.inference_mode():
        driver.step([(request, 3)])
    assert len(request.output) == 1 and not request.errors


def test_unknown_load_format_lists_loaders(model):
    with pytest.raises(ConfigError, match=r"load_format is 'tape'.*safetensors"):
        make_worker(model[0], load_format="tape")

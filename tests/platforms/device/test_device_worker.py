"""`DeviceWorker` with tiny real models: transformers' greedy ids, chunked, with drafts, resumed, overlapped."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from pelton_worker_fakes import Driver, Running, make_worker

from pelton.attention.support import GraphSupport
from pelton.config import CUDAGraphMode, EngineConfig
from pelton.errors import ConfigError
from pelton.kv_cache.planner import plan_kv_cache
from pelton.messages.step import GrammarMasks
from pelton.model.build import make_build_config
from pelton.model.registry import build_model
from pelton.model.resolve import resolve_model
from pelton.plugins import load_plugins
from pelton.testing.graphs import FakeGraphRecorder, StaticAttention, StaticBound
from pelton.testing.models import VOCAB_SIZE, load_reference, make_tiny_checkpoint, reference_greedy
from pelton_platforms.cpu.platform import CPUPlatform
from pelton_platforms.device.first_start import FirstStart
from pelton_platforms.device.graphs.call_graph import CallGraphRecorder
from pelton_platforms.device.graphs.capture_plan import CaptureQueue
from pelton_platforms.device.graphs.graph_runner import GraphRunner
from pelton_platforms.device.graphs.graph_setup import (
    GraphLimits,
    choose_mode,
    limits_of_stages,
    max_piecewise_tokens,
    use_graphs,
)
from pelton_platforms.device.memory import ATTENTION_BYTES, StepMemory
from pelton_plugins.bench.table.shapes import write_shape

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
    """Graphs of all sizes compute in one arena: logits that a step leaves there are read before the next one."""
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


NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
EVERY, DECODES = tuple(CUDAGraphMode), (NONE, DECODE_ONLY)  # offered by a GPU; by a CPU
NEVER, SINGLE, ALWAYS = GraphSupport.NEVER, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, GraphSupport.ALWAYS


@pytest.mark.parametrize(
    "flat, support, offered, mode, note",
    [
        pytest.param({}, ALWAYS, EVERY, BOTH, None, id="default"),
        pytest.param({}, SINGLE, DECODES, DECODE_ONLY, None, id="what-this-platform-always-makes-of-it"),
        pytest.param({}, ALWAYS, (NONE,), NONE, None, id="no-graphs-here"),
        pytest.param({}, NEVER, EVERY, PIECEWISE,
                     r"FULL_AND_PIECEWISE became PIECEWISE: an attention backend .* cannot be captured", id="default-lowered"),
        pytest.param({}, NEVER, DECODES, NONE, r"FULL_AND_PIECEWISE became NONE: an attention backend", id="default-lost"),
        pytest.param({"optimization_level": 1}, SINGLE, DECODES, NONE,
                     r"PIECEWISE became NONE: this platform captures FULL_DECODE_ONLY only", id="a-level-that-captures-nothing"),
        pytest.param({"optimization_level": 0}, SINGLE, DECODES, NONE, None, id="O0"),
        pytest.param({"cudagraph_mode": "full"}, ALWAYS, DECODES, DECODE_ONLY,
                     r"FULL became FULL_DECODE_ONLY: this platform captures FULL_DECODE_ONLY only", id="named-and-lowered"),
        pytest.param({"cudagraph_mode": "full"}, ALWAYS, (NONE,), NONE,
                     r"FULL became NONE: this platform captures no graphs", id="named-without-graphs"),
        pytest.param({"cudagraph_mode": "none"}, ALWAYS, EVERY, NONE, None, id="named-none"),
        pytest.param({"enforce_eager": True}, ALWAYS, EVERY, NONE, None, id="eager"),
        pytest.param({"enforce_eager": True, "cudagraph_mode": "FULL"}, ALWAYS, EVERY, NONE,
                     r"enforce_eager wins over cudagraph_mode FULL", id="eager-beside-a-mode"),
        pytest.param({"enforce_eager": True, "cudagraph_capture_sizes": [1, 8]}, ALWAYS, EVERY, NONE,
                     r"cudagraph_capture_sizes 1, 8 left out: no graphs are captured", id="eager-beside-sizes"),
        pytest.param({"enforce_eager": True, "debug_dump_path": "/d"}, ALWAYS, EVERY, NONE,
                     r"debug_dump_path /d stays empty: no graphs are captured", id="eager-beside-a-dump"),
        pytest.param({"debug_dump_path": "/d"}, ALWAYS, DECODES, DECODE_ONLY,
                     r"debug_dump_path /d stays empty: platform 'cpu' writes none", id="a-dump-on-a-cpu"),
    ],
)  # fmt: skip
def test_a_note_says_what_became_of_a_graph_mode(model, monkeypatch, flat, support, offered, mode, note):
    worker = make_worker(model[0], attention_backend="sdpa", enforce_eager=True)
    loaded = replace(worker.loaded, config=EngineConfig.from_flat(**flat))
    monkeypatch.setattr(worker.platform, "supported_graph_modes", offered)
    monkeypatch.setattr(worker.build.attention, "graph_support", lambda: support)
    assert worker.notes == []
    assert choose_mode(loaded) is mode
    assert len(worker.notes) == (note is not None)
    assert note is None or re.search(note, worker.notes[0])
    worker.shutdown()


def test_graphs_without_room_are_the_operators_error(model, monkeypatch):
    def make_room(self, num_bytes):
        raise torch.OutOfMemoryError("Tried to allocate.")

    monkeypatch.setattr(CPUPlatform, "graph_recorder", lambda self: FakeGraphRecorder())
    monkeypatch.setattr(GraphRunner, "make_room", make_room)
    with pytest.raises(
        ConfigError, match=r"Captured graphs compute in \d+ bytes.*num_gpu_blocks_override.*enforce_eager"
    ):
        make_worker(model[0], cudagraph_mode="FULL_DECODE_ONLY")


@pytest.mark.parametrize("support", [GraphSupport.UNIFORM_BATCH, ALWAYS])
def test_prompts_are_captured_where_all_backends_can_be(model, monkeypatch, support):
    worker = make_worker(model[0], attention_backend="sdpa", enforce_eager=True)
    loaded = replace(worker.loaded, config=EngineConfig.from_flat(cudagraph_capture_sizes=[1, 16]))
    monkeypatch.setattr(CPUPlatform, "graph_recorder", lambda self: FakeGraphRecorder())
    monkeypatch.setattr(worker.build.attention, "graph_support", lambda: support)
    use_graphs(loaded, worker.runner, BOTH)
    assert worker.runner.graphs.dispatcher.prompt_sizes == ([16] if support is ALWAYS else [])
    worker.shutdown()


@pytest.mark.parametrize(
    "sizes, captured, note",
    [
        ([1, 4], {1, 4}, None),
        (
            [2, 9, 300],
            {2},
            "cudagraph_capture_sizes 9, 300 left out: .*FULL_DECODE_ONLY captures have at most 6 tokens$",
        ),
        ([300], set(), "sizes 300 left out: .* 6 tokens; nothing is captured$"),
    ],
)
def test_capture_sizes_that_no_step_has_are_left_out_and_noted(model, monkeypatch, sizes, captured, note):
    monkeypatch.setattr("pelton_platforms.cpu.platform.CPUPlatform.graph_recorder", lambda self: FakeGraphRecorder())
    monkeypatch.setattr("pelton_backends.sdpa.backend.SDPABackend", StaticAttention)
    worker = make_worker(model[0], attention_backend="sdpa", cudagraph_capture_sizes=sizes)
    assert (
        {key.num_reqs for key in worker.runner.graphs.full._captured} == captured
        if captured
        else not worker.runner.graphs
    )
    assert len(worker.notes) == (note is not None)
    assert note is None or re.search(note, worker.notes[0])


@pytest.mark.parametrize("flat", [{"enforce_eager": True}, {"cudagraph_mode": "NONE"}])
def test_the_start_runs_attention_of_both_kinds_without_graphs(model, monkeypatch, flat):
    """What the first request would otherwise compile."""
    seen = []

    class WatchedBound(StaticBound):
        def __call__(self, query, metadata, output):
            seen.append((metadata.num_decode_rows, metadata.max_query_len, len(query), metadata.num_actual_tokens))
            super().__call__(query, metadata, output)

    class Watched(StaticAttention):
        def bind(self, layer):
            return WatchedBound(layer)

    monkeypatch.setattr("pelton_backends.sdpa.backend.SDPABackend", Watched)
    worker = make_worker(model[0], attention_backend="sdpa", **flat)
    num_layers = len(worker.build.attention_layers)
    assert worker.runner.graphs is None
    assert seen == [(0, 16, 16, 0)] * num_layers + [(1, 1, 1, 0)] * num_layers
    assert all(not page.any() for page in worker.runner.pool.pages)
    assert not worker.runner.state.num_computed_tokens.any()


def test_memory_is_kept_for_what_the_profile_leaves_out(model, monkeypatch):
    worker, asked = make_worker(model[0], enforce_eager=True, max_num_seqs=64, max_side_table_seqs=2), []

    def available(config, *, weights_bytes, peak_activation_bytes):
        asked.append(peak_activation_bytes)
        return 2**29

    monkeypatch.setattr(worker.platform, "available_kv_cache_bytes", available)
    monkeypatch.setattr(worker.platform, "measure_peak_bytes", lambda run: run() or 1000)
    worker.available_kv_cache_bytes()
    state, buffers = worker.runner.state, worker.runner.buffers
    tables = [*state.block_tables, *buffers.block_tables]
    side = sum(getattr(state.side, name).nbytes for name in ("counts", "in_prompt", "bias", "banned", "stop_ids"))
    num_blocks = -(-state.max_model_len // worker.config.kv_cache.block_size)  # this worker's pool has smaller ones
    blocks = sum(table.nbytes * num_blocks // table.shape[1] for table in tables)
    held = state.token_ids.nbytes + blocks + side
    assert asked[0] - 1000 - len(state.block_tables) * ATTENTION_BYTES == pytest.approx(held, rel=0.03)
    assert min(blocks, side) > 0.06 * held, "each would be missed"


def test_state_that_does_not_fit_is_the_operators_error(model, monkeypatch):
    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("Tried to allocate.")

    monkeypatch.setattr("pelton_platforms.device.steps.batch_state.SideTables", no_room)
    with pytest.raises(ConfigError, match=r"state of \d+ requests takes about \d+ bytes.*max_side_table_seqs lower"):
        make_worker(model[0])


def test_stages_capture_what_all_of_them_can(model, monkeypatch):
    """One may have layers alone that cannot be captured, or more numbers to compute: else stages would pad a step to different sizes."""
    worker = make_worker(model[0], attention_backend="sdpa", enforce_eager=True)
    alone = replace(worker.loaded, config=EngineConfig.from_flat())
    monkeypatch.setattr(worker.platform, "supported_graph_modes", EVERY)
    monkeypatch.setattr(worker.platform, "pads_graphs", True)
    monkeypatch.setattr(CPUPlatform, "graph_recorder", lambda self: FakeGraphRecorder())
    monkeypatch.setattr(worker.build.attention, "graph_support", lambda: ALWAYS)
    assert limits_of_stages(worker.build, worker.model) == alone.graph_limits == GraphLimits()
    assert choose_mode(alone) is BOTH
    for other, mode in (((ALWAYS, 16), BOTH), ((GraphSupport.NEVER, 1 << 30), PIECEWISE)):
        told = torch.tensor([other], dtype=torch.int32)
        stages = SimpleNamespace(all_gather=lambda own, dim, told=told: torch.cat([own, told], dim))
        monkeypatch.setattr(worker.build.parallel, "stages", stages)
        loaded = replace(alone, graph_limits=limits_of_stages(worker.build, worker.model))
        assert choose_mode(loaded) is mode
        use_graphs(loaded, worker.runner, mode)
        assert worker.runner.graphs.dispatcher.mixed_sizes[-1] == (16 if mode is BOTH else 64)
    worker.shutdown()


@pytest.mark.parametrize("mode, left", [(BOTH, DECODE_ONLY), (PIECEWISE, NONE)])
def test_a_recorder_that_runs_what_it_records_gets_no_pieces(model, monkeypatch, mode, left):
    """It would run the model a second time for them, without attention."""
    worker = make_worker(model[0], attention_backend="sdpa", enforce_eager=True)
    loaded = replace(worker.loaded, config=EngineConfig.from_flat(cudagraph_capture_sizes=[1]))
    monkeypatch.setattr(CPUPlatform, "graph_recorder", lambda self: CallGraphRecorder())
    monkeypatch.setattr(worker.build.ops, "unrecordable", lambda: [])
    use_graphs(loaded, worker.runner, mode)
    assert [f"cudagraph_mode {mode} became {left}: platform 'cpu' records no pieces"] == worker.notes
    graphs = worker.runner.graphs
    assert (graphs is None) if left is NONE else graphs.dispatcher.mode is left
    worker.shutdown()


@pytest.mark.parametrize("is_left", [True, False])
def test_memory_of_the_largest_step_is_taken_before_requests_come(model, monkeypatch, is_left):
    peak, order, empty = 123_457, [], torch.empty

    def take(*size, **kwargs):
        if size != (peak,):
            return empty(*size, **kwargs)
        order.append(kwargs["device"].type)
        if not is_left:
            raise torch.OutOfMemoryError("Tried to allocate.")
        return empty(*size, **kwargs)

    def note(owner, name):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args: order.append(name) or method(self, *args))

    note(FirstStart, "compile_steps")
    note(StepMemory, "make_room_for_captures")
    note(CaptureQueue, "capture_first")
    monkeypatch.setattr(CPUPlatform, "supported_graph_modes", tuple(CUDAGraphMode))
    monkeypatch.setattr(CPUPlatform, "graph_recorder", lambda self: FakeGraphRecorder())
    monkeypatch.setattr(CPUPlatform, "measure_peak_bytes", lambda self, run: peak)
    monkeypatch.setattr(torch, "empty", take)
    worker = make_worker(model[0], cudagraph_mode="FULL_DECODE_ONLY")
    # What compiling took is given back, and the room is taken in a capture, which frees nothing.
    assert order == ["compile_steps", "make_room_for_captures", "cpu", "capture_first"]
    notes = [note for note in worker.report().notes if f"the largest step takes ({peak} bytes)" in note]
    assert len(notes) == (not is_left)


@pytest.mark.parametrize(
    "flat, setting",
    [
        ({"num_gpu_blocks_override": 10**12}, "num_gpu_blocks_override is 1000000000000"),
        ({"kv_cache_memory_bytes": 2**50}, f"kv_cache_memory_bytes is {2**50}"),
    ],
)
def test_a_cache_that_cannot_be_allocated_is_the_operators_error(model, monkeypatch, flat, setting):
    monkeypatch.setattr(CPUPlatform, "available_kv_cache_bytes", lambda self, config, **taken: 2**29)
    worker = make_worker(model[0], **flat)
    plan = plan_kv_cache(
        worker.kv_cache_specs(), 0, num_blocks_override=10**12, max_model_len=96
    )  # more than can be addressed
    bytes_a_block = sum(tensor.size_bytes for tensor in plan.tensors) // 10**12
    fits = f"Set it lower: {2**29 // bytes_a_block} blocks, {2**29} bytes, were found to fit"
    with pytest.raises(
        ConfigError, match=f"{setting}: a KV cache of 1000000000000 blocks.* cannot be allocated .*{fits}"
    ):
        worker.initialize_kv_cache(plan)


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


@pytest.mark.parametrize(
    "shape, settings, tokens",
    [
        pytest.param("qwen3-0.6b", {}, 16_384, id="0.6B"),
        pytest.param("qwen3-0.6b", {"hidden_size": 2560, "intermediate_size": 9728}, 3264, id="between"),
        pytest.param("llama3.1-8b", {}, 1344, id="8B"),
        pytest.param(
            "llama3.1-8b", {"tie_word_embeddings": True, "vocab_size": 10}, 1344, id="whatever-its-vocabulary"
        ),
        pytest.param("llama3.1-8b", {"hidden_size": 16_384, "intermediate_size": 53_248}, 512, id="large"),
    ],
)
def test_steps_of_small_layers_are_captured_in_pieces_for_more_tokens(
    tmp_path: Path, shape: str, settings: dict[str, Any], tokens: int
) -> None:
    config = EngineConfig.from_flat(
        model=str(write_shape(shape, tmp_path)), load_format="dummy", skip_tokenizer_init=True, hf_overrides=settings
    )
    plugins = load_plugins(only=[])
    resolved = resolve_model(config, plugins)
    build = make_build_config(
        config,
        resolved,
        plugins,
        device=torch.device("meta"),
        device_type="cpu",
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    assert max_piecewise_tokens(build_model(build, resolved.architecture, plugins), len(build.cache_layers)) == tokens

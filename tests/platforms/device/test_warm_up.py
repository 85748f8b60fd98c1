"""Steps that a first start compiles: which there are, that running them changes nothing, and when they are run."""

from __future__ import annotations

import pytest
import torch
from pelton_worker_fakes import Driver, make_worker

from pelton.ops.selector import BySize
from pelton.sampling.tails import FULL, GREEDY, Variant
from pelton.testing.models import load_reference, make_tiny_checkpoint, reference_greedy
from pelton_platforms.cpu.platform import CPUPlatform
from pelton_platforms.device.steps.step_shapes import padding_shape
from pelton_platforms.device.warm_up import WarmUpPlan, _kind, few_layers

PROMPTS = [[7], [5, 80, 81], list(range(40, 73))]
COUNT = 12


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request, tmp_path_factory):
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("rehearsal") / request.param, request.param)
    return path, reference_greedy(load_reference(path), PROMPTS, COUNT)


def plan_of_numbers(monkeypatch) -> list[int]:
    """Five steps, of which the last two are sentinels; what is returned notes which were run."""
    seen: list[int] = []
    steps = tuple(lambda n=n: seen.append(n) for n in range(5))
    monkeypatch.setattr(WarmUpPlan, "make", lambda runner: WarmUpPlan(steps[:3], steps[3:]))
    return seen


@pytest.fixture
def compiles(monkeypatch):
    """Numbers that `compile_ahead` is to return, in turn, the first for the profile; what it is given runs for real."""
    numbers: list[int] = []

    def compile_ahead(self, run):
        run()
        return numbers.pop(0)

    monkeypatch.setattr(CPUPlatform, "compile_ahead", compile_ahead)
    return numbers


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_a_first_start_runs_every_step_and_serves_as_if_it_had_not(model, compiles, mode):
    compiles += [0, 2, 9]
    worker = make_worker(model[0], cudagraph_mode=mode)
    assert not compiles and "compile kernels" in worker.report().phase_s
    driver = Driver(worker.runner)
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    driver.step(sorted(((r, len(r.token_ids)) for r in requests), key=lambda row: row[1] != 1))
    driver.decode(requests, COUNT - 1)
    assert [request.output for request in requests] == model[1]
    worker.shutdown()


@torch.inference_mode()
def test_a_second_start_runs_the_sentinels_only(model, compiles, monkeypatch):
    compiles += [0, 0]
    seen = plan_of_numbers(monkeypatch)
    worker = make_worker(model[0])
    assert seen == [3, 4] and "compile kernels" not in worker.report().phase_s
    worker.shutdown()


@torch.inference_mode()
def test_a_first_start_runs_all_steps_in_their_order(model, compiles, monkeypatch):
    compiles += [0, 1, 5]
    seen = plan_of_numbers(monkeypatch)
    make_worker(model[0]).shutdown()
    assert seen == [3, 4, 0, 1, 2, 3, 4]


@torch.inference_mode()
def test_it_has_all_captured_sizes_all_samplers_and_rows_of_both_kinds(model, monkeypatch):
    sizes = [1, 4, 12]
    worker = make_worker(model[0], max_num_seqs=12, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=sizes)
    runner, graphs = worker.runner, worker.runner.graphs
    shapes, keys, variants = [], set(), set()

    def spy(owner, name, note):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: note(args) or method(*args, **named))

    spy(runner.ops, "forward_batch", lambda args: shapes.append(args[2]))
    spy(graphs, "_run", lambda args: keys.add((args[0].num_reqs, args[0].has_common_prefix)))
    spy(runner.ops, "sample", lambda args: variants.add(args[0]))
    for backend in runner.backends:
        monkeypatch.setattr(backend, "uses_common_prefix", lambda num_rows, length: num_rows >= 4 and length >= 96)
    monkeypatch.setattr(type(runner.tails), "variants", (GREEDY, FULL))
    captured = len(graphs.full)
    for step in WarmUpPlan.make(runner).all():
        step()
    assert len(graphs.full) == captured, "nothing is captured"
    assert keys == {(1, False), (4, False), (4, True), (12, False)}
    rare = {
        Variant(has_mask=has_mask, has_logprobs=has_logprobs) for has_mask, has_logprobs in ((0, 1), (1, 0), (1, 1))
    }
    assert variants == {GREEDY, FULL, *rare}
    assert padding_shape(16, 96, 1) in shapes and padding_shape(16, 96, 8) in shapes
    prompts = [(shape.num_padded_tokens, shape.max_seq_len) for shape in shapes if not shape.num_decode_rows]
    assert prompts == [(16, 16), (16, 96), (64, 64), (64, 96)], "a step has at most 64 tokens"
    worker.shutdown()


@torch.inference_mode()
def test_without_graphs_it_has_rows_of_one_token_of_all_sizes_with_a_common_prefix_where_it_is_used(model, monkeypatch):
    worker = make_worker(model[0], max_num_seqs=12, enforce_eager=True)
    runner = worker.runner
    for backend in runner.backends:
        monkeypatch.setattr(backend, "uses_common_prefix", lambda num_rows, length: num_rows >= 8)
    shapes = []
    monkeypatch.setattr(runner, "run_padding", lambda shape, variants: shapes.append(shape))
    for step in WarmUpPlan.make(runner).all():
        step()
    decodes = [shape for shape in shapes[:-1] if shape.num_padded_tokens == shape.num_padded_reqs]
    found = [(shape.num_padded_reqs, *shape.common_prefix_blocks[:1]) for shape in decodes]
    width = runner.state.block_tables[0].shape[1]
    assert found == [(1,), (2,), (4,), (8,), (8, width), (8, width // 2), (12,), (12, width), (12, width // 2)]
    worker.shutdown()


@torch.inference_mode()
def test_steps_with_adapters_are_among_them_and_no_more_for_many_slots(model, monkeypatch):
    """So that nobody waits for a compiler when the first request has an adapter, and that max_loras does not prolong a start."""
    found = []
    for max_loras in (1, 7):
        worker = make_worker(model[0], max_num_seqs=12, enable_lora=True, max_loras=max_loras)
        plan = WarmUpPlan.make(worker.runner)
        adapted = set()
        prepare = worker.adapters.prepare

        def note(slots, shape, buffers, *, is_used, prepare=prepare, adapted=adapted):
            if is_used:
                adapted.add(shape.num_padded_tokens)
            return prepare(slots, shape, buffers, is_used=is_used)

        monkeypatch.setattr(worker.adapters, "prepare", note)
        plan.sentinels[-1]()
        assert adapted == {1}, "an earlier start without adapters has not compiled theirs"
        for step in plan.all():
            step()
        found.append((len(plan.all()), len(worker.runner.graphs.full), adapted))
        worker.shutdown()
    assert found[0] == found[1]
    assert {1, 2, 4, 8, 12, 16, 64} <= found[0][2]


def test_of_layers_that_launch_the_same_kernels_one_is_gone_through_and_the_first(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "gemma3", "gemma3", num_hidden_layers=6)
    worker = make_worker(path)
    layers = worker.model.layers
    windows = [layer.attn.sliding_window for layer in layers]
    with few_layers(worker.model):
        few = [list(layers).index(layer) for layer in worker.model.layers]
    assert worker.model.layers is layers and len(layers) == 6
    assert few == sorted({0, 1, *(windows.index(window, 1) for window in windows[1:])}) and len(few) == 3
    worker.shutdown()


def test_of_layers_of_which_one_reads_what_the_other_gives_two_are_gone_through(tmp_path):
    sizes = {"num_hidden_layers": 6, "mlp_only_layers": [0, 3]}
    worker = make_worker(make_tiny_checkpoint(tmp_path / "qwen3_moe", "qwen3_moe", **sizes))
    layers = list(worker.model.layers)
    with few_layers(worker.model):
        assert [layers.index(layer) for layer in worker.model.layers] == [0, 1, 2, 3]
    worker.shutdown()


@pytest.mark.parametrize("runner", ["generate", "pooling"])
@torch.inference_mode()
def test_layers_that_are_left_know_their_neighbours(runner, tmp_path):
    """Of four layers with experts, the last of which nobody reads: the first two."""
    path = make_tiny_checkpoint(tmp_path / "qwen3_moe", "qwen3_moe", num_hidden_layers=4)
    worker = make_worker(path, runner=runner)
    model = worker.model if runner == "generate" else worker.model.model
    readers = {}
    for layer in model.layers:
        op = lambda *args, call=layer.experts.add_norm_moe: call(*args)  # noqa: E731
        op.read_by = lambda reader, layer=layer: readers.update({layer: reader})
        layer.experts.add_norm_moe = op
        layer.qkv_proj.reader = lambda num_tokens, layer=layer: layer

    first, second, third, last = model.layers

    def read_by():
        return [readers[layer](5) for layer in (first, second, third, last)]

    model.link_layers()
    assert read_by() == [second, third, last, None]
    with few_layers(worker.model):
        assert list(model.layers) == [first, second]
        assert [readers[layer](5) for layer in model.layers] == [second, None]
    assert read_by() == [second, third, last, None]
    for hooked in (
        third.register_forward_pre_hook,
        third.qkv_proj.register_forward_pre_hook,
        second.register_forward_hook,
    ):
        hook = hooked(lambda *given: None)
        assert read_by() == [second, None, last, None], "somebody else reads it too"
        hook.remove()
    third.qkv_proj = torch.nn.Linear(1, 1)
    model.link_layers()
    assert read_by() == [second, None, last, None], "somebody's own product"
    worker.shutdown()


def test_ops_that_share_the_sizes_are_not_settings_of_a_layer():
    layer = torch.nn.Module()
    layer.op = BySize([])
    assert hash(_kind(layer)) == hash(_kind(torch.nn.Module()))


def test_layers_of_a_model_that_pools_are_left_out_too(tmp_path):
    worker = make_worker(make_tiny_checkpoint(tmp_path / "qwen3", "qwen3", num_hidden_layers=4), runner="pooling")
    layers = worker.model.model.layers
    with few_layers(worker.model):
        assert len(worker.model.model.layers) == 2
    assert worker.model.model.layers is layers and len(layers) == 4
    worker.shutdown()


@torch.inference_mode()
def test_warm_up_steps_before_there_are_weights_leave_no_trace(model, monkeypatch):
    ran = []

    def compile_soon(self, run):
        run()
        return ran.append(run) is None

    monkeypatch.setattr(CPUPlatform, "compile_soon", compile_soon)
    monkeypatch.setattr(CPUPlatform, "compile_ahead", lambda self, run: 0)
    worker = make_worker(model[0], cudagraph_mode="FULL_AND_PIECEWISE")
    assert len(ran) == 1 and "list kernels" in worker.report().phase_s
    assert len(worker.report().notes) == len(set(worker.report().notes))
    driver = Driver(worker.runner)
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    driver.step([(r, len(r.token_ids)) for r in requests])
    driver.decode(requests, COUNT - 1)
    assert [request.output for request in requests] == model[1]
    worker.shutdown()

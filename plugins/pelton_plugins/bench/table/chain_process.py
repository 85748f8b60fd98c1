"""Times the parts of a model's decode step: `python -m pelton_plugins.bench.table.chain_process JSON`; prints one JSON object.

Works with models of the built-in decoders' shape: `layers` with qkv_proj, attn, o_proj, gate_up_proj and down_proj, or experts in
place of the last two.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from pelton.attention.metadata import BatchDescriptor, ForwardBatch
from pelton.config import EngineConfig
from pelton.errors import NotSupportedError
from pelton.graphs.recorder import Graph
from pelton.kv_cache.planner import plan_kv_cache
from pelton.model.resolve import resolve_model
from pelton.platform.select import select_platform
from pelton.plugins import load_plugins
from pelton.sampling.tails import GREEDY, only_best
from pelton.worker.inputs import StepShape
from pelton.worker.interface import WorkerContext
from pelton.worker.select import worker_class

COPY_BYTES = 2**30
ROUNDS = 5
ROOM_STEPS = 64
"""Between two resets of the contexts: warm-up, capture and a round of replays."""


def room_tokens(num_drafts: int) -> int:
    """Return what a context may grow by between two resets."""
    return ROOM_STEPS * (1 + num_drafts)


class Timer:
    """Times work on the worker's device: captured where the platform can, else called."""

    def __init__(self, worker: Any, replays: int) -> None:
        self.recorder = worker.platform.graph_recorder()
        self.synchronize = worker.platform.synchronize
        self.is_cuda = worker.device.type == "cuda"
        self.replays = replays
        self._graphs: list[Graph] = []  # the recorder's memory lives as long as one of its graphs

    def seconds(self, call: Callable[[], Any], reset: Callable[[], None] = lambda: None) -> float:
        """Return the seconds of one run: the median of some means, with `reset` before each."""
        kept = [call(), call()]  # compiles, tunes, loads
        self.synchronize()
        run = call
        if self.recorder is not None:
            self.recorder.begin()
            kept.append(call())
            self._graphs.append(self.recorder.end())
            run = self._graphs[-1].replay
        for _ in range(3):
            run()
        means = []
        for _ in range(ROUNDS):
            reset()
            means.append(self._mean(run))
        reset()
        return statistics.median(means)

    def _mean(self, run: Callable[[], Any]) -> float:
        if not self.is_cuda:
            began = time.perf_counter()
            for _ in range(self.replays):
                run()
            self.synchronize()
            return (time.perf_counter() - began) / self.replays
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(self.replays):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / self.replays


def make_worker(settings: dict[str, Any], most_rows: int) -> Any:
    """A device with a model and room for `most_rows` requests, without an engine."""
    plugins = load_plugins()
    config = EngineConfig.from_flat(**settings)
    model = resolve_model(config, plugins)
    platform = select_platform(config, plugins)
    room = max(config.scheduler.max_num_seqs or platform.default_max_num_seqs, most_rows)
    config = msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, max_num_seqs=room))
    worker = worker_class(platform, plugins)(
        WorkerContext(config=config, model=model, platform=platform, plugins=plugins)
    )
    if not hasattr(type(worker), "build"):
        raise NotSupportedError(
            f"{type(worker).__name__} is not Pelton's own worker, whose steps are taken apart here."
        )
    worker.init_device()
    worker.load_model()
    return worker


def give_memory(worker: Any, most_rows: int, context_len: int, num_drafts: int = 0) -> None:
    """A pool with blocks for `most_rows` contexts that share nothing, and room for the tokens that replays add."""
    specs, most_tokens = worker.kv_cache_specs(), context_len + room_tokens(num_drafts)
    block_size = next(iter(specs.values())).block_size
    num_blocks = 1 + most_rows * -(-most_tokens // block_size)
    worker.initialize_kv_cache(plan_kv_cache(specs, 2**50, num_blocks_override=num_blocks, max_model_len=most_tokens))


class DecodeStep:
    """A decode step of `rows` requests with `context_len` tokens each, as the worker's graphs hold it."""

    def __init__(self, worker: Any, rows: int, context_len: int, num_drafts: int = 0) -> None:
        """num_drafts: of each request, which the step looks up and verifies."""
        self.runner, self.rows, self.context_len = worker.runner, rows, context_len
        self.drafts = self.runner.ops.drafts if num_drafts else None
        state, device, query_len = self.runner.state, worker.device, 1 + num_drafts
        self.num_tokens = rows * query_len
        self.slots = torch.arange(rows, device=device)
        self.num_scheduled = torch.full((rows,), query_len, dtype=torch.int64, device=device)
        self.num_draft = torch.full((rows,), num_drafts, dtype=torch.int64, device=device)
        self.logit_tokens = torch.arange(self.num_tokens, device=device)
        self.result = torch.zeros(rows, 3 + query_len if num_drafts else 2, dtype=torch.int32, device=device)
        for table, block_size in zip(state.block_tables, state.block_sizes, strict=True):
            held = -(-(context_len + room_tokens(num_drafts)) // block_size)
            table[:rows, :held] = 1 + torch.arange(rows * held, dtype=torch.int32, device=device).view(rows, held)
        state.token_ids[:rows, context_len - 1] = 10 + torch.arange(rows, dtype=torch.int32, device=device)
        self.key = BatchDescriptor(num_tokens=self.num_tokens, num_reqs=rows, uniform_query_len=query_len)
        self.shape = StepShape(
            num_reqs=rows, num_tokens=self.num_tokens, num_decode_rows=0 if num_drafts else rows, max_query_len=query_len,
            max_seq_len=state.max_model_len, num_padded_reqs=rows, num_padded_tokens=self.num_tokens,
        )  # fmt: skip
        for backend in self.runner.backends:
            backend.reserve(self.key)
        self.start_again()

    def start_again(self) -> None:
        """Every sampled token has made the contexts longer."""
        self.runner.state.num_computed_tokens[: self.rows] = self.context_len - 1

    def batch(self) -> ForwardBatch:
        if self.drafts is not None:
            self.num_found = self.drafts.make(self.slots, self.num_draft)
        groups = self.runner.ops.prepare_inputs(self.slots, self.num_scheduled, self.shape)
        backends, buffers = self.runner.backends, self.runner.buffers
        return ForwardBatch(
            input_ids=buffers.input_ids[: self.num_tokens],
            positions=buffers.positions[: self.num_tokens],
            attention=tuple(one.build(groups[one.group_id], self.key) for one in backends),
            num_tokens=self.num_tokens,
            slot_mappings=tuple(common.slot_mapping for common in groups),
        )

    def logits(self) -> Tensor:
        return self.end(self.runner.model.forward(self.batch()))

    def end(self, hidden: Any) -> Tensor:
        """As a greedy step has its logits: maybe unwritten, with each row's best token."""
        ops = self.runner.ops if self.drafts is None else self.drafts
        token = only_best.set(getattr(ops.sample(GREEDY), "takes_best", False))
        try:
            return self.runner.model.compute_logits(hidden, self.logit_tokens)
        finally:
            only_best.reset(token)

    def sample(self, logits: Tensor) -> None:
        if self.drafts is None:
            self.runner.ops.sample(GREEDY)(logits, self.slots, self.result)
        else:
            self.drafts.verify(GREEDY, logits, self.slots, self.num_found, self.result)


def measure_step(worker: Any, timer: Timer, step: DecodeStep) -> list[dict[str, Any]]:
    """Return one row a part, then the layers in a row, then the whole step."""
    model: Any = worker.model
    batch = step.batch()
    layers, dtype = list(model.layers), worker.build.dtype
    hf, device = worker.build.hf, worker.device

    def random(width: int) -> Tensor:
        return torch.randn(step.num_tokens, width, dtype=torch.float32, device=device).to(dtype)

    first = layers[0]
    hidden, residual = random(hf.hidden_size), random(hf.hidden_size)
    qkv = first.qkv_proj(hidden, residual)[0].clone()
    attended = first.attn(qkv, batch).clone()
    mlp = _experts(model, layers, hidden, residual, batch) if _has_experts(first) else _mlp(layers, hidden, residual)
    logits = step.end((hidden, residual))

    def chain() -> Any:
        out, rest = hidden, residual
        for layer in layers:
            out, rest = layer(out, rest, batch)
        return out, rest

    count, head_bytes = len(layers), hf.vocab_size * hf.hidden_size * dtype.itemsize
    read = {name: module_bytes(getattr(first, name)) for name in ("qkv_proj", "o_proj")}
    read["attn"] = sum(map(token_bytes, worker.kv_cache_specs().values())) // count * step.context_len * step.rows
    ops, layer_bytes = chosen_ops(worker), sum(read.values()) + sum(part[2] for part in mlp)
    timed: list[Part] = [
        ("qkv", _over(layers, lambda one: one.qkv_proj(hidden, residual)), read["qkv_proj"], count, "add_norm_linear"),
        ("attention", _over(layers, lambda one: one.attn(qkv, batch)), read["attn"], count, "attention"),
        ("o", _over(layers, lambda one: one.o_proj(attended)), read["o_proj"], count, "linear"),
        *mlp,
        ("a layer, in the chain", chain, layer_bytes, count, ""),
        ("inputs", step.batch, 0, 1, "prepare_inputs"),
        ("logits", lambda: step.end((hidden, residual)), head_bytes, 1, "add_norm_logits"),
        ("sample, greedy", lambda: step.sample(logits), logits.nbytes, 1, "sample"),
        ("the whole step", lambda: step.sample(step.logits()), layer_bytes * count + head_bytes, 1, ""),
    ]  # fmt: skip
    found = []
    for part, call, num_bytes, parts, op in timed:
        spent_s = timer.seconds(call, step.start_again)
        found.append(
            {
                "batch": step.rows,
                "query_len": step.num_tokens // step.rows,
                "part": part,
                "us": spent_s * 1e6 / parts,
                "bytes": num_bytes,
                "op": ops.get(op, ""),
            }
        )
    return found


Part = tuple[str, Callable[[], Any], int, int, str]
"""Name, what runs it in all layers, bytes that one layer reads, how many there are, and its op."""


def _over(layers: list[Any], call: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: [call(layer) for layer in layers]


def _mlp(layers: list[Any], hidden: Tensor, residual: Tensor) -> list[Part]:
    first, count = layers[0], len(layers)
    activated = first.gate_up_proj(hidden, residual)[0].clone()
    gate_up, down = module_bytes(first.gate_up_proj), module_bytes(first.down_proj)
    return [
        ("gate_up", _over(layers, lambda one: one.gate_up_proj(hidden, residual)), gate_up, count, "add_norm_gated_linear"),
        ("down", _over(layers, lambda one: one.down_proj(activated)), down, count, "linear"),
    ]  # fmt: skip


def _has_experts(layer: Any) -> bool:
    return getattr(layer, "experts", None) is not None


def _experts(model: Any, layers: list[Any], hidden: Tensor, residual: Tensor, batch: ForwardBatch) -> list[Part]:
    """The norm and the experts are one op; it reads those that are chosen where all are equally likely."""
    having = [layer.experts for layer in layers if _has_experts(layer)]
    first, slots = having[0], batch.slot_mappings[0]
    routing, total = first.routing, sum(tensor.nbytes for tensor in first.experts.values())
    share = 1.0 - (1.0 - routing.top_k / routing.num_experts) ** len(hidden)

    def run() -> None:
        for experts in having:
            experts.read_by(None)  # else sums are left to a layer above, which does not read them here
        for experts in having:
            if experts.add_norm_moe is None:
                experts.moe(hidden, slots)
            else:
                experts.add_norm_moe(hidden, residual, slots)
        getattr(model, "link_layers", lambda: None)()

    return [("experts", run, int(share * total), len(having), "add_norm_moe")]


def token_bytes(spec: Any) -> int:
    """KV bytes of one token of one layer."""
    return int(spec.page_size_bytes // spec.block_size)


def module_bytes(module: Any) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def chosen_ops(worker: Any) -> dict[str, str]:
    """Seam to the entries that serve it: several share the batch sizes, those of few rows first."""
    names: dict[str, str] = {}
    for choice in worker.build.ops.choices:
        names.setdefault(choice.op, ", ".join(name.removesuffix(f".{choice.op}") for name in choice.names))
    names["attention"] = ", ".join(dict.fromkeys(one.name for one in worker.build.attention.selections()))
    return names


def copy_bandwidth(worker: Any) -> float:
    """GB/s of a device copy, read and written."""
    size = COPY_BYTES if worker.device.type == "cuda" else COPY_BYTES // 16
    source = torch.ones(size, dtype=torch.uint8, device=worker.device)
    target = torch.empty_like(source)
    timer = Timer(worker, 5)
    timer.recorder = None
    return 2 * size / timer.seconds(lambda: target.copy_(source)) / 1e9


@torch.inference_mode()
def main() -> int:
    job = json.loads(sys.argv[1])
    context_len, sizes = job["context_len"], job["batch_sizes"]
    worker = make_worker(job["settings"], max(sizes))
    counts = sorted({0, job.get("num_drafts", 0)})
    give_memory(worker, max(sizes), context_len, counts[-1])
    timer = Timer(worker, job["replays"])
    rows = []
    for size in sizes:
        for num_drafts in counts:
            rows += measure_step(worker, timer, DecodeStep(worker, size, context_len, num_drafts))
    print(
        json.dumps(
            {
                "device": worker.platform.describe(), "num_layers": len(list(worker.model.layers)),  # type: ignore[attr-defined]
                "context_len": context_len, "is_captured": timer.recorder is not None, "rows": rows,
                "bandwidth_gb_s": job["bandwidth_gb_s"] or copy_bandwidth(worker),
            }
        )
    )  # fmt: skip
    return 0


def run_main() -> int:
    """On a stream of its own where there are streams: a capture may not be on the default one."""
    if torch.cuda.is_available():
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return main()
    return main()


if __name__ == "__main__":
    sys.exit(run_main())

"""Times the seams of a model's decode step: `python -m pelton_plugins.bench.chain_process JSON`; prints one JSON object.

Works with models of the built-in decoders' shape: `layers` with qkv_proj, attn, o_proj, gate_up_proj and down_proj.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pelton.attention.kv_cache import bind_kv_cache
from pelton.attention.metadata import BatchDescriptor, CommonMetadata, ForwardBatch
from pelton.config import EngineConfig
from pelton.graphs.recorder import Graph
from pelton.kv_cache.planner import plan_kv_cache
from pelton.model.resolve import resolve_model
from pelton.platform.select import select_platform
from pelton.plugins import load_plugins
from pelton.worker.worker import DeviceWorker

COPY_BYTES = 2**30
ROUNDS = 5


class Timer:
    """Times work on the worker's device: captured where the platform can, else called."""

    def __init__(self, worker: DeviceWorker, replays: int) -> None:
        self.recorder = worker.platform.graph_recorder()
        self.synchronize = worker.platform.synchronize
        self.is_cuda = worker.device.type == "cuda"
        self.replays = replays
        self._graphs: list[Graph] = []  # the recorder's memory lives as long as one of its graphs

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one run: the median of some means."""
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
        return statistics.median(self._mean(run) for _ in range(ROUNDS))

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


def make_worker(settings: dict[str, Any]) -> DeviceWorker:
    """A device with a model, without an engine."""
    plugins = load_plugins()
    config = EngineConfig.from_flat(**settings)
    model = resolve_model(config, plugins)
    platform = select_platform(config, plugins)
    worker = platform.worker_class()(config, model, platform, plugins)
    assert isinstance(worker, DeviceWorker)
    worker.init_device()
    worker.load_model()
    return worker


def bind_attention(worker: DeviceWorker, most_rows: int, context_len: int) -> list[Any]:
    """A pool with blocks for `most_rows` contexts that share nothing."""
    specs = worker.kv_cache_specs()
    block_size = next(iter(specs.values())).block_size
    num_blocks = 1 + most_rows * -(-context_len // block_size)
    plan = plan_kv_cache(specs, 2**50, num_blocks_override=num_blocks, max_model_len=context_len)
    return bind_kv_cache(plan, worker.build)


def decode_batch(worker: DeviceWorker, backends: list[Any], rows: int, context_len: int) -> ForwardBatch:
    """A decode step as the worker captures it: the lengths' bound is the model's."""
    device, longest = worker.device, worker.model_info.max_model_len
    attention = []
    key = BatchDescriptor(num_tokens=rows, num_reqs=rows, uniform_query_len=1)
    for group, backend in enumerate(backends):
        layer = next(layer for layer in worker.build.attention_layers.values() if layer.group_id == group)
        block_size = layer.k_cache.shape[1]
        held = -(-context_len // block_size)
        table = torch.zeros(rows, -(-longest // block_size), dtype=torch.int32, device=device)
        blocks = 1 + torch.arange(rows * held, dtype=torch.int32, device=device).view(rows, held)
        table[:, :held] = blocks
        slots = blocks[:, (context_len - 1) // block_size].long() * block_size + (context_len - 1) % block_size
        common = CommonMetadata(
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.full((rows,), context_len, dtype=torch.int32, device=device),
            block_table=table, slot_mapping=slots, num_reqs=rows, num_tokens=rows, num_actual_tokens=rows,
            num_decode_rows=rows, num_decode_tokens=rows, max_query_len=1, max_seq_len=longest,
        )  # fmt: skip
        backend.reserve(key)
        attention.append(backend.build(common, key))
    ids = torch.arange(10, 10 + rows, device=device)
    positions = torch.full((rows,), context_len - 1, dtype=torch.int64, device=device)
    return ForwardBatch(input_ids=ids, positions=positions, attention=tuple(attention), num_tokens=rows)


def measure_batch(worker: DeviceWorker, timer: Timer, batch: ForwardBatch, context_len: int) -> list[dict[str, Any]]:
    """One row a seam, then the layers in a row, then the whole step."""
    model: Any = worker.model
    layers, rows, dtype = list(model.layers), batch.num_tokens, worker.build.dtype
    hf, device = worker.build.hf, worker.device

    def random(width: int) -> Tensor:
        return torch.randn(rows, width, dtype=torch.float32, device=device).to(dtype)

    first = layers[0]
    hidden, residual = random(hf.hidden_size), random(hf.hidden_size)
    qkv = first.qkv_proj(hidden, residual)[0].clone()
    attended = first.attn(qkv, batch).clone()
    activated = first.gate_up_proj(hidden, residual)[0].clone()

    def over_layers(call: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: [call(layer) for layer in layers]

    def chain() -> Any:
        out, rest = hidden, residual
        for layer in layers:
            out, rest = layer(out, rest, batch)
        return out, rest

    count, head_bytes = len(layers), hf.vocab_size * hf.hidden_size * dtype.itemsize
    read = {name: module_bytes(getattr(first, name)) for name in MODULES}
    read["attn"] = sum(map(token_bytes, worker.kv_cache_specs().values())) // count * context_len * rows
    ops, last = chosen_ops(worker), torch.arange(rows, device=device)
    seams: list[tuple[str, Callable[[], Any], int, int, str]] = [
        ("qkv", over_layers(lambda one: one.qkv_proj(hidden, residual)), read["qkv_proj"], count, "add_norm_linear"),
        ("attention", over_layers(lambda one: one.attn(qkv, batch)), read["attn"], count, "attention"),
        ("o", over_layers(lambda one: one.o_proj(attended)), read["o_proj"], count, "linear"),
        (
            "gate_up", over_layers(lambda one: one.gate_up_proj(hidden, residual)), read["gate_up_proj"], count,
            "add_norm_gated_linear",
        ),
        ("down", over_layers(lambda one: one.down_proj(activated)), read["down_proj"], count, "linear"),
        ("a layer, in the chain", chain, sum(read.values()), count, ""),
        ("logits", lambda: model.compute_logits((hidden, residual), last), head_bytes, 1, "add_norm_logits"),
        (
            "embed to logits", lambda: model.compute_logits(model.forward(batch), last),
            sum(read.values()) * count + head_bytes, 1, "",
        ),
    ]  # fmt: skip
    return [
        {"batch": rows, "seam": seam, "us": timer.seconds(call) * 1e6 / parts, "bytes": size, "op": ops.get(op, "")}
        for seam, call, size, parts, op in seams
    ]


MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def token_bytes(spec: Any) -> int:
    """KV bytes of one token of one layer."""
    return int(spec.page_size_bytes // spec.block_size)


def module_bytes(module: Any) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def chosen_ops(worker: DeviceWorker) -> dict[str, str]:
    """Seam to the entries that serve it: several share the batch sizes, those of few rows first."""
    names: dict[str, str] = {}
    for choice in worker.build.ops.choices:
        names.setdefault(choice.seam, ", ".join(name.removesuffix(f".{choice.seam}") for name in choice.names))
    names["attention"] = ", ".join(dict.fromkeys(one.name for one in worker.build.attention.selections()))
    return names


def copy_bandwidth(worker: DeviceWorker) -> float:
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
    worker = make_worker(job["settings"])
    context_len, sizes = job["context_len"], job["batch_sizes"]
    backends = bind_attention(worker, max(sizes), context_len)
    timer = Timer(worker, job["replays"])
    rows = []
    for size in sizes:
        rows += measure_batch(worker, timer, decode_batch(worker, backends, size, context_len), context_len)
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

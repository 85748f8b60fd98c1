"""A model whose next logits are a function of the whole context, read through the paged cache; and a driver of steps.

`ContextModel` writes each token id into its slot and hashes what it finds through the block table, so a wrong position,
slot or table changes its logits. `oracle_logits` says the same from a plain list of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pelton.builtin import pelton_fused_ops
from pelton.config import EngineConfig
from pelton.kv_cache.planner import plan_kv_cache
from pelton.messages.step import ModelOutput, NewRequest, SchedulerOutput
from pelton.model.resolve import resolve_model
from pelton.ops.selector import OpSelector
from pelton.platform.select import select_platform
from pelton.plugins import load_plugins
from pelton.sampling_params import SamplingParams
from pelton.testing.plugins import references
from pelton.worker.inputs import InputBuffers
from pelton.worker.interface import WorkerContext
from pelton_platforms.device.kv_pool import KVPool, LayerCache
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.model_runner import ModelRunner
from pelton_platforms.device.steps.step_ops import StepOps
from pelton_platforms.device.worker import DeviceWorker

VOCAB = 40
_CLASSES = 97
_TABLE = torch.randn(_CLASSES, VOCAB, generator=torch.Generator().manual_seed(7)) * 3


def is_captured() -> bool:
    """A call graph is being recorded: values must not be looked at."""
    return bool(_get_current_dispatch_mode_stack())


def oracle_logits(token_ids: Sequence[int]) -> torch.Tensor:
    """Logits that follow `token_ids`."""
    return _TABLE[
        sum((position + 1) * (token_id + 3) for position, token_id in enumerate(token_ids)) % _CLASSES
    ].clone()


def oracle_greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle_logits(tokens).argmax()))
    return tokens[len(prompt) :]


class PassBackend:
    """Metadata is the common metadata itself."""

    needs_zeroed_blocks = False

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id

    def reserve(self, max_key: Any) -> None:
        pass

    def build(self, common: Any, key: Any = None) -> Any:
        return common


class ContextModel:
    """One cache a group; every group has to tell the same context. `poison`: token ids that make their row's logits NaN."""

    def __init__(self, caches: Sequence[Any], block_sizes: Sequence[int]) -> None:
        self.caches = caches  # each [blocks, block_size] of token + 1; 0: nothing written
        self.block_sizes = block_sizes
        self.poison: set[int] = set()
        self.fail_next = False
        self.num_calls = self.num_cuts = 0

    def forward(self, batch: Any) -> torch.Tensor:
        self.num_calls += 1
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device fell over")
        results = []
        for cache, common in zip(self.caches, batch.attention, strict=True):
            slots, tokens = common.slot_mapping.clamp(min=0), (batch.input_ids + 1).to(cache.dtype)
            cache.write(slots, torch.where(common.slot_mapping >= 0, tokens, cache.read(slots)))
            results.append(self._contexts(cache, common))
        for other in results[1:]:
            assert is_captured() or torch.equal(other, results[0])
        return results[0]

    can_forward_tokens = True

    def forward_tokens(self, batch: Any, tokens: torch.Tensor) -> torch.Tensor:
        self.num_cuts += 1
        return self.forward(batch)[tokens]

    def _contexts(self, cache: torch.Tensor, common: Any) -> torch.Tensor:
        """[T], by shapes alone: a captured graph may hold it."""
        token, starts = torch.arange(common.num_tokens), common.query_start_loc.long()
        row = torch.searchsorted(starts[1:], token, right=True).clamp(max=common.num_reqs - 1)
        position = common.seq_lens.long()[row] - starts[row + 1] + token
        tokens = cache[common.block_table.long()[row]].flatten(1).long() - 1  # [T, L]
        place = torch.arange(tokens.shape[1])
        is_context = (place <= position[:, None]) & (token < starts[-1])[:, None]
        if not is_captured():
            assert bool((tokens[is_context] >= 0).all()), "a token of the context was never written"
            assert int(common.seq_lens.max()) <= common.max_seq_len
            assert int((starts[1:] - starts[:-1]).max()) <= common.max_query_len
        hashes = torch.where(is_context, (place + 1) * (tokens + 3), 0).sum(dim=1) % _CLASSES
        is_poisoned = torch.zeros_like(is_context)
        for token_id in self.poison:
            is_poisoned |= is_context & (tokens == token_id)
        return torch.where(is_poisoned.any(dim=1), -1, hashes)

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = hidden[rows]
        return torch.where((found < 0)[:, None], torch.nan, _TABLE[found])


def make_runner(
    *, block_sizes: Sequence[int] = (4,), kernel_block_sizes: Sequence[int] | None = None, num_blocks: int = 64,
    max_num_seqs: int = 8, max_num_tokens: int = 64, max_model_len: int = 96, max_draft_tokens: int = 0,
    num_side_slots: int = 4,
) -> ModelRunner:  # fmt: skip
    kernel = list(kernel_block_sizes or block_sizes)
    state = BatchState(
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, vocab_size=VOCAB, block_sizes=block_sizes,
        num_side_slots=num_side_slots, device=torch.device("cpu"), max_draft_tokens=max_draft_tokens,
    )  # fmt: skip
    layers = []
    for group, (size, small) in enumerate(zip(block_sizes, kernel, strict=True)):
        memory = torch.zeros(num_blocks * (size // small), 2, small, 1, 1)
        layers.append(LayerCache(f"layer.{group}", group, memory.unbind(1)))
    model = ContextModel([layer.views[0][:, :, 0, 0] for layer in layers], block_sizes)
    model.caches = [_Flat(layer.views[0]) for layer in layers]  # type: ignore[misc]
    buffers = InputBuffers(state, max_num_tokens=max_num_tokens, kernel_block_sizes=kernel)
    ops = StepOps(OpSelector(references(), pelton_fused_ops()), state, buffers)
    backends = [PassBackend(group) for group in range(len(block_sizes))]
    return ModelRunner(model, state, buffers, backends, KVPool(num_blocks, layers), ops)  # type: ignore[arg-type]


class _Flat:
    """A layer's keys as [blocks, block_size] of token ids, though they lie strided in their pages."""

    def __init__(self, k_cache: torch.Tensor) -> None:
        self.k_cache = k_cache
        self.dtype = k_cache.dtype

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        size = self.k_cache.shape[1]
        return self.k_cache[slots // size, slots % size, 0, 0]

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        size = self.k_cache.shape[1]
        self.k_cache[slots // size, slots % size, 0, 0] = values

    def __getitem__(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.k_cache[blocks][..., 0, 0]


@dataclass
class Running:
    """What a scheduler would know of a request."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    num_computed: int = 0
    num_blocks: list[int] = field(default_factory=list)
    side_slot: int = -1
    bad_words: list[list[int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    results: list[ModelOutput] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """A minimal scheduler over a runner: hands out blocks in order, never gives any back but at `preempt`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.block_sizes = runner.state.block_sizes
        self.step_id = 0
        self._next_block = 1  # groups share the pool's memory, so no id is in two tables
        self.new: list[Running] = []

    def add(self, slot: int, prompt: Sequence[int], *, seed: int = 0, side_slot: int = -1, **params: Any) -> Running:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **params})
        request = Running(slot, list(prompt), len(prompt), sampling, seed, side_slot=side_slot)
        self.new.append(request)
        return request

    def resume(self, request: Running, slot: int) -> None:
        """As after preemption: another slot, nothing computed, no blocks."""
        request.slot, request.num_computed, request.num_blocks = slot, 0, []
        self.new.append(request)

    def _blocks(self, request: Running, num_tokens: int) -> list[tuple[int, int, list[int]]]:
        """(group, start, ids) that the request lacks for `num_tokens`."""
        appended = []
        request.num_blocks = request.num_blocks or [0] * len(self.block_sizes)
        for group, size in enumerate(self.block_sizes):
            need = -(-num_tokens // size) - request.num_blocks[group]
            if need > 0:
                first = self._next_block
                appended.append((group, request.num_blocks[group], list(range(first, first + need))))
                self._next_block += need
                request.num_blocks[group] += need
        return appended

    def plan(
        self, rows: Sequence[tuple[Running, int]], drafts: dict[int, list[int]] | None = None, **extra: Any
    ) -> SchedulerOutput:
        """rows: (request, tokens without drafts), rows with one token first; drafts: by slot."""
        drafts = drafts or {}
        output = SchedulerOutput(step_id=self.step_id)
        for request, count in rows:
            own = drafts.get(request.slot, [])
            total = request.num_computed + count + len(own)
            appended = self._blocks(request, total)
            if request in self.new:
                self.new.remove(request)
                tables: list[list[int]] = [[] for _ in self.block_sizes]
                for group, _, ids in appended:
                    tables[group] = ids
                output.new.append(
                    NewRequest(
                        request_id=str(request.slot), slot=request.slot, token_ids=list(request.token_ids),
                        num_prompt_tokens=request.num_prompt_tokens, sampling_params=request.params,
                        eos_token_ids=[2], seed=request.seed, block_ids=tables, side_slot=request.side_slot,
                        bad_words_token_ids=request.bad_words,
                    )
                )  # fmt: skip
            else:
                output.block_appends += [(group, request.slot, start, ids) for group, start, ids in appended]
            output.slots.append(request.slot)
            output.num_scheduled.append(count + len(own))
            output.samples.append(request.num_computed + count >= len(request.token_ids))
            output.num_draft.append(len(own))
            output.draft_token_ids.append(own)
        output.total_num_scheduled_tokens = sum(output.num_scheduled)
        if not drafts:
            output.num_draft, output.draft_token_ids = [], []
        for name, value in extra.items():
            setattr(output, name, value)
        self.step_id += 1
        return output

    def step(
        self, rows: Sequence[tuple[Running, int]], drafts: dict[int, list[int]] | None = None, **extra: Any
    ) -> ModelOutput:
        output = self.plan(rows, drafts, **extra)
        result = self.runner.execute(output)
        assert result is not None
        self.take(rows, drafts, result)
        return result

    def take(
        self, rows: Sequence[tuple[Running, int]], drafts: dict[int, list[int]] | None, result: ModelOutput
    ) -> None:
        for row, (request, count) in enumerate(rows):
            tokens = result.token_ids[row]
            num_draft = len((drafts or {}).get(request.slot, []))
            request.num_computed += count + (max(len(tokens) - 1, 0) if num_draft else 0)
            request.token_ids += tokens
            request.results.append(result)
            request.errors += [message for at, message in result.row_errors if at == row]

    def decode(self, requests: Sequence[Running], count: int) -> None:
        for _ in range(count):
            self.step([(request, 1) for request in requests])


def make_worker(path: Any, *, num_blocks: int = 120, **flat: Any) -> DeviceWorker:
    """A worker that is ready for steps, over a checkpoint."""
    plugins = load_plugins(only=[])
    config = EngineConfig.from_flat(
        **{
            "model": str(path),
            "max_num_seqs": 6,
            "max_num_batched_tokens": 64,
            "max_model_len": 96,
            "device": "cpu",
            **flat,
        }
    )
    model = resolve_model(config, plugins)
    worker = DeviceWorker(
        WorkerContext(config=config, model=model, platform=select_platform(config, plugins), plugins=plugins)
    )
    worker.init_device()
    worker.load_model()
    worker.available_kv_cache_bytes()
    plan = plan_kv_cache(
        worker.kv_cache_specs(), 2**32, num_blocks_override=num_blocks, max_model_len=model.max_model_len
    )
    worker.initialize_kv_cache(plan)
    worker.warm_up()
    return worker

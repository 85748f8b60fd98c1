"""A worker from scratch: batch state in plain lists, a step as a reader would write it down.

Everything it is told comes in `SchedulerOutput`; everything it answers goes into `ModelOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pelton.attention.kv_cache import bind_kv_cache
from pelton.attention.metadata import CommonMetadata, ForwardBatch
from pelton.errors import NotSupportedError
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.messages.report import DeviceReport
from pelton.messages.step import GrammarMasks, ModelOutput, NewRequest, SchedulerOutput
from pelton.model.build import make_build_config
from pelton.model.registry import build_model
from pelton.sampling.columns import columns_of
from pelton.sampling.error_codes import ERROR_MESSAGES, OK
from pelton.sampling.logprobs import gather_logprobs
from pelton.sampling_params import SamplingParams
from pelton.worker.interface import Worker
from pelton_platforms.device.sampling.metadata import SamplingMetadata
from pelton_platforms.device.sampling.sampler import sample, unpack_bitmask


@dataclass(slots=True)
class Row:
    """A request that has a slot."""

    token_ids: list[int]
    num_computed: int
    tables: list[list[int]]  # block ids by KV group
    params: SamplingParams
    seed: int


class DummyWorker(Worker):
    """No drafts, no side tables: what a request wants of those is that request's error."""

    def init_device(self) -> None:
        self.platform.init_device(self.config, self.rank)

    def load_model(self) -> None:
        scheduler = self.config.scheduler
        self.build = make_build_config(
            self.config,
            self.model_info,
            self.plugins,
            device=self.platform.device(self.rank),
            device_type=self.platform.device_type,
            max_num_seqs=scheduler.max_num_seqs or self.platform.default_max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens or self.platform.default_max_num_batched_tokens,
            parallel=self.parallel,
        )
        self.model: Any = build_model(self.build, self.model_info.architecture, self.plugins)
        entry = self.plugins.find("pelton_model_loaders", self.model_info.weights_format, setting="load_format")
        loader = entry.resolve()(self.config, self.model_info)
        loader.parallel = self.parallel
        self.model.load_weights(loader.weights())
        self.build.ops.weights_loaded()
        self.rows: dict[int, Row] = {}
        self.waiting: tuple[SchedulerOutput, Tensor] | None = None  # a step that waits for its masks, and its logits

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {name: layer.kv_spec() for name, layer in self.build.attention_layers.items()}

    def available_kv_cache_bytes(self) -> int:
        weights_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
        return self.platform.available_kv_cache_bytes(self.config, weights_bytes=weights_bytes, peak_activation_bytes=0)

    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        self.backends = bind_kv_cache(plan, self.build)
        self.block_sizes = [group.spec.block_size for group in plan.groups]

    def report(self) -> DeviceReport:
        chosen = self.build.attention.selections()[0]
        return DeviceReport(
            device=self.platform.describe(),
            platform=self.platform.name,
            attention_backend=chosen.name,
            attention_reason=chosen.reason,
            weights_bytes=sum(parameter.nbytes for parameter in self.model.parameters()),
        )

    # A step.

    def execute(self, output: SchedulerOutput) -> ModelOutput | None:
        self._update_rows(output)
        if not output.slots:
            return ModelOutput(step_id=output.step_id)
        logits = self._forward(output)
        for slot, count in zip(output.slots, output.num_scheduled, strict=True):
            self.rows[slot].num_computed += count
        if output.grammar_rows:
            self.waiting = (output, logits)
            return None
        return self._sample(output, logits, None)

    def sample(self, masks: GrammarMasks) -> ModelOutput:
        assert self.waiting is not None and self.waiting[0].step_id == masks.step_id
        (output, logits), self.waiting = self.waiting, None
        words = torch.frombuffer(bytearray(masks.bitmask), dtype=torch.int32).view(len(output.grammar_rows), -1)
        sampling = [row for row, samples in enumerate(output.samples) if samples]
        at = torch.tensor([sampling.index(row) for row in output.grammar_rows])
        return self._sample(output, logits, (at, unpack_bitmask(words, logits.shape[1])))

    def _update_rows(self, output: SchedulerOutput) -> None:
        for slot in output.freed_slots:
            del self.rows[slot]
        for new in output.new:
            self.rows[new.slot] = _row_of(new)
        for group, slot, start, block_ids in output.block_appends:
            self.rows[slot].tables[group][start:] = block_ids
        if any(output.num_draft):
            raise NotSupportedError("The dummy device verifies no draft tokens; serve without a draft proposer.")

    def _forward(self, output: SchedulerOutput) -> Tensor:
        """Logits [rows that sample, V] of the step."""
        rows = [self.rows[slot] for slot in output.slots]
        spans = [
            range(row.num_computed, row.num_computed + n) for row, n in zip(rows, output.num_scheduled, strict=True)
        ]
        ids = [row.token_ids[position] for row, span in zip(rows, spans, strict=True) for position in span]
        positions = [position for span in spans for position in span]
        starts = torch.tensor([0, *output.num_scheduled]).cumsum(0)
        groups = [self._common(rows, spans, group, starts) for group in range(len(self.block_sizes))]
        batch = ForwardBatch(
            torch.tensor(ids), torch.tensor(positions), num_tokens=len(ids),
            attention=tuple(backend.build(groups[backend.group_id]) for backend in self.backends),
            slot_mappings=tuple(common.slot_mapping for common in groups),
        )  # fmt: skip
        hidden = self.model.forward(batch)
        last_tokens = starts[1:] - 1
        logits: Tensor = self.model.compute_logits(hidden, last_tokens[torch.tensor(output.samples)])
        return logits

    def _common(self, rows: list[Row], spans: list[range], group: int, starts: Tensor) -> CommonMetadata:
        size = self.block_sizes[group]
        tables = [row.tables[group] for row in rows]
        width = max(map(len, tables))
        slots = [
            table[position // size] * size + position % size
            for table, span in zip(tables, spans, strict=True)
            for position in span
        ]
        num_decode_rows = sum(len(span) == 1 for span in spans)
        return CommonMetadata(
            query_start_loc=starts.int(),
            seq_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
            block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            num_reqs=len(rows),
            num_tokens=len(slots),
            num_actual_tokens=len(slots),
            num_decode_rows=num_decode_rows,
            num_decode_tokens=num_decode_rows,
            max_query_len=max(map(len, spans)),
            max_seq_len=max(span.stop for span in spans),
        )

    def _sample(self, output: SchedulerOutput, logits: Tensor, mask: tuple[Tensor, Tensor] | None) -> ModelOutput:
        result = ModelOutput(step_id=output.step_id, token_ids=[[] for _ in output.slots])
        sampling = [row for row, samples in enumerate(output.samples) if samples]
        for row, slot in enumerate(output.slots):
            params = self.rows[slot].params
            if params.needs_side_slot or params.prompt_logprobs is not None:
                result.row_errors.append(
                    (row, "The dummy device has no penalties, biases, token sets, min_tokens or prompt logprobs.")
                )
        if not sampling:
            return result
        rows = [self.rows[output.slots[row]] for row in sampling]
        raw = logits.clone()
        token_ids, codes = sample(logits, _sampling_metadata(rows, logits.shape[1]), mask)
        for at, (row, state) in enumerate(zip(sampling, rows, strict=True)):
            if int(codes[at]) != OK:
                result.row_errors.append((row, ERROR_MESSAGES[int(codes[at])]))
            state.token_ids.append(int(token_ids[at]))
            result.token_ids[row] = [int(token_ids[at])]
            wanted = state.params.logprobs
            if wanted is not None:
                found = gather_logprobs(raw[at : at + 1], token_ids[at : at + 1], wanted).to_host()
                result.logprobs[row] = found.columns(slice(None), wanted)
        return result


def _row_of(new: NewRequest) -> Row:
    return Row(
        list(new.token_ids),
        new.num_computed_tokens,
        [list(ids) for ids in new.block_ids],
        new.sampling_params,
        new.seed,
    )


def _sampling_metadata(rows: list[Row], vocab_size: int) -> SamplingMetadata:
    columns, active, max_top_k = columns_of([row.params for row in rows], vocab_size)
    return SamplingMetadata(
        seeds=torch.tensor([row.seed for row in rows]),
        positions=torch.tensor([len(row.token_ids) for row in rows]),
        columns=columns,
        active=active,
        max_top_k=max_top_k,
    )

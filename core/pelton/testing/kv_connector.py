"""Conformance of KV connectors: what both halves have to keep towards the engine, run with pytest on a CPU.

Subclass `KVConnectorConformance` in a test module, set `connector`, and say where it may keep its data:

    class TestMine(KVConnectorConformance):
        connector = MyConnector

        def extra_config(self, folder):
            return {"path": str(folder)}

`TwoHalves` is the tool behind it: one engine as a connector sees it, over pages whose right content is known, so that a block
that is saved too early, read back wrongly or handed on too soon is seen at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor

from pelton.config import EngineConfig
from pelton.errors import RequestError
from pelton.kv_transfer.interface import ConnectorContext, KVConnector, TransferEnd
from pelton.messages.request import EngineRequest
from pelton.messages.step import ModelOutput, NewRequest, SchedulerOutput
from pelton.model.resolved import ResolvedModel
from pelton.sampling_params import SamplingParams
from pelton.testing.kv_specs import full_spec, make_plan

BLOCK_SIZE, NUM_BLOCKS, PAGE_BYTES = 4, 64, 96
LAYERS = ("layer.0", "layer.1")
NAN_BYTE, REUSED_BYTE = 0xFF, 0xEE
MAX_STEPS = 200
"""Steps without rows that a transfer may take."""


@dataclass(slots=True)
class Served:
    """Record of what a connector did for one request."""

    num_brought: int
    """Tokens that it brought."""
    invalid: list[int] = field(default_factory=list)
    params: dict[str, Any] | None = None


def page_content(token_ids: Sequence[int], salt: str | None, layer: str) -> Tensor:
    """[PAGE_BYTES] uint8: what the model computes for the last block of these tokens."""
    seed = hashlib.sha256(f"{layer} {salt} {list(token_ids)}".encode()).digest()
    return torch.frombuffer(bytearray(seed * (PAGE_BYTES // len(seed))), dtype=torch.uint8)


class TwoHalves:
    """An engine with one request at a time. Blocks of requests that are over are overwritten as soon as they are free."""

    def __init__(
        self, connector: type[KVConnector], model: ResolvedModel, settings: dict[str, Any], num_ranks: int = 1
    ) -> None:
        plan = make_plan([full_spec(BLOCK_SIZE)], NUM_BLOCKS)
        config = EngineConfig.from_flat(kv_transfer_config=settings, tensor_parallel_size=num_ranks)
        contexts = [
            ConnectorContext(name="under_test", config=config, model=model, plan=plan, rank=rank)
            for rank in range(num_ranks)
        ]
        self.name = contexts[0].name
        self.scheduler = connector.for_scheduler(contexts[0])
        self.workers = [connector.for_worker(context) for context in contexts]
        self.pages: dict[str, Tensor] = {}  # of all ranks: each has a part of its own of every block
        for rank, worker in enumerate(self.workers):
            pages = {layer: torch.zeros(NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8) for layer in LAYERS}
            worker.register_kv_caches(pages, "conformance suite")
            self.pages |= {f"{layer} of rank {rank}" if rank else layer: page for layer, page in pages.items()}
        self._free = list(range(1, NUM_BLOCKS))
        self._step_id = self._num_requests = 0
        self._freed_slots: list[int] = []
        self._said: list[tuple[str, str]] = []  # by ranks: what is over, of which request
        self._sent: set[str] = set()
        self._received: set[str] = set()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    def serve(
        self,
        prompt: Sequence[int],
        *,
        salt: str | None = None,
        num_local: int = 0,
        is_finite: bool = True,
        chunk: int | None = None,
        num_decodes: int = 2,
        is_preempted: bool = False,
        params: dict[str, Any] | None = None,
    ) -> Served:
        """Run one request to its end.

        num_local: tokens in the prefix cache. is_finite: False: its logits are NaN, as its KV is from the last chunk on.
        is_preempted: it gives up its blocks after its first token and starts again.
        """
        self._num_requests += 1
        request = EngineRequest(
            request_id=f"r{self._num_requests}", prompt_token_ids=list(prompt), sampling_params=SamplingParams(),
            cache_salt=salt, kv_transfer_params=params,
        )  # fmt: skip
        self.scheduler.check_request(request)
        run = _Run(self, request, num_local=num_local, chunk=chunk or len(prompt), is_finite=is_finite)
        served = run.prefill()
        if is_preempted and is_finite and not served.invalid:
            run.preempt()
            again = run.prefill()
            served = Served(served.num_brought, again.invalid)
        if is_finite and not served.invalid:
            run.decode(num_decodes)
        served.params = run.finish()
        return served

    def bare_steps(self, until: set[str], request_id: str, what: str) -> None:
        """Steps without rows, until `request_id` is in `until`."""
        for _ in range(MAX_STEPS):
            if request_id in until:
                return
            self.step(SchedulerOutput(step_id=0))
        pytest.fail(f"{type(self.workers[0]).__name__} never reports {what} for {request_id}, in {MAX_STEPS} steps")

    def step(self, output: SchedulerOutput, compute: Any = None) -> list[int]:
        """One step of both halves; returns the blocks that could not be loaded. compute: what the model does in between."""
        self._step_id += 1
        output.step_id = self._step_id
        output.freed_slots, self._freed_slots = self._freed_slots, []
        metadata = self.scheduler.build_metadata(output)
        assert isinstance(metadata, bytes), f"build_metadata returns a {type(metadata).__name__}; it must be bytes"
        for worker in self.workers:
            worker.start_load(metadata)
        if compute is not None:
            compute()
        invalid: set[int] = set()
        for worker in self.workers:
            worker.wait_for_save()
            sending, receiving = worker.take_finished()
            self._said += [("sending", name) for name in sending] + [("receiving", name) for name in receiving]
            invalid.update(worker.take_invalid_block_ids())
        for what, name in set(self._said):
            if self._said.count((what, name)) == len(self.workers):
                (self._sent if what == "sending" else self._received).add(name)
        return sorted(invalid)

    def take_blocks(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Somebody else gets them at once."""
        for page in self.pages.values():
            page[list(block_ids)] = REUSED_BYTE
        self._free += block_ids


class _Run:
    """One request while it runs."""

    def __init__(
        self, engine: TwoHalves, request: EngineRequest, *, num_local: int, chunk: int, is_finite: bool
    ) -> None:
        self.engine, self.request = engine, request
        self.num_local, self.chunk, self.is_finite = num_local, chunk, is_finite
        self.table: list[int] = []
        self.slot = 0
        self.tokens = list(request.prompt_token_ids)

    def prefill(self) -> Served:
        engine, prompt = self.engine, self.request.prompt_token_ids
        matched, is_later = engine.scheduler.num_matched_tokens(self.request, self.num_local)
        for _ in range(MAX_STEPS):
            if matched is not None:
                break
            engine.step(SchedulerOutput(step_id=0))
            matched, is_later = engine.scheduler.num_matched_tokens(self.request, self.num_local)
        assert matched is not None, f"num_matched_tokens is None still, after {MAX_STEPS} steps"
        assert 0 <= matched <= len(prompt) - self.num_local, (
            f"num_matched_tokens is {matched} for a prompt of {len(prompt)} tokens of which {self.num_local} are here"
        )
        num_brought = min(matched, len(prompt) - 1 - self.num_local)
        self.table = engine.take_blocks(-(-(len(prompt) + 8) // BLOCK_SIZE))
        self._write(0, self.num_local)
        if num_brought:
            engine.scheduler.after_allocation(self.request, (list(self.table),), num_brought)
        if num_brought and is_later:
            engine.bare_steps(engine._received, self.request.request_id, "finished_receiving")
        done = self.num_local + num_brought
        new = NewRequest(
            request_id=self.request.request_id, slot=self.slot, token_ids=list(prompt), num_prompt_tokens=len(prompt),
            sampling_params=self.request.sampling_params, block_ids=[list(self.table)], num_computed_tokens=done,
        )  # fmt: skip
        invalid: list[int] = []
        first = done
        while done < len(prompt):
            count = min(self.chunk, len(prompt) - done)
            is_last = done + count == len(prompt)
            output = SchedulerOutput(
                step_id=0, new=[new] if done == first else [], slots=[self.slot], num_scheduled=[count],
                samples=[is_last], total_num_scheduled_tokens=count,
            )  # fmt: skip
            start = done

            def compute(start: int = start, count: int = count) -> None:
                if start == first:
                    self._check_brought(num_brought)
                self._write(start, start + count, is_finite=self.is_finite)

            self._deferred_check: str | None = None
            bad = engine.step(output, compute)
            invalid += bad
            if self._deferred_check and not invalid:
                pytest.fail(self._deferred_check)
            done += count
            if invalid:
                break
            self._tell(is_last)
        return Served(num_brought if not invalid else 0, invalid)

    def _tell(self, is_last: bool) -> None:
        engine = self.engine
        result = ModelOutput(step_id=engine._step_id, token_ids=[[1]] if is_last and self.is_finite else [[]])
        if is_last and not self.is_finite:
            result.row_errors = [(0, "The model's logits for this request are not finite (NaN or infinity).")]
        elif is_last:
            engine.scheduler.request_computed(self.request.request_id)
        engine.scheduler.update(result)

    def preempt(self) -> None:
        """Between two steps."""
        self.engine._freed_slots.append(self.slot)
        self.engine.release(self.table)
        self.slot += 1

    def decode(self, count: int) -> None:
        for _ in range(count):
            position = len(self.tokens)
            self.tokens.append(1)
            output = SchedulerOutput(
                step_id=0, slots=[self.slot], num_scheduled=[1], samples=[True], total_num_scheduled_tokens=1
            )
            self.engine.step(output, lambda position=position: self._write(position, position + 1))
            self.engine.scheduler.update(ModelOutput(step_id=self.engine._step_id, token_ids=[[1]]))

    def finish(self) -> dict[str, Any] | None:
        engine, request_id = self.engine, self.request.request_id
        end = engine.scheduler.request_finished(request_id, (list(self.table),))
        keeps, params = (end.keeps_blocks, end.params) if isinstance(end, TransferEnd) else (end, None)
        engine._freed_slots.append(self.slot)
        if keeps:
            engine.bare_steps(engine._sent, request_id, "finished_sending")
        engine.release(self.table)
        engine.step(SchedulerOutput(step_id=0))
        return params

    def _write(self, first: int, last: int, *, is_finite: bool = True) -> None:
        """As the model does: a block is right once its last token is computed."""
        for place in range(first // BLOCK_SIZE, last // BLOCK_SIZE):
            for layer, page in self.engine.pages.items():
                block = page[self.table[place]]
                if is_finite:
                    block.copy_(page_content(self.tokens[: (place + 1) * BLOCK_SIZE], self.request.cache_salt, layer))
                else:
                    block.fill_(NAN_BYTE)

    def _check_brought(self, num_brought: int) -> None:
        """Check what was loaded; a connector may still say that it is invalid."""
        for place in range(-(-self.num_local // BLOCK_SIZE), (self.num_local + num_brought) // BLOCK_SIZE):
            for layer, page in self.engine.pages.items():
                found = page[self.table[place]]
                tokens = self.tokens[: (place + 1) * BLOCK_SIZE]
                if not torch.equal(found, page_content(tokens, self.request.cache_salt, layer)):
                    what = {NAN_BYTE: "NaN of a request that failed", REUSED_BYTE: "what a later request wrote there"}
                    of = (
                        what.get(int(found[0]), "something else") if len(set(found.tolist())) == 1 else "something else"
                    )
                    self._deferred_check = (
                        f"tokens {place * BLOCK_SIZE} to {(place + 1) * BLOCK_SIZE} of {layer} were brought with other "
                        f"content than the model computes for them: it is {of}"
                    )
                    return


class KVConnectorConformance:
    connector: ClassVar[type[KVConnector]]

    def extra_config(self, folder: Path) -> dict[str, Any]:
        """`kv_connector_extra_config` of an engine whose data are in `folder`; equal for engines that share them."""
        return {}

    def damage(self, folder: Path) -> bool:
        """Spoil what is stored in `folder`, as a full disk or a bad peer would. False: nothing can be spoilt."""
        return False

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "stored"
        folder.mkdir()
        return folder

    @pytest.fixture
    def model(self, tmp_path: Path) -> ResolvedModel:
        path = tmp_path / "model"
        path.mkdir()
        (path / "model.safetensors").write_bytes(bytes(range(256)) * 32)
        return ResolvedModel(
            name="m", path=str(path), weights_format="safetensors", hf_config={}, architecture="X", dtype="float32",
            max_model_len=256, vocab_size=64, eos_token_ids=[0], generation_config={}, tokenizer_path=None,
        )  # fmt: skip

    @pytest.fixture
    def start(self, folder: Path, model: ResolvedModel) -> Any:
        """`start()` gives one more engine over the same data; `start(num_ranks=2)` one of two ranks."""
        engines: list[TwoHalves] = []

        def make(role: str = "kv_both", num_ranks: int = 1) -> TwoHalves:
            settings = {
                "kv_connector": "under_test", "kv_role": role, "kv_connector_extra_config": self.extra_config(folder),
            }  # fmt: skip
            engines.append(TwoHalves(self.connector, model, settings, num_ranks))
            return engines[-1]

        yield make
        for engine in engines:
            engine.close()

    prompt: ClassVar[list[int]] = [1 + (7 * index + index // 5) % 60 for index in range(23)]
    num_full: ClassVar[int] = 23 // BLOCK_SIZE * BLOCK_SIZE

    def _save(self, start: Any, **options: Any) -> None:
        engine = start()
        engine.serve(self.prompt, **options)
        engine.close()

    def test_its_half_in_the_scheduler_has_the_name_it_was_given(self, start: Any) -> None:
        engine = start()
        assert engine.scheduler.name == engine.name, (
            f"SchedulerConnector.name is {engine.scheduler.name!r}; metadata is sent under ConnectorContext.name, {engine.name!r}"
        )

    @pytest.mark.parametrize("options", [{}, {"chunk": 5}, {"num_decodes": 0}], ids=["whole", "chunked", "one-token"])
    def test_another_engine_gets_what_was_saved(self, start: Any, options: dict[str, Any]) -> None:
        """The blocks are overwritten once the first request is over: what was saved is a copy."""
        self._save(start, **options)
        served = start().serve(self.prompt)
        assert not served.invalid
        assert served.num_brought > 0, "an engine that saved a prompt's KV, and another that gets none of it"

    def test_nothing_is_brought_for_other_tokens_or_another_salt(self, start: Any) -> None:
        self._save(start, salt="one")
        other = [self.prompt[0] + 1, *self.prompt[1:]]
        for prompt, salt in ((other, "one"), (self.prompt, "two"), (self.prompt, None)):
            assert start().serve(prompt, salt=salt).num_brought == 0

    def test_a_common_head_is_brought_and_no_more(self, start: Any) -> None:
        self._save(start)
        forked = [*self.prompt[:9], *(63 - token for token in self.prompt[9:])]
        assert start().serve(forked).num_brought <= 9

    def test_what_is_here_already_is_not_counted(self, start: Any) -> None:
        self._save(start)
        engine = start()
        served = engine.serve(self.prompt, num_local=2 * BLOCK_SIZE)
        assert served.num_brought <= len(self.prompt) - 1 - 2 * BLOCK_SIZE
        assert engine.serve(self.prompt, num_local=self.num_full).num_brought <= len(self.prompt) - 1 - self.num_full

    @pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "chunked"])
    def test_kv_of_a_request_that_failed_is_never_shared(self, start: Any, chunk: int | None) -> None:
        self._save(start, is_finite=False, chunk=chunk)
        served = start().serve(self.prompt)
        assert served.num_brought == 0, (
            f"{served.num_brought} tokens were shared of a request whose logits were NaN: save after request_computed only"
        )

    def test_preemption_while_a_save_is_under_way(self, start: Any) -> None:
        self._save(start, is_preempted=True)
        assert not start().serve(self.prompt).invalid

    def test_parts_of_several_ranks_are_kept_apart(self, start: Any) -> None:
        """Engines of as many ranks get them, and no others."""
        if not self.connector.serves_ranks:
            pytest.skip("KVConnector.serves_ranks is False: it is refused with several ranks")
        for num_ranks in (2, 1, 2, 3):
            engine = start(num_ranks=num_ranks)
            served = engine.serve(self.prompt)  # fails where another rank's part is brought as if it were right
            engine.close()
            assert not served.invalid
        assert start(num_ranks=2).serve(self.prompt).num_brought > 0

    def test_a_request_that_is_over_is_forgotten(self, start: Any) -> None:
        engine = start()
        for _ in range(3):
            engine.serve(self.prompt)
        end = engine.scheduler.request_finished("nobody", ([],))
        keeps = end.keeps_blocks if isinstance(end, TransferEnd) else end
        assert not keeps, "the blocks of a request that it never heard of are kept"

    def test_parameters_that_it_does_not_know_are_the_clients_error(self, start: Any) -> None:
        with pytest.raises(RequestError) as caught:
            start().serve(self.prompt, params={"no_connector_has_this": 1})
        assert caught.value.param and caught.value.param.startswith("kv_transfer_params")

    def test_what_it_says_of_a_request_is_plain_data(self, start: Any) -> None:
        msgspec.msgpack.encode(start().serve(self.prompt).params)

    def test_data_that_cannot_be_used_is_a_miss_or_invalid(self, start: Any, folder: Path) -> None:
        self._save(start)
        if not self.damage(folder):
            pytest.skip("nothing that is stored can be spoilt")
        served = start().serve(self.prompt)  # fails where other content is brought as if it were right
        assert served.num_brought == 0 or not served.invalid

"""The request's contract: what a request may carry crosses process borders unchanged, wrong values are named, and an engine
refuses what it does not offer in one line."""

from __future__ import annotations

import msgspec
import pytest

from pelton.engine.protocol import Add, Outputs, decoder_for_engine, decoder_for_front_end, encode
from pelton.errors import NotSupportedError, RequestError
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason, LogprobColumns
from pelton.messages.request import AdapterRef, EngineRequest, MultiModalItem, PoolingParams, TensorData
from pelton.messages.step import ModelOutput, NewRequest
from pelton.sampling_params import SamplingParams
from pelton.testing.scheduler import Harness

PIXELS = TensorData(bytes(range(24)), "float16", (3, 4))
ITEM = MultiModalItem(kind="image", hash="sha256:cat", offset=2, length=3, tensors={"pixel_values": PIXELS})
ADAPTER = AdapterRef(id=7, name="sql", path="/adapters/sql")


def request(num_tokens: int = 8, **fields) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=list(range(1, num_tokens + 1)), sampling_params=SamplingParams(), **fields
    )


FULL = {
    "pooling_params": PoolingParams(task="embed", dimensions=64),
    "multi_modal_items": [ITEM],
    "adapter": ADAPTER,
    "prompt_embeds": TensorData(bytes(8 * 2 * 4), "float32", (8, 2)),
    "kv_transfer_params": {"remote": {"host": "a", "ports": [1, 2]}, "load": True},
    "client_index": 3,
}


def test_a_request_crosses_to_the_engine_unchanged():
    sent = request(**FULL)
    received = decoder_for_engine().decode(encode(Add([sent]))).requests[0]
    assert received == sent
    assert received.multi_modal_items[0].tensors["pixel_values"].data == PIXELS.data
    assert received.adapter_id == 7


def test_a_plain_request_carries_nothing_of_it():
    assert not {b.encode() for b in FULL} & {word for word in msgspec.msgpack.decode(msgspec.msgpack.encode(request()))}


def test_results_cross_back_unchanged():
    output = EngineOutput("r", [], FinishReason.STOP, pooled=PIXELS, kv_transfer_params={"blocks": [1]})
    received = decoder_for_front_end().decode(encode(Outputs(EngineOutputs(outputs=[output]))))
    assert received.outputs.outputs == [output]


def test_what_the_workers_get_and_give_is_plain_data_too():
    new = NewRequest(
        request_id="r", slot=0, token_ids=[1], num_prompt_tokens=1, sampling_params=SamplingParams(), block_ids=[[1]],
        pooling_params=PoolingParams(), adapter=ADAPTER, multi_modal_items=[ITEM], prompt_embeds=PIXELS,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=NewRequest) == new
    assert new.adapter_id == 7
    columns = LogprobColumns([[1]], [[-0.5]], [1])
    result = ModelOutput(step_id=1, pooled={0: PIXELS}, logprobs={0: columns, 1: columns.packed()})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=ModelOutput) == result


@pytest.mark.parametrize(
    "make, param, words",
    [
        (lambda: TensorData(b"abc", "float16", (2,)), "data", "float16 [2] has 3 bytes; it needs 4"),
        (lambda: TensorData(b"ab", "half", (1,)), "dtype", "value='half'"),
        (lambda: TensorData(b"", "uint8", (-1,)), "shape", "value=[-1]"),
        (lambda: MultiModalItem(kind="", hash="h", offset=0, length=1), "multi_modal_items.kind", "has 0 characters"),
        (
            lambda: MultiModalItem(kind="image", hash="h", offset=0, length=0),
            "multi_modal_items.length",
            "from 1 to 2147483647",
        ),
        (lambda: AdapterRef(id=0, name="x"), "adapter.id", "value=0"),
        (lambda: PoolingParams(task="pool"), "task", "one of embed, classify, score"),
        (lambda: request(4, multi_modal_items=[ITEM]), "multi_modal_items.offset", "tokens 2 to 5"),
        (lambda: request(9, multi_modal_items=[ITEM, ITEM]), "multi_modal_items.offset", "the next may begin at 5"),
        (lambda: request(prompt_embeds=PIXELS), "prompt_embeds", "float16 [3, 4]; expected [8, hidden size]"),
        (lambda: request(kv_transfer_params={"x": object()}), "kv_transfer_params", "must be plain data"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(make, param, words):
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.param == param
    assert words in str(caught.value)


def test_a_wrong_request_is_refused_where_it_arrives_too():
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(request(multi_modal_items=[ITEM])))
    data["prompt_token_ids"] = [1, 2, 3]
    with pytest.raises(msgspec.ValidationError, match="tokens 2 to 5"):
        msgspec.convert(data, EngineRequest)


@pytest.mark.parametrize(
    "name, words",
    [
        ("pooling_params", "does not pool"),
        ("multi_modal_items", "reads text only; leave out: image"),
        ("prompt_embeds", "send token ids"),
        ("adapter", "serves no adapters"),
        ("kv_transfer_params", "No KV connector runs here"),
    ],
)
def test_an_engine_refuses_what_it_does_not_offer(name, words):
    with pytest.raises(NotSupportedError, match=words) as caught:
        Harness().add(request(**{name: FULL[name]}))
    assert caught.value.param == name
    assert "\n" not in str(caught.value)


def hashes(block_size: int = 4, **fields) -> list[bytes]:
    from pelton.kv_cache.hashing import BlockHasher
    from pelton_plugins.scheduler.request import RequestState

    record = RequestState(request(16, **fields), 0, max_model_len=64, now=0.0)
    record.extend_hashes(BlockHasher("sha256", block_size))
    return record.block_hashes


def test_a_prompt_is_not_copied_while_it_waits_and_never_changed():
    from pelton.testing.scheduler import make_request

    harness = Harness(max_num_seqs=1)
    first, second = (harness.add(make_request(name, 9, 4)) for name in "ab")
    prompts = list(first.prompt_token_ids), list(second.prompt_token_ids)
    states = [harness.scheduler._table.requests[name] for name in "ab"]
    harness.step()
    assert states[0].token_ids == [*prompts[0], *harness.tokens("a")]
    assert states[1].token_ids is second.prompt_token_ids
    harness.run_and_check()
    assert (first.prompt_token_ids, second.prompt_token_ids) == prompts


def test_blocks_are_shared_only_by_requests_that_agree_in_all_of_it():
    def image(offset, text):
        return [MultiModalItem(kind="image", hash=text, offset=offset, length=2)]

    def embeds(byte):
        return TensorData(bytes([byte]) * 16, "uint8", (16, 1))

    plain = hashes()
    others = [
        hashes(cache_salt="s"), hashes(adapter=ADAPTER), hashes(adapter=AdapterRef(id=8, name="sql")),
        hashes(multi_modal_items=image(0, "cat")), hashes(multi_modal_items=image(0, "dog")),
        hashes(prompt_embeds=embeds(1)), hashes(prompt_embeds=embeds(2)),
    ]  # fmt: skip
    assert len({chain[0] for chain in [plain, *others]}) == 1 + len(others)
    assert hashes(prompt_embeds=embeds(1)) == others[-2]
    # Blocks before an item are those of the text alone.
    late = hashes(multi_modal_items=image(9, "cat"))
    assert late[:2] == plain[:2] and late[2] != plain[2] and late[3] != plain[3]

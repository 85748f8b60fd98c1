"""Every bound on what a client may send: kept at the bound, refused one past it, and named in the docs."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pelton import limits
from pelton.config import EngineConfig
from pelton.engine.input_processor import InputProcessor, read_prompt_embeds
from pelton.errors import RequestError
from pelton.messages.request import AdapterRef, EngineRequest, MultiModalItem, PoolingParams, TensorData
from pelton.model.resolved import ResolvedModel
from pelton.sampling_params import SamplingParams, StructuredOutputsParams

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name in vars(limits) if name.startswith("MAX_")]
VOCAB_SIZE = 2**18


def processor() -> InputProcessor:
    model = ResolvedModel(
        name="m", path="m", weights_format="dummy", hf_config={}, architecture="X", dtype="float32", max_model_len=64,
        vocab_size=VOCAB_SIZE, eos_token_ids=[2], generation_config={}, tokenizer_path=None,
    )  # fmt: skip
    return InputProcessor(EngineConfig(), model, None)


def process(**options) -> None:
    """One request through the engine's front door."""
    request_id = options.pop("request_id", "r")
    extra_args = options.pop("extra_args", None)
    processor().process(request_id, [1, 2], SamplingParams(max_tokens=1, extra_args=extra_args), **options)


def packed(size: int) -> dict[str, str]:
    """A mapping of exactly `size` bytes as msgpack: 1 (map) + 2 ("x") + 3 (string header) + characters."""
    return {"x": "y" * (size - 6)}


def item(offset: int = 0, *, text: str = "h", num_bytes: int = 0) -> MultiModalItem:
    return MultiModalItem(
        kind="image",
        hash=text,
        offset=offset,
        length=1,
        tensors={"x": TensorData(bytes(num_bytes), "uint8", (num_bytes,))},
    )


def engine_request(num_tokens: int = 1, **fields) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=[0] * num_tokens, sampling_params=SamplingParams(max_tokens=1), **fields
    )


CASES: dict[str, tuple[str, Callable[[int], object]]] = {
    # limit: (field that the error names, call with a value of that size)
    "MAX_N": ("n", lambda size: SamplingParams(n=size)),
    "MAX_STOP_STRINGS": ("stop", lambda size: SamplingParams(stop=["x"] * size)),
    "MAX_STOP_STRING_CHARS": ("stop", lambda size: SamplingParams(stop=["x" * size])),
    "MAX_STOP_TOKEN_IDS": ("stop_token_ids", lambda size: SamplingParams(stop_token_ids=list(range(size)))),
    "MAX_BAD_WORDS": ("bad_words", lambda size: SamplingParams(bad_words=["x"] * size)),
    "MAX_BAD_WORD_CHARS": ("bad_words", lambda size: SamplingParams(bad_words=["x" * size])),
    "MAX_LOGIT_BIAS_ENTRIES": ("logit_bias", lambda size: SamplingParams(logit_bias={i: 1.0 for i in range(size)})),
    "MAX_ALLOWED_TOKEN_IDS": ("allowed_token_ids", lambda size: SamplingParams(allowed_token_ids=list(range(size)))),
    "MAX_CONSTRAINT_CHARS": ("structured_outputs", lambda size: StructuredOutputsParams(regex="x" * size)),
    "MAX_CHOICES": ("structured_outputs.choice", lambda size: StructuredOutputsParams(choice=["x"] * size)),
    "MAX_SEED": ("seed", lambda size: SamplingParams(seed=size)),
    "MAX_REQUEST_ID_CHARS": ("request_id", lambda size: process(request_id="x" * size)),
    "MAX_CACHE_SALT_CHARS": ("cache_salt", lambda size: process(cache_salt="x" * size)),
    "MAX_ABS_PRIORITY": ("priority", lambda size: process(priority=size)),
    "MAX_TIMEOUT_S": ("timeout_s", lambda size: process(timeout_s=size)),
    "MAX_EXTRA_ARGS_BYTES": ("extra_args", lambda size: process(extra_args=packed(size))),
    "MAX_KV_TRANSFER_PARAMS_BYTES": (
        "kv_transfer_params",
        lambda size: engine_request(kv_transfer_params=packed(size)),
    ),
    "MAX_ITEMS": (
        "multi_modal_items",
        lambda size: engine_request(size, multi_modal_items=[item(i) for i in range(size)]),
    ),
    "MAX_ITEM_TEXT_CHARS": ("multi_modal_items.hash", lambda size: item(text="x" * size)),
    "MAX_ITEM_BYTES": ("multi_modal_items.tensors", lambda size: item(num_bytes=size)),
    "MAX_PROMPT_EMBEDS_BYTES": (
        "prompt_embeds",
        lambda size: engine_request(prompt_embeds=TensorData(bytes(size), "uint8", (1, size))),
    ),
    "MAX_ABS_PROMPT_EMBEDS": (
        "prompt_embeds",
        lambda size: read_prompt_embeds(TensorData(struct.pack("<2f", 0.0, -size), "float32", (1, 2)), 2),
    ),
    "MAX_TENSOR_DIMENSIONS": ("shape", lambda size: TensorData(b"x", "uint8", (1,) * size)),
    "MAX_ADAPTER_NAME_CHARS": ("adapter.name", lambda size: AdapterRef(id=1, name="x" * size)),
    "MAX_ADAPTER_PATH_CHARS": ("adapter.path", lambda size: AdapterRef(id=1, name="x", path="x" * size)),
    "MAX_POOLING_DIMENSIONS": ("dimensions", lambda size: PoolingParams(dimensions=size)),
}
ELSEWHERE = {
    # limit: folder of the tests that go over it
    "MAX_BODY_BYTES": "plugins/server",
    "MAX_JSON_OBJECTS": "plugins/server",
    "MAX_JSON_ITEMS": "plugins/server",
    "MAX_TENANT_CHARS": "plugins/server",
    "MAX_PROMPTS_PER_REQUEST": "plugins/server",
    "MAX_TOTAL_SEQUENCES_PER_REQUEST": "plugins/server",
    "MAX_MESSAGES": "plugins/server",
    "MAX_TOOLS": "plugins/server",
    "MAX_TOOL_NAME_CHARS": "plugins/server",
    "MAX_TOOL_BYTES": "plugins/server",
    "MAX_CHAT_TEMPLATE_CHARS": "plugins/server",
    "MAX_TEMPLATE_OUTPUT_CHARS": "core/tokenizer",
    "MAX_IPC_MESSAGE_BYTES": "core/engine",
}


def test_every_limit_has_a_case():
    assert set(NAMES) == CASES.keys() | ELSEWHERE.keys()
    assert not CASES.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_bound_itself_is_allowed(name):
    CASES[name][1](getattr(limits, name))


@pytest.mark.parametrize("name", CASES)
def test_one_past_the_bound_is_refused_with_the_fields_name(name):
    field, call = CASES[name]
    with pytest.raises(RequestError) as caught:
        call(getattr(limits, name) + 1)
    assert caught.value.param == field
    assert caught.value.status == 400
    assert field in str(caught.value)
    assert len(str(caught.value)) < 500, "an error must not echo a large value"


def test_negative_bounds_hold_too():
    for call in (
        lambda: SamplingParams(seed=-limits.MAX_SEED - 1),
        lambda: process(priority=-limits.MAX_ABS_PRIORITY - 1),
    ):
        with pytest.raises(RequestError):
            call()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_limits_of_other_layers_have_tests_there(name):
    folder = ROOT / "tests" / ELSEWHERE[name]
    users = [
        path
        for path in folder.rglob("*.py")
        if re.search(rf"\b{name}\b|{name.lower().removeprefix('max_')}", path.read_text())
    ]
    assert users, f"no test in {folder} names {name}"


@pytest.fixture(scope="module")
def readers() -> str:
    """The text of all who may read a limit."""
    paths = [path for folder in ("core", "plugins") for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in paths if path.name != "limits.py")


@pytest.mark.parametrize("name", NAMES)
def test_every_limit_is_enforced_somewhere(name, readers):
    assert re.search(rf"\b{name}\b", readers), f"nothing reads {name}"

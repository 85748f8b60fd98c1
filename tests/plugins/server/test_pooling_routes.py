"""Vectors, classes, scores and reranked documents over HTTP, of tiny models; OpenAI's own client among those who ask."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from pelton_late_import import LateImport
from transformers import AutoTokenizer

from pelton import AsyncLLM
from pelton.config import EngineConfig
from pelton.engine.in_process import InProcessClient
from pelton.plugins import load_plugins
from pelton.testing.models import make_tiny_checkpoint, make_tiny_encoder
from pelton_plugins.server.app import build_app
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.serve import example
from pelton_plugins.server.state import ServerState

cohere, openai, langchain_openai = (LateImport(name) for name in ("cohere", "openai", "langchain_openai"))
SMALL = {"max_num_seqs": 8, "kv_cache_memory_bytes": 2**20, "disable_log_stats": True, "max_model_len": 64}
TEXTS = ["the river", "a small house near the river", "keys and values"]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Callable[..., contextlib.AbstractAsyncContextManager[httpx.AsyncClient]]]:
    """Gives a client of a server in this event loop, its engine in this process: one for all tests that ask for the same."""
    plugins = load_plugins()
    apps: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:

        @contextlib.asynccontextmanager
        async def run(path, **settings) -> AsyncIterator[httpx.AsyncClient]:
            key = f"{path} {settings}"
            if key not in apps:
                config = EngineConfig.from_flat(model=str(path), **{**SMALL, **settings})
                llm = await stack.enter_async_context(AsyncLLM(config, plugins=plugins, start_engine=InProcessClient))
                state = ServerState(config=ServerConfig(access_log=False), model_names=["tiny"], llm=llm)
                apps[key] = (build_app(state, plugins), llm)
            app, llm = apps[key]
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as client:
                client.llm = llm
                yield client

        yield run


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder"), "bert")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    return make_tiny_encoder(tmp_path_factory.mktemp("cross"), "xlm_roberta", "ForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return make_tiny_encoder(
        tmp_path_factory.mktemp("classes"), "modernbert", "ForSequenceClassification", id2label={0: "bad", 1: "so", 2: "good"},
        label2id={"bad": 0, "so": 1, "good": 2},
    )  # fmt: skip


async def ok(client, path, **body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client, path, *, status=400, **body):
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()["error"]


async def test_embeddings_in_every_form(encoder, running):
    async with running(encoder, is_matryoshka=True) as client:
        whole = await ok(client, "/v1/embeddings", model="tiny", input=TEXTS)
        assert (whole["object"], whole["model"], whole["id"][:5]) == ("list", "tiny", "embd-")
        assert [row["index"] for row in whole["data"]] == [0, 1, 2]
        vectors = np.array([row["embedding"] for row in whole["data"]], dtype=np.float32)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)

        packed = await ok(client, "/v1/embeddings", input=TEXTS, encoding_format="base64")
        unpacked = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in packed["data"]]
        np.testing.assert_allclose(np.stack(unpacked), vectors, atol=1e-5)

        tokens = [(await ok(client, "/tokenize", prompt=text))["tokens"] for text in TEXTS]
        by_ids = await ok(client, "/v1/embeddings", input=tokens)
        np.testing.assert_allclose([row["embedding"] for row in by_ids["data"]], vectors, atol=1e-5)
        assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] == sum(map(len, tokens))
        one = await ok(client, "/v1/embeddings", input=tokens[0])
        np.testing.assert_allclose(one["data"][0]["embedding"], vectors[0], atol=1e-5)

        short = await ok(client, "/v1/embeddings", input=TEXTS[0], dimensions=8)
        np.testing.assert_allclose(
            short["data"][0]["embedding"], vectors[0, :8] / np.linalg.norm(vectors[0, :8]), atol=1e-5
        )
        cut = await ok(client, "/v1/embeddings", input="the river " * 60, truncate_prompt_tokens=-1)
        assert cut["usage"]["prompt_tokens"] == 64
        chat = await ok(client, "/v1/embeddings", messages=[{"role": "user", "content": "the river"}])
        assert len(chat["data"][0]["embedding"]) == 48


async def test_openais_client(encoder, running):
    async with running(encoder) as http:
        client = openai.AsyncOpenAI(base_url="http://tiny/v1", api_key="none", http_client=http, max_retries=0)
        found = await client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64, and unpacks it
        plain = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        for one, other in zip(found.data, plain.data, strict=True):
            np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-6)
        assert found.usage.prompt_tokens == plain.usage.prompt_tokens > 0
        with pytest.raises(openai.BadRequestError, match="not trained for shortened vectors"):
            await client.embeddings.create(model="tiny", input="a", dimensions=8)
        with pytest.raises(openai.BadRequestError, match="does not generate; it is run for embed, token_embed"):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
        with pytest.raises(openai.BadRequestError, match="does not generate"):
            await client.completions.create(model="tiny", prompt="Hi")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.embeddings.create(model="other", input="a")


class Encoding:
    """What LangChain asks of tiktoken, which would fetch a vocabulary from the network: the model's own tokens."""

    def __init__(self, path):
        self._tokenizer = AutoTokenizer.from_pretrained(path)

    def encode_ordinary(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode(self, text, **kwargs):
        return self.encode_ordinary(text)


async def test_langchains_embeddings(encoder, monkeypatch, running):
    """It sends token ids in batches, and texts where it is told not to count tokens; both come back as base64."""
    sent = []
    async with running(encoder) as http:
        http.event_hooks["request"].append(lambda request: _note(sent, request))
        monkeypatch.setattr("tiktoken.encoding_for_model", lambda name: Encoding(encoder))
        options = {
            "base_url": "http://tiny/v1",
            "api_key": "none",
            "model": "tiny",
            "http_async_client": http,
            "max_retries": 0,
        }
        by_ids = langchain_openai.OpenAIEmbeddings(**options, chunk_size=2)
        by_text = langchain_openai.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
        vectors = np.array(await by_ids.aembed_documents(TEXTS))
        assert len(sent) == 2 and all(body["encoding_format"] == "base64" for body in sent)
        assert sent[0]["input"] == [Encoding(encoder).encode_ordinary(text) for text in TEXTS[:2]]
        for text, vector in zip(TEXTS, vectors, strict=True):
            plain = await ok(http, "/v1/embeddings", input=Encoding(encoder).encode_ordinary(text))
            np.testing.assert_allclose(vector, plain["data"][0]["embedding"], atol=1e-6)
        sent.clear()
        vectors = np.array(await by_text.aembed_documents(TEXTS))
        assert sent[0]["input"] == TEXTS
        plain = await ok(http, "/v1/embeddings", input=TEXTS)
        np.testing.assert_allclose(vectors, [row["embedding"] for row in plain["data"]], atol=1e-6)
        assert len(await by_text.aembed_query(TEXTS[0])) == vectors.shape[1]


async def _note(sent, request):
    sent.append(json.loads(request.content))


@pytest.mark.parametrize("version", [1, 2])
async def test_coheres_client_reranks(cross_encoder, version, running):
    """By either shape of its API, which it gives paths of."""
    async with running(cross_encoder) as http:
        make = {1: cohere.AsyncClient, 2: cohere.AsyncClientV2}[version]
        client = make(api_key="none", base_url="http://tiny", httpx_client=http)
        found = await client.rerank(model="tiny", query="a river", documents=TEXTS, top_n=2)
        scores = (await ok(http, "/score", text_1="a river", text_2=TEXTS))["data"]
        expected = sorted(((row["score"], row["index"]) for row in scores), reverse=True)[:2]
        assert [row.index for row in found.results] == [index for _, index in expected]
        for row, (score, _) in zip(found.results, expected, strict=True):
            assert row.relevance_score == pytest.approx(score, abs=1e-5)
        with pytest.raises(cohere.core.api_error.ApiError) as refusal:
            await client.rerank(model="tiny", query="a river", documents=[])
        assert refusal.value.status_code == 400 and "documents" in str(refusal.value.body)
        with pytest.raises(cohere.NotFoundError):
            await client.rerank(model="other", query="a river", documents=TEXTS)


async def test_coheres_client_embeds(encoder, running):
    async with running(encoder) as http:
        client = cohere.AsyncClientV2(api_key="none", base_url="http://tiny", httpx_client=http)
        found = await client.embed(
            model="tiny", texts=TEXTS, input_type="search_document", embedding_types=["float", "base64"]
        )
        plain = [row["embedding"] for row in (await ok(http, "/v1/embeddings", input=TEXTS))["data"]]
        np.testing.assert_allclose(found.embeddings.float_, plain, atol=1e-6)
        decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in found.embeddings.base64]
        np.testing.assert_allclose(decoded, plain, atol=1e-6)
        assert found.texts == TEXTS
        with pytest.raises(cohere.core.api_error.ApiError) as refusal:
            await client.embed(model="tiny", texts=[], input_type="search_document")
        assert refusal.value.status_code == 400 and "texts" in str(refusal.value.body)
        # SageMaker's route does what the fields ask for.
        assert [row["embedding"] for row in (await ok(http, "/invocations", input=TEXTS))["data"]] == plain
        assert len((await ok(http, "/invocations", text_1="a river", text_2=TEXTS))["data"]) == len(TEXTS)


@pytest.mark.parametrize("kind", ["encoder", "classifier", "cross_encoder"])
async def test_the_example_of_the_start_is_answered(kind, request, running):
    path = request.getfixturevalue(kind)
    async with running(path) as client:
        route, body = example(client.llm, "tiny")
        assert (await client.post(route, json=json.loads(body))).status_code == 200


async def test_bad_embedding_requests(encoder, running):
    async with running(encoder) as client:
        for body, message in (
            ({}, "Send input or messages, one of them"),
            ({"input": []}, "input is empty or mixes"),
            ({"input": ""}, "empty text"),
            ({"input": ["a", [1]]}, "mixes"),
            ({"input": [100_000]}, "not in the vocabulary"),
            ({"input": ["a"], "encoding_format": "hex"}, "encoding_format"),
            ({"input": "the river " * 60}, "maximum context length is 64 tokens"),
            ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1"),
            ({"input": ["a"] * 3000}, "at most 2048"),
        ):
            assert message in (await refused(client, "/v1/embeddings", **body))["message"], body
        for path, body, param in (
            ("/v1/embeddings", {"input": ["a"] * 3000}, "input"),
            ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
            ("/pooling", {"input": "a", "task": "x"}, "task"),
            ("/score", {"text_1": "a", "text_2": ["b"] * 3000}, "text_2"),
            ("/score", {"queries": ["a", ""], "items": ["b", "c"]}, "queries"),
            ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
            ("/rerank", {"query": "", "documents": ["b"]}, "query"),
        ):
            error = await refused(client, path, **body)
            assert error["param"] == param and error["message"].startswith(param), error
        assert "no task 'classify'" in (await refused(client, "/classify", input="a"))["message"]


async def test_classes(classifier, running):
    async with running(classifier) as client:
        found = await ok(client, "/classify", input=TEXTS)
        for row in found["data"]:
            assert row["num_classes"] == 3 and sum(row["probs"]) == pytest.approx(1, abs=1e-4)
            assert row["label"] == ["bad", "so", "good"][int(np.argmax(row["probs"]))]
        bare = await ok(client, "/pooling", input=TEXTS, task="reward")
        for row, logits in zip(found["data"], bare["data"], strict=True):
            numbers = np.exp(np.array(logits["data"]))
            np.testing.assert_allclose(row["probs"], numbers / numbers.sum(), atol=1e-4)
        error = await refused(client, "/score", text_1="a", text_2="b")
        assert "scores no pairs of texts; it is run for classify, reward" in error["message"]


@pytest.mark.parametrize("kind", ["cross-encoder", "vectors"])
async def test_scores_and_reranking(encoder, cross_encoder, kind, running):
    query, documents = TEXTS[0], [*TEXTS, TEXTS[0]]
    async with running(cross_encoder if kind == "cross-encoder" else encoder) as client:
        scored = await ok(client, "/score", text_1=query, text_2=documents)
        scores = [row["score"] for row in scored["data"]]
        assert scores[0] == pytest.approx(scores[3], abs=1e-5)
        if kind == "vectors":
            assert scores[0] == pytest.approx(1, abs=1e-5)
        for names in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
            other = await ok(client, "/v1/score", **dict(zip(names, ([query] * 4, documents), strict=True)))
            np.testing.assert_allclose([row["score"] for row in other["data"]], scores, atol=1e-5)

        best = sorted(range(4), key=lambda index: (-round(scores[index], 4), index))
        for path in ("/rerank", "/v1/rerank"):
            found = await ok(
                client, path, query=query, documents=[documents[0], {"text": documents[1]}, *documents[2:]]
            )
            assert [row["index"] for row in found["results"]] == best
            for row in found["results"]:
                assert row["document"]["text"] == documents[row["index"]]
                assert row["relevance_score"] == pytest.approx(scores[row["index"]], abs=1e-5)
            assert found["usage"]["total_tokens"] > 0
        top = await ok(client, "/v2/rerank", query=query, documents=documents, top_n=2)
        assert [set(row) for row in top["results"]] == [{"index", "relevance_score"}] * 2
        shown = await ok(client, "/v2/rerank", query=query, documents=documents, return_documents=True)
        assert "document" in shown["results"][0]
        assert "at least 0" in (await refused(client, "/rerank", query="a", documents=["b"], top_n=-1))["message"]
        assert "documents is empty" in (await refused(client, "/rerank", query="a", documents=[]))["message"]
        assert (
            "2 first texts and 3" in (await refused(client, "/score", text_1=["a", "b"], text_2=["c"] * 3))["message"]
        )
        if kind == "cross-encoder":
            bare = await ok(client, "/score", text_1=query, text_2=documents, use_activation=False)
            assert [row["score"] for row in bare["data"]] != scores
            error = await refused(client, "/score", text_1="a", text_2="b", add_special_tokens=False)
            assert error["param"] == "add_special_tokens"
        else:
            error = await refused(client, "/score", text_1="a", text_2="b", use_activation=False)
            assert error["param"] == "use_activation"
        assert "two sides" in (await refused(client, "/score", text_1="a"))["message"]


async def test_plain_results_of_each_token(encoder, running):
    async with running(encoder) as client:
        found = await ok(client, "/pooling", input=[[5, 6, 7], [8]], task="token_embed")
        assert [np.array(row["data"]).shape for row in found["data"]] == [(3, 48), (1, 48)]
        packed = await ok(client, "/pooling", input=[[5, 6, 7]], task="token_embed", encoding_format="base64")
        numbers = np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4").reshape(3, 48)
        np.testing.assert_allclose(numbers, found["data"][0]["data"], atol=1e-5)
        assert "must be one of embed" in (await refused(client, "/pooling", input="a", task="sing"))["message"]
        assert "no IO processor" in (await refused(client, "/pooling", data={"any": 1}))["message"]


async def test_an_adapter_is_a_model_of_every_route(encoder, tmp_path, running):
    import torch
    from safetensors.torch import load_file, save_file

    random, tensors = torch.Generator().manual_seed(1), {}
    for name, weight in load_file(encoder / "model.safetensors").items():
        if name.endswith(("query.weight", "intermediate.dense.weight")):
            full = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{full}.lora_A.weight"] = torch.randn(8, weight.shape[1], generator=random) * 0.3
            tensors[f"{full}.lora_B.weight"] = torch.randn(weight.shape[0], 8, generator=random) * 0.3
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["query", "intermediate.dense"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    async with running(encoder, enable_lora=True, lora_modules=[f"mine={tmp_path}"]) as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [("tiny", None), ("mine", "tiny")]
        base = await ok(client, "/v1/embeddings", model="tiny", input=TEXTS)
        found = await ok(client, "/v1/embeddings", model="mine", input=TEXTS)
        assert found["model"] == "mine"
        plain, adapted = (np.array([row["embedding"] for row in one["data"]]) for one in (base, found))
        assert np.abs(plain - adapted).max(axis=1).min() > 0.01
        pooled = await ok(client, "/pooling", model="mine", input=TEXTS, task="embed")
        np.testing.assert_allclose([row["data"] for row in pooled["data"]], adapted, atol=1e-5)
        scores = await ok(client, "/score", model="mine", text_1=TEXTS[0], text_2=TEXTS[1:])
        np.testing.assert_allclose([row["score"] for row in scores["data"]], adapted[1:] @ adapted[0], atol=1e-4)
        ranked = await ok(client, "/v2/rerank", model="mine", query=TEXTS[0], documents=TEXTS[1:])
        assert {row["relevance_score"] for row in ranked["results"]} == {row["score"] for row in scores["data"]}
        cohere_body = {"model": "mine", "texts": TEXTS, "input_type": "search_query", "embedding_types": ["float"]}
        by_cohere = await ok(client, "/v2/embed", **cohere_body)
        np.testing.assert_allclose(by_cohere["embeddings"]["float"], adapted, atol=1e-5)
        await refused(client, "/v1/embeddings", status=404, model="other", input="a")


async def test_a_model_that_generates_says_so(tmp_path, running):
    async with running(make_tiny_checkpoint(tmp_path, "llama")) as client:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}), ("/classify", {"input": "a"}), ("/pooling", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]}),
        ):  # fmt: skip
            error = await refused(client, path, **body)
            assert error["message"].startswith("This model generates; it makes no vectors or scores."), path

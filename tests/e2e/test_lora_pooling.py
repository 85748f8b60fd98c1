"""Adapters of models that pool: vectors and scores equal those of PEFT's merged weights in float32, whatever else is in the batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pelton_e2e import make_prompts
from pelton_lora import make_adapter

from pelton import LLM, AsyncLLM, LoRARequest, PoolingParams
from pelton.errors import InvalidAdapterError
from pelton.testing.models import load_pooling_reference, load_reference, make_tiny_checkpoint, make_tiny_encoder

SETTINGS = {
    "max_num_seqs": 6, "kv_cache_memory_bytes": 4 * 2**20, "disable_log_stats": True, "enable_lora": True, "max_loras": 2
}  # fmt: skip
PROMPTS = make_prompts(320, (1, 7, 16, 40, 70))
BERT = r".*(query|key|value|(attention\.)?output\.dense|intermediate\.dense)"
BODIES: dict[str, str] = {"bert": BERT, "xlm_roberta": BERT, "modernbert": r".*\.(Wqkv|Wo|Wi)"}
HEADS = {
    "bert": ("ForSequenceClassification", rf"{BERT}|bert\.pooler\.dense|classifier"),
    "xlm_roberta": ("ForSequenceClassification", rf"{BERT}|classifier\.(dense|out_proj)"),
    "modernbert": ("ForSequenceClassification", r".*\.(Wqkv|Wo|Wi)|head\.dense|classifier"),
    "bert-tokens": ("ForTokenClassification", rf"{BERT}|classifier"),
}
DECODER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def outputs_of(model: Any, ids: list[int]) -> np.ndarray:
    """The hidden states of a body, or the logits of a head."""
    import torch

    with torch.inference_mode():
        found = model(input_ids=torch.tensor([ids]))
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state)[0].float().numpy()


def mean_vector(model: Any, ids: list[int]) -> np.ndarray:
    vector = outputs_of(model, ids).mean(0)
    return vector / np.linalg.norm(vector)


def mixed(first: LoRARequest, second: LoRARequest) -> tuple[list[dict[str, Any]], list[LoRARequest | None], list[int]]:
    """Every prompt without an adapter and with each: prompts, requests, and which model is to answer."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS for _ in range(3)]
    return prompts, [None, first, second] * len(PROMPTS), [0, 1, 2] * len(PROMPTS)


def check(found: list[np.ndarray], models: list[Any], compute: Any, tolerance: float) -> None:
    wanted = [compute(models[which], ids) for ids in PROMPTS for which in range(3)]
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance, err_msg=f"answer {index}")
    for base, first, second in zip(wanted[::3], wanted[1::3], wanted[2::3], strict=True):
        apart = min(np.abs(base - first).max(), np.abs(base - second).max(), np.abs(first - second).max())
        assert apart > 20 * tolerance, "the adapters change too little to tell"


def two_adapters(folder: Path, load: Any, targets: Any) -> tuple[list[LoRARequest], list[Any]]:
    """Requests, and the models that are to answer: the base, then each adapter's merged weights."""
    requests, models = [], [load()]
    for seed in (1, 2):
        models.append(make_adapter(folder / f"adapter{seed}", load, seed=seed, target_modules=targets))
        requests.append(LoRARequest(f"adapter{seed}", 1, str(folder / f"adapter{seed}")))
    return requests, models


@pytest.mark.parametrize("family", BODIES)
def test_encoders(family: str, tmp_path: Path) -> None:
    path = make_tiny_encoder(tmp_path / "model", family)
    requests, models = two_adapters(tmp_path, lambda: load_pooling_reference(path), BODIES[family])
    prompts, adapters, _ = mixed(*requests)
    with LLM(model=str(path), pooling_type="mean", **SETTINGS) as llm:
        found = llm.embed(prompts, lora_request=adapters, use_tqdm=False)
        check([np.array(one.outputs.embedding) for one in found], models, mean_vector, 2e-4)
        (alone,) = llm.encode(prompts[-1], lora_request=requests[1], use_tqdm=False)
        np.testing.assert_allclose(alone.outputs.data, found[-1].outputs.embedding, atol=1e-5)


@pytest.mark.parametrize("case", HEADS)
def test_heads_and_what_lies_below_them(case: str, tmp_path: Path) -> None:
    head, targets = HEADS[case]
    path = make_tiny_encoder(tmp_path / "model", case.partition("-")[0], head, num_labels=3)
    requests, models = two_adapters(tmp_path, lambda: load_pooling_reference(path, head), targets)
    prompts, adapters, _ = mixed(*requests)
    task = "token_classify" if head == "ForTokenClassification" else "classify"
    with LLM(model=str(path), **SETTINGS) as llm:
        params = PoolingParams(task=task, use_activation=False)
        found = llm.encode(prompts, params, lora_request=adapters, use_tqdm=False)
        check([one.outputs.data for one in found], models, outputs_of, 2e-3)
        if task == "classify":
            probs = llm.classify(prompts, lora_request=adapters, use_tqdm=False)
            assert [np.argmax(one.outputs.probs) for one in probs] == [np.argmax(one.outputs.data) for one in found]


@pytest.mark.parametrize("inner", [True, False], ids=["of-the-body", "of-the-whole-model"])
@pytest.mark.parametrize("chunk", [None, 16], ids=["whole", "chunked"])
def test_decoders_that_embed(chunk: int | None, inner: bool, tmp_path: Path) -> None:
    """Adapters trained on `AutoModel` have names without "model.", those of `AutoModelForCausalLM` with it. Prefix hits stay apart."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", with_tokenizer=False)
    load = load_pooling_reference if inner else load_reference
    requests, models = two_adapters(tmp_path, lambda: load(str(path)), DECODER)
    bodies = models if inner else [model.model for model in models]
    prompts, adapters, _ = mixed(*requests)
    settings = SETTINGS | ({"max_num_batched_tokens": chunk} if chunk else {})
    with LLM(
        model=str(path), runner="pooling", pooling_type="mean", max_model_len=128, skip_tokenizer_init=True, **settings
    ) as llm:
        for _ in range(2):
            found = llm.embed(prompts, lora_request=adapters, use_tqdm=False)
            check([np.array(one.outputs.embedding) for one in found], bodies, mean_vector, 2e-4)


def test_a_head_on_a_decoder_whose_prompt_is_computed_in_pieces(tmp_path: Path) -> None:
    import torch
    import transformers

    source = make_tiny_checkpoint(tmp_path / "causal", "qwen2", with_tokenizer=False)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=3)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    path = tmp_path / "model"
    model.save_pretrained(path)

    def load() -> Any:
        return transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()

    requests, models = two_adapters(tmp_path, load, [*DECODER, "score"])
    prompts, adapters, _ = mixed(*requests)
    settings = SETTINGS | {"max_num_batched_tokens": 16, "skip_tokenizer_init": True, "max_model_len": 128}
    with LLM(model=str(path), **settings) as llm:
        found = llm.reward(prompts, lora_request=adapters, use_tqdm=False)
    check([one.outputs.data for one in found], models, outputs_of, 2e-3)


def test_what_no_vector_is_made_by_is_refused(tmp_path: Path) -> None:
    """BERT's pooler, which "dense" names too."""
    path = make_tiny_encoder(tmp_path / "model", "bert")
    make_adapter(tmp_path / "adapter", lambda: load_pooling_reference(path), target_modules=["query", "dense"])
    with (
        LLM(model=str(path), **SETTINGS) as llm,
        pytest.raises(
            InvalidAdapterError, match=r"'pooler.dense' takes no adapter: what this engine answers is computed"
        ),
    ):
        llm.add_lora(LoRARequest("dense", 1, str(tmp_path / "adapter")))


def test_asynchronous_requests_and_scores(tmp_path: Path) -> None:
    path = make_tiny_encoder(tmp_path / "model", "bert")
    (request, _), _ = two_adapters(tmp_path, lambda: load_pooling_reference(path), BERT)
    texts = ["the river", "a small house near the river", "keys"]
    with LLM(model=str(path), **SETTINGS) as llm:
        base = [one.outputs.score for one in llm.score(texts[0], texts[1:], use_tqdm=False)]
        adapted = [one.outputs.score for one in llm.score(texts[0], texts[1:], lora_request=request, use_tqdm=False)]
        vectors = [one.outputs.embedding for one in llm.embed(texts, lora_request=request, use_tqdm=False)]
    assert np.abs(np.subtract(base, adapted)).max() > 1e-3
    assert adapted == pytest.approx([float(np.dot(vectors[0], other)) for other in vectors[1:]], abs=1e-4)

    async def ask() -> tuple[list[Any], list[Any]]:
        async with AsyncLLM.from_flat(model=str(path), **SETTINGS) as llm:
            together = await llm.encode_all(texts, PoolingParams(task="embed"), lora_request=request)
            alone = [
                output
                for text in texts
                async for output in llm.encode(text, PoolingParams(task="embed"), lora_request=request)
            ]
            return together, alone

    for outputs in asyncio.run(ask()):
        for output, vector in zip(outputs, vectors, strict=True):
            np.testing.assert_allclose(output.outputs.data, vector, atol=1e-5)

"""Encoders, embedding decoders and heads give transformers' vectors and scores, whatever the batch and the chunks."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from pelton import LLM, PoolingParams
from pelton.errors import ConfigError, NotSupportedError, RequestError
from pelton.testing.models import load_pooling_reference, make_tiny_checkpoint, make_tiny_encoder

SMALL = {"max_num_seqs": 6, "kv_cache_memory_bytes": 4 * 2**20, "disable_log_stats": True}
LENGTHS = [1, 2, 7, 16, 17, 33, 64, 100, 7, 16]
_random = random.Random(5)
PROMPTS = [[_random.randrange(5, 320) for _ in range(length)] for length in LENGTHS]
TOLERANCE = 2e-4


def prompts(ids=PROMPTS):
    return [{"prompt_token_ids": one} for one in ids]


def hidden_states(model, ids, **inputs):
    import torch

    with torch.inference_mode():
        found = model(input_ids=torch.tensor([ids]), **inputs)
    return (found.last_hidden_state if hasattr(found, "last_hidden_state") else found.logits)[0].float().numpy()


def logits(model, ids, **inputs):
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), **inputs).logits[0].float().numpy()


def pooled(states, pooling_type):
    return {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling_type]


def unit(vector):
    return vector / np.linalg.norm(vector)


def embeddings(llm, params=None, ids=PROMPTS):
    outputs = llm.embed(prompts(ids), pooling_params=params, use_tqdm=False)
    return [np.array(output.outputs.embedding, dtype=np.float32) for output in outputs]


@pytest.mark.parametrize("family", ["bert", "xlm_roberta", "modernbert"])
def test_encoders_equal_transformers_in_any_batch(tmp_path, family):
    path = make_tiny_encoder(tmp_path, family)
    reference = load_pooling_reference(path)
    for pooling_type in ("cls", "mean", "last"):
        with LLM(model=str(path), pooling_type=pooling_type, **SMALL) as llm:
            found = embeddings(llm)
            alone = [embeddings(llm, ids=[ids])[0] for ids in PROMPTS[:4]]
        for ids, vector in zip(PROMPTS, found, strict=True):
            expected = unit(pooled(hidden_states(reference, ids), pooling_type))
            np.testing.assert_allclose(vector, expected, atol=TOLERANCE, err_msg=f"{pooling_type}, {len(ids)} tokens")
        for one, other in zip(alone, found, strict=False):
            np.testing.assert_allclose(one, other, atol=1e-5)


def make_tiny_gemma(path, **fields):
    """EmbeddingGemma's shape: three layers of four have a window."""
    import torch
    from transformers import Gemma3TextConfig, Gemma3TextModel

    sizes = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "head_dim": 16}
    config = Gemma3TextConfig(
        **sizes, num_attention_heads=3, num_key_value_heads=1, query_pre_attn_scalar=20, sliding_window=16, max_position_embeddings=256,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], **{"use_bidirectional_attention": True, **fields},
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Gemma3TextModel(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0.0, 0.2 if weight.dim() == 1 else 2.0 / weight.shape[1] ** 0.5)
    model.save_pretrained(path)
    return path


def test_embedding_gemma_equals_transformers_in_any_batch(tmp_path):
    path = make_tiny_gemma(tmp_path)
    reference = load_pooling_reference(path)
    with LLM(model=str(path), pooling_type="mean", skip_tokenizer_init=True, **SMALL) as llm:
        found = embeddings(llm)
        alone = [embeddings(llm, ids=[ids])[0] for ids in PROMPTS[:7]]
    for ids, vector in zip(PROMPTS, found, strict=True):
        expected = unit(pooled(hidden_states(reference, ids), "mean"))
        np.testing.assert_allclose(vector, expected, atol=TOLERANCE, err_msg=f"{len(ids)} tokens")
    for one, other in zip(alone, found, strict=False):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_gemma_without_a_head_that_sees_one_way_is_refused(tmp_path):
    path = make_tiny_gemma(tmp_path, use_bidirectional_attention=False)
    with pytest.raises(
        ConfigError, match="use_bidirectional_attention is False; of Gemma 3 without a head EmbeddingGemma"
    ):
        LLM(model=str(path), skip_tokenizer_init=True, **SMALL)


@pytest.mark.parametrize("family", ["bert", "xlm_roberta", "modernbert"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_sequence_heads_equal_transformers(tmp_path, family, num_labels):
    path = make_tiny_encoder(tmp_path, family, "ForSequenceClassification", num_labels=num_labels)
    reference = load_pooling_reference(path, "ForSequenceClassification")
    expected = [logits(reference, ids) for ids in PROMPTS]
    with LLM(model=str(path), **SMALL) as llm:
        probs = [output.outputs.probs for output in llm.classify(prompts(), use_tqdm=False)]
        bare = [output.outputs.data for output in llm.reward(prompts(), use_tqdm=False)]
        with pytest.raises(NotSupportedError, match=r"no task 'embed'; it is run for classify, reward"):
            llm.embed(prompts(), use_tqdm=False)
    for found, wanted in zip(bare, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3)
    for found, wanted in zip(probs, expected, strict=True):
        shifted = np.exp(wanted - wanted.max())
        np.testing.assert_allclose(
            found, 1 / (1 + np.exp(-wanted)) if num_labels == 1 else shifted / shifted.sum(), atol=1e-3
        )


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_token_heads_equal_transformers(tmp_path, family):
    path = make_tiny_encoder(tmp_path, family, "ForTokenClassification", num_labels=4)
    reference = load_pooling_reference(path, "ForTokenClassification")
    params = PoolingParams(task="token_classify", use_activation=False)
    with LLM(model=str(path), **SMALL) as llm:
        found = llm.encode(prompts(), params, use_tqdm=False)
    for ids, output in zip(PROMPTS, found, strict=True):
        assert output.outputs.data.shape == (len(ids), 4)
        np.testing.assert_allclose(output.outputs.data, logits(reference, ids), atol=1e-3)


def test_a_cross_encoder_tells_the_two_texts_apart(tmp_path):
    """BERT's second text has a token type of its own; the folder's tokenizer template says where it begins."""
    import torch
    from tokenizers import Tokenizer, processors

    path = make_tiny_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B:1 <eos>:1", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    reference = load_pooling_reference(path, "ForSequenceClassification")
    query, documents = "the river", ["a small house near the river", "keys", "the dog and the other dog"]
    with LLM(model=str(path), **SMALL) as llm:
        scores = [output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]
        cut = llm.score(query, documents, truncate_prompt_tokens=8, use_tqdm=False)
        assert [len(output.prompt_token_ids) <= 8 for output in cut] == [True] * 3
        kwargs = {"add_special_tokens": False, "truncate_prompt_tokens": 2}
        (bare,) = llm.classify("the river keys", tokenization_kwargs=kwargs, use_tqdm=False)
        assert bare.prompt_token_ids == tokenizer.encode("the river", add_special_tokens=False).ids[:2]
        with pytest.raises(RequestError, match="2 first texts and 3 second ones"):
            llm.score(["a", "b"], documents, use_tqdm=False)
        with pytest.raises(RequestError, match="data_1 is a int; give a text, or a list of texts"):
            llm.score(1, "a", use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="data_2 holds a int; give a text, or a list of texts"):
            llm.score("a", [1, 2], use_tqdm=False)  # type: ignore[list-item]
    for document, score in zip(documents, scores, strict=True):
        encoded = tokenizer.encode(query, document)
        assert 1 in encoded.type_ids
        types = {"token_type_ids": torch.tensor([encoded.type_ids])}
        (wanted,) = logits(reference, encoded.ids, **types)
        assert score == pytest.approx(1 / (1 + np.exp(-wanted)), abs=1e-3)
        assert abs(wanted - logits(reference, encoded.ids)[0]) > 1e-3, "the types change nothing"


@pytest.mark.parametrize("chunk", [None, 16], ids=["whole", "chunked"])
@pytest.mark.parametrize("pooling_type", ["last", "mean", "cls"])
def test_decoders_equal_transformers_whole_and_in_chunks(tmp_path, pooling_type, chunk):
    path = make_tiny_checkpoint(tmp_path, "qwen3")
    reference = load_pooling_reference(path)
    settings = SMALL | ({"max_num_batched_tokens": chunk} if chunk else {})
    with LLM(model=str(path), runner="pooling", pooling_type=pooling_type, max_model_len=128, **settings) as llm:
        found, again = (
            embeddings(llm),
            embeddings(llm),
        )  # the second time with hits in the prefix cache, where it may be read
        tokens = llm.encode(prompts(), PoolingParams(task="token_embed", use_activation=False), use_tqdm=False)
    for ids, *vectors, output in zip(PROMPTS, found, again, tokens, strict=True):
        states = hidden_states(reference, ids)
        for vector in vectors:
            np.testing.assert_allclose(vector, unit(pooled(states, pooling_type)), atol=TOLERANCE)
        np.testing.assert_allclose(output.outputs.data, states, atol=5e-3)


@pytest.mark.usefixtures("forks")
def test_two_stages_pool_as_one_device_does(tmp_path):
    """In chunks, from a checkpoint without a head: its names have no "model." before them, those of the other stage's layers neither."""
    path = make_tiny_checkpoint(tmp_path / "causal", "qwen3")
    reference = load_pooling_reference(path)
    reference.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())
    settings = SMALL | {"max_num_batched_tokens": 16, "pipeline_parallel_size": 2}
    with LLM(
        model=str(tmp_path / "saved"), runner="pooling", pooling_type="mean", max_model_len=128, **settings
    ) as llm:
        found = embeddings(llm)
    for ids, vector in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(vector, unit(pooled(hidden_states(reference, ids), "mean")), atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2"])
def test_other_causal_models_pool_too(tmp_path, family):
    path = make_tiny_checkpoint(tmp_path, family)
    reference = load_pooling_reference(path)
    with LLM(model=str(path), runner="pooling", max_model_len=128, **SMALL) as llm:
        found = embeddings(llm, ids=PROMPTS[:6])
    for ids, vector in zip(PROMPTS, found, strict=False):
        np.testing.assert_allclose(vector, unit(hidden_states(reference, ids)[-1]), atol=TOLERANCE)


def test_the_text_of_a_model_that_reads_images_pools(tmp_path):
    """Qwen3-VL's embedding models: the model itself brings their names to those of the text model."""
    path = make_tiny_checkpoint(tmp_path, "qwen3")
    reference = load_pooling_reference(path)
    (file,) = path.glob("*.safetensors")
    save_file(
        {f"model.language_{name}": tensor for name, tensor in load_file(file).items() if "lm_head" not in name}, file
    )
    text = json.loads((path / "config.json").read_text()) | {"model_type": "qwen3_vl_text"}
    whole = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    (path / "config.json").write_text(json.dumps(whole))
    with LLM(model=str(path), runner="pooling", max_model_len=128, **SMALL) as llm:
        found = embeddings(llm, ids=PROMPTS[:3])
    for ids, vector in zip(PROMPTS, found, strict=False):
        np.testing.assert_allclose(vector, unit(hidden_states(reference, ids)[-1]), atol=TOLERANCE)


def test_a_decoder_saved_without_its_head_is_an_embedding_model(tmp_path):
    import transformers

    source = make_tiny_checkpoint(tmp_path / "causal", "qwen3")
    model = transformers.AutoModel.from_pretrained(source)
    path = tmp_path / "bare"
    model.save_pretrained(path)
    (path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    with LLM(model=str(path), max_model_len=128, **SMALL) as llm:
        found = embeddings(llm, ids=PROMPTS[:3])
        with pytest.raises(RequestError, match="does not generate; it is run for embed, token_embed"):
            llm.generate(prompts()[:1], use_tqdm=False)
    for ids, vector in zip(PROMPTS, found, strict=False):
        np.testing.assert_allclose(vector, unit(hidden_states(model.eval(), ids)[-1]), atol=TOLERANCE)


def test_a_reward_head_on_a_decoder(tmp_path):
    import torch
    import transformers

    source = make_tiny_checkpoint(tmp_path / "causal", "qwen2")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    path = tmp_path / "reward"
    model.save_pretrained(path)
    (path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    with LLM(model=str(path), max_model_len=128, **SMALL) as llm:
        rewards = [float(output.outputs.data[0]) for output in llm.reward(prompts(), use_tqdm=False)]
        scores = [output.outputs.score for output in llm.score("a", ["b", "c"], use_tqdm=False)]
    assert all(0 < score < 1 for score in scores)
    for ids, reward in zip(PROMPTS, rewards, strict=True):
        assert reward == pytest.approx(float(logits(model.eval(), ids)[0]), abs=1e-3)


def test_shortened_vectors(tmp_path):
    path = make_tiny_encoder(tmp_path, "bert")
    with LLM(model=str(path), is_matryoshka=True, **SMALL) as llm:
        whole, short = embeddings(llm), embeddings(llm, PoolingParams(dimensions=8))
        raw = embeddings(llm, PoolingParams(use_activation=False))
        with pytest.raises(RequestError, match="dimensions must be at most 48"):
            embeddings(llm, PoolingParams(dimensions=49))
    for full, head, bare in zip(whole, short, raw, strict=True):
        np.testing.assert_allclose(head, unit(full[:8]), atol=1e-5)
        np.testing.assert_allclose(unit(bare), full, atol=1e-5)
    with LLM(model=str(path), **SMALL) as llm, pytest.raises(RequestError, match="not trained for shortened vectors"):
        embeddings(llm, PoolingParams(dimensions=8))


def test_a_model_that_generates_makes_no_vectors(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "llama")
    with (
        LLM(model=str(path), max_model_len=64, **SMALL) as llm,
        pytest.raises(RequestError, match="generates; it makes no"),
    ):
        llm.embed(prompts()[:1], use_tqdm=False)
    encoder = make_tiny_encoder(tmp_path / "encoder", "bert")
    with pytest.raises(ConfigError, match="runner is 'generate', and BertModel makes vectors"):
        LLM(model=str(encoder), runner="generate", **SMALL)


def test_a_prompt_as_long_as_the_context_fits_and_a_longer_one_is_cut_when_asked(tmp_path):
    path = make_tiny_encoder(tmp_path, "bert")
    with LLM(model=str(path), max_model_len=32, **SMALL) as llm:
        (whole,) = embeddings(llm, ids=[list(range(5, 37))])
        with pytest.raises(RequestError, match="maximum context length is 32 tokens"):
            embeddings(llm, ids=[list(range(5, 38))])
        (cut,) = llm.embed({"prompt_token_ids": list(range(5, 60))}, truncate_prompt_tokens=-1, use_tqdm=False)
    np.testing.assert_allclose(cut.outputs.embedding, whole, atol=1e-5)
    assert len(cut.prompt_token_ids) == 32

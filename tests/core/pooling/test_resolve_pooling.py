"""Whether a model pools, and how: architecture, folder and settings."""

from __future__ import annotations

import pytest

from pelton.config import EngineConfig
from pelton.entries import ModelEntry
from pelton.errors import ConfigError
from pelton.model.pooling import DenseSpec, PoolingFolder
from pelton.model.resolve_pooling import ModelFacts, resolve_pooling

ENTRIES = [
    ModelEntry(name="qwen3", load="m:Qwen3", architectures=("Qwen3ForCausalLM",)),
    ModelEntry(
        name="bert", load="m:Bert", architectures=("BertModel", "BertForSequenceClassification"), kind="pool",
        attends_both_ways=True,
    ),
]  # fmt: skip
SAVED_TO_EMBED = PoolingFolder(pooling_type="mean", normalize=False, is_embedding=True)


def resolve(architecture, folder=None, hf=None, **settings):
    config = EngineConfig.from_flat(model="m", **settings)
    return resolve_pooling(config, ModelFacts(hf or {}, architecture, folder or PoolingFolder(), ENTRIES))


@pytest.mark.parametrize("architecture, folder, settings, pooling_type", [
    pytest.param("Qwen3ForCausalLM", None, {}, None, id="a-decoder-generates"),
    pytest.param("Qwen3ForCausalLM", None, {"runner": "pooling"}, "last", id="unless-it-is-run-to-pool"),
    pytest.param("Qwen3ForCausalLM", SAVED_TO_EMBED, {}, "mean", id="or-was-saved-to-embed"),
    pytest.param("Qwen3ForCausalLM", SAVED_TO_EMBED, {"runner": "generate"}, None, id="the-setting-wins"),
    pytest.param("Qwen3Model", None, {}, "last", id="without-its-head-it-pools"),
    pytest.param("BertModel", None, {}, "cls", id="an-encoder-pools"),
    pytest.param("BertModel", SAVED_TO_EMBED, {"pooling_type": "last"}, "last", id="pooling-type-of-the-settings"),
])  # fmt: skip
def test_what_pools_and_by_which_states(architecture, folder, settings, pooling_type):
    spec = resolve(architecture, folder, **settings)
    assert (spec and spec.pooling_type) == pooling_type


def test_a_folder_without_normalize_keeps_lengths_and_the_setting_wins():
    assert resolve("BertModel").normalize
    assert not resolve("BertModel", SAVED_TO_EMBED).normalize
    assert resolve("BertModel", SAVED_TO_EMBED, normalize=True).normalize


def test_only_encoders_need_their_prompts_whole():
    assert resolve("BertModel").attends_both_ways
    assert not resolve("Qwen3Model").attends_both_ways


@pytest.mark.parametrize("hf, labels, activation, tasks", [
    ({}, ["LABEL_0", "LABEL_1"], "softmax", ["classify", "reward"]),
    ({"id2label": {"1": "bad", "0": "good"}}, ["good", "bad"], "softmax", ["classify", "reward"]),
    ({"num_labels": 1}, ["LABEL_0"], "sigmoid", ["classify", "reward", "score"]),
    ({"id2label": {"0": "x"}, "problem_type": "regression"}, ["x"], "identity", ["classify", "reward", "score"]),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, ["LABEL_0", "LABEL_1", "LABEL_2"], "sigmoid",
     ["classify", "reward"]),
    ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ["LABEL_0"], "identity",
     ["classify", "reward", "score"]),
    ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, ["LABEL_0"], "identity",
     ["classify", "reward", "score"]),
])  # fmt: skip
def test_heads(hf, labels, activation, tasks):
    for architecture in ("BertForSequenceClassification", "Qwen3ForSequenceClassification"):
        spec = resolve(architecture, hf=hf)
        assert (spec.labels, spec.activation, spec.tasks) == (labels, activation, tasks)


def test_a_head_has_its_own_pooling_whatever_the_folder_says():
    dense = PoolingFolder(pooling_type="mean", dense=[DenseSpec(path="2_Dense", in_features=4, out_features=2)])
    spec = resolve("BertForSequenceClassification", dense)
    assert spec.pooling_type == "cls" and not spec.dense


def test_shortened_vectors_are_taken_where_the_model_says_so():
    assert not resolve("BertModel").is_matryoshka
    assert resolve("BertModel", is_matryoshka=True).is_matryoshka
    spec = resolve("BertModel", hf={"matryoshka_dimensions": [64, 128]})
    assert spec.is_matryoshka and spec.dimensions == [64, 128]
    assert resolve("BertModel", matryoshka_dimensions=[32]).dimensions == [32]


@pytest.mark.parametrize("architecture, hf, settings, message", [
    ("BertModel", {}, {"runner": "generate"}, "runner is 'generate', and BertModel makes vectors or scores"),
    ("Qwen3ForCausalLM", {}, {"normalize": True}, "normalize is set, and this model generates"),
    ("BertForSequenceClassification", {"id2label": {"a": "b"}}, {}, "id2label"),
    ("BertForSequenceClassification", {"id2label": {"1": "b"}}, {}, r"the keys \[1\]; expected 0, 1"),
    ("BertForSequenceClassification", {"num_labels": 0}, {}, "num_labels 0; expected a number from 1"),
    ("BertForSequenceClassification", {"num_labels": 1, "sbert_ce_default_activation_function": "my.Own"}, {}, "activation 'own'"),
])  # fmt: skip
def test_refusals_name_the_field(architecture, hf, settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(architecture, hf=hf, **settings)


@pytest.mark.parametrize("settings, message", [
    ({"runner": "embed"}, "runner is 'embed'; use one of auto, generate, pooling"),
    ({"pooling_type": "max"}, "pooling_type is 'max'; use one of last, mean, cls"),
    ({"matryoshka_dimensions": [0]}, "matryoshka_dimensions is"),
])  # fmt: skip
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(**settings)

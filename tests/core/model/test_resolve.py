"""From a name to a ResolvedModel: what is found where, what wins, and what an operator is told."""

import json

import msgspec
import pytest

from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.errors import ConfigError
from pelton.hookspecs import hookimpl
from pelton.model.resolve import context_length, merge, resolve_model, text_config
from pelton.testing.plugins import plugins_of
from pelton_platforms.cpu import plugin as cpu
from pelton_plugins.loaders import plugin as loaders
from pelton_plugins.sources import plugin as sources

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
PLUGINS = plugins_of(cpu, sources, loaders)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "config.json", CONFIG)
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def resolve(folder, **settings):
    return resolve_model(EngineConfig.from_flat(model=str(folder), **settings), PLUGINS)


def test_a_folder_is_described_in_full(folder):
    model = resolve(folder)
    assert model.path == model.tokenizer_path == str(folder)
    assert (model.weights_format, model.architecture, model.dtype) == ("safetensors", "LlamaForCausalLM", "float32")
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (512, 320, [2])
    assert model.hf_config == CONFIG
    assert model.generation_config == {} and model.notes == []


@pytest.mark.parametrize(
    "fields, setting, expected",
    [
        pytest.param({"torch_dtype": "float16"}, "auto", "float16", id="checkpoint"),
        pytest.param({"torch_dtype": None, "dtype": "bfloat16"}, "auto", "bfloat16", id="newer-field"),
        pytest.param({"torch_dtype": "torch.float16"}, "auto", "float16", id="prefixed"),
        pytest.param({"torch_dtype": "float16"}, "float32", "float32", id="setting-wins"),
    ],
)
def test_dtype(folder, fields, setting, expected):
    write(folder, "config.json", CONFIG | fields)
    assert resolve(folder, dtype=setting).dtype == expected


@pytest.mark.parametrize("stated, num_notes", [(None, 0), ("float8_e4m3fn", 1)])
def test_a_checkpoint_without_a_compute_dtype_takes_the_platforms(folder, stated, num_notes):
    write(folder, "config.json", CONFIG | {"torch_dtype": stated})
    model = resolve(folder, device="cpu")
    assert model.dtype in ("bfloat16", "float32")
    assert len(model.notes) == num_notes


@pytest.mark.parametrize(
    "fields, expected",
    [
        pytest.param({}, 512, id="plain"),
        pytest.param({"max_position_embeddings": None, "n_positions": 64}, 64, id="other-name"),
        pytest.param({"seq_length": 100}, 100, id="smallest"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1024, id="linear"),
        pytest.param({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, 2048, id="dynamic"),
        pytest.param(
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
            1024,
            id="yarn",
        ),
        pytest.param({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048, id="yarn-without-original"),
        pytest.param(
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}},
            512,
            id="llama3",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 1024, id="rope-parameters"
        ),
        pytest.param(
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}},
            },
            512,
            id="gemma3-states-the-stretched-length",
        ),
        pytest.param({"max_position_embeddings": None}, None, id="not-stated"),
    ],
)
def test_context_length_follows_config_and_rope_scaling(fields, expected):
    assert context_length(CONFIG | fields) == expected


@pytest.mark.parametrize("factor", [0, -1, "4", None, float("nan")])
def test_a_senseless_rope_factor_is_refused(factor):
    with pytest.raises(ConfigError, match=r"factor"):
        context_length(CONFIG | {"rope_scaling": {"rope_type": "linear", "factor": factor}})


def test_a_larger_max_model_len_is_refused_with_both_numbers(folder):
    assert resolve(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match=r"max_model_len is 513.*512"):
        resolve(folder, max_model_len=513)
    longer = resolve(folder, max_model_len=1000, hf_overrides={"max_position_embeddings": 1000})
    assert longer.max_model_len == 1000


def test_an_unstated_context_length_is_noted(folder):
    write(folder, "config.json", CONFIG | {"max_position_embeddings": None})
    model = resolve(folder)
    assert model.max_model_len == 2048 and "context length" in model.notes[0]
    assert resolve(folder, max_model_len=9000).max_model_len == 9000


@pytest.mark.parametrize(
    "config_ids, generation_ids, expected",
    [(2, None, [2]), ([2, 3], 3, [2, 3]), (2, [5, 2, 7], [2, 5, 7]), (None, 4, [4]), (None, None, []), (-1, True, [])],
)
def test_end_tokens_come_from_both_files(folder, config_ids, generation_ids, expected):
    write(folder, "config.json", CONFIG | {"eos_token_id": config_ids})
    write(folder, "generation_config.json", {"eos_token_id": generation_ids})
    assert resolve(folder).eos_token_ids == expected
    assert resolve(folder, generation_config="pelton").eos_token_ids == expected  # end tokens are no sampling default


def test_an_override_of_the_end_tokens_is_the_whole_truth(folder):
    write(folder, "generation_config.json", {"eos_token_id": [2, 7]})
    assert resolve(folder, hf_overrides={"eos_token_id": 9}).eos_token_ids == [9]
    assert resolve(folder, hf_overrides={"eos_token_id": None}).eos_token_ids == []


@pytest.mark.parametrize("where, expected", [("auto", 0.6), ("pelton", None), ("vllm", None), ("other", 0.1)])
def test_sampling_defaults_come_from_where_the_setting_says(folder, where, expected):
    write(folder, "generation_config.json", {"temperature": 0.6, "do_sample": True, "max_new_tokens": 9, "top_k": None})
    (folder / "other").mkdir()
    write(folder / "other", "generation_config.json", {"temperature": 0.1})
    model = resolve(folder, generation_config=str(folder / where) if where == "other" else where)
    assert model.generation_config.get("temperature") == expected
    if where == "auto":
        assert model.generation_config == {"temperature": 0.6, "max_tokens": 9}


def test_overrides_of_sampling_defaults_win_and_are_checked(folder):
    write(folder, "generation_config.json", {"temperature": 0.6, "top_p": 0.9})
    model = resolve(folder, override_generation_config={"temperature": 0.2, "max_new_tokens": 5})
    assert model.generation_config == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 5}
    with pytest.raises(ConfigError, match=r"'temprature'"):
        resolve(folder, override_generation_config={"temprature": 0.2})
    with pytest.raises(ConfigError, match=r"no .*nowhere"):
        resolve(folder, generation_config=str(folder / "nowhere"))


def test_the_text_part_of_a_multimodal_config_is_taken():
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "vision_config": {"hidden_size": 9},
        "text_config": {
            "hidden_size": 64,
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    }
    text = text_config(raw, {"hidden_size": 32, "text_config": {"rope_scaling": {"factor": 2.0}}})
    assert text["architectures"] == ["Gemma3ForConditionalGeneration"] and text["eos_token_id"] == [1, 106]
    assert text["model_type"] == "gemma3_text" and "vision_config" not in text and "text_config" not in text
    assert text["hidden_size"] == 32
    assert text["rope_scaling"] == {"factor": 2.0, "rope_type": "linear"}
    assert raw["text_config"]["hidden_size"] == 64


def test_the_config_as_it_is_stays_at_hand_for_the_parts_of_other_kinds(folder):
    write(
        folder,
        "config.json",
        {"architectures": CONFIG["architectures"], "vision_config": {"hidden_size": 9}, "text_config": CONFIG},
    )
    raw = resolve(folder, hf_overrides={"vision_config": {"depth": 2}}).raw_config
    assert raw["vision_config"] == {"hidden_size": 9, "depth": 2}
    model = resolve(folder)
    assert "vision_config" not in model.hf_config and model.hf_config["vocab_size"] == 320
    assert model.raw_config["vision_config"] == {"hidden_size": 9}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=type(model)) == model


def test_merging_goes_into_mappings_and_replaces_all_else():
    assert merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2], "e": 4}) == {
        "a": {"b": 3, "c": 2}, "d": [2], "e": 4,
    }  # fmt: skip


def test_dummy_weights_need_only_the_config(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors.*--load-format dummy"):
        resolve(folder)
    assert resolve(folder, load_format="dummy").weights_format == "dummy"


def test_pickled_weights_are_refused_by_name(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin.*does not read"):
        resolve(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param({"architectures": None}, "names no architecture", id="architecture"),
        pytest.param({"vocab_size": "many"}, "vocab_size 'many'", id="vocab-size"),
    ],
)
def test_a_config_that_lacks_what_is_needed_says_so(folder, change, message):
    write(folder, "config.json", CONFIG | change)
    with pytest.raises(ConfigError, match=message):
        resolve(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": NaN,', "\ufeff"])
def test_a_broken_config_is_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(folder)


def test_a_folder_without_config_and_an_unknown_name_say_what_was_tried(tmp_path):
    (tmp_path / "readme").touch()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(tmp_path)
    with pytest.raises(ConfigError, match=r"'smolm'.*local \(.*smollm2 \(.*hub \("):
        resolve("smolm")


def test_another_tokenizer_and_none(folder, tmp_path):
    other = tmp_path / "tok"
    other.mkdir()
    assert resolve(folder, tokenizer=str(other)).tokenizer_path == str(other)
    assert resolve(folder, skip_tokenizer_init=True).tokenizer_path is None


def test_a_plugins_source_is_asked_by_priority_and_told_what_is_needed(folder):
    asked = []

    class Source:
        PELTON_API = ">=1,<2"

        @hookimpl
        def pelton_model_sources(self):
            return [
                Entry(name="mine", load="pelton.testing.no_such:x", priority=99),
                Entry(name="late", load="x:y", priority=1),
            ]

    def find(request):
        asked.append(request)
        return str(folder) if request.name == "house-model" else None

    plugins = plugins_of(cpu, sources, loaders, Source())
    entry = next(entry for entry in plugins.entries("pelton_model_sources") if entry.name == "mine")
    assert plugins.entries("pelton_model_sources")[0] == entry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Entry, "resolve", lambda self: find)
        from pelton.model.resolve import locate

        config = EngineConfig.from_flat(model="house-model", revision="v1", download_dir="/d", load_format="dummy")
        assert locate("house-model", config, plugins, needs_weights=False) == folder
    assert asked[0].config is config  # where its own settings are
    assert (asked[0].name, asked[0].revision, asked[0].download_dir, asked[0].needs_weights) == (
        "house-model",
        "v1",
        "/d",
        False,
    )


@pytest.mark.parametrize(
    "field, value, what",
    [
        ("num_hidden_layers", "a", "integer"),
        ("num_key_value_heads", 0, "integer"),
        ("hidden_size", 64.0, "integer"),
        ("head_dim", -8, "integer"),
        ("num_attention_heads", True, "integer"),
        ("rms_norm_eps", "a", "number"),
        ("rope_theta", 0, "number"),
    ],
)
def test_a_number_that_cannot_be_is_named_with_its_value(folder, field, value, what):
    with pytest.raises(ConfigError, match=f"has {field} {value!r}; expected a positive {what}"):
        resolve(folder, hf_overrides={field: value})


@pytest.mark.parametrize("value", [None, [2, 4]])
def test_a_number_may_be_left_to_the_model(folder, value):
    assert resolve(folder, hf_overrides={"num_key_value_heads": value}).hf_config["num_key_value_heads"] == value


class Named:
    PELTON_API = ">=1,<2"
    __name__ = "stranger"

    @hookimpl
    def pelton_model_sources(self):
        return [Entry(name="shelf", load="json:loads", priority=1)]


def test_settings_of_a_plugin_that_is_not_there_are_refused(folder):
    plugins = plugins_of(cpu, sources, loaders, Named())

    def resolve_with(name):
        config = EngineConfig.from_flat(model=str(folder), plugin_config={"stranger": {}, name: {"x": 1}})
        return resolve_model(config, plugins)

    assert resolve_with("shelf").vocab_size == 320, "an entry's name"
    assert resolve_with("cpu").vocab_size == 320, "a platform's"
    with pytest.raises(ConfigError, match=r"plugin_config has 'strangr', and no .* Did you mean 'stranger'\?"):
        resolve_with("strangr")
    with pytest.raises(ConfigError, match=r"plugin_config has 'nosuch', and no loaded plugin is called that\. Is its"):
        resolve_with("nosuch")

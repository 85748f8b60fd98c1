"""Config, weights and tokenizer of GGUF files."""

import gguf
import numpy as np
import pytest
import torch

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.resolve import load_tokenizer, resolve_model
from pelton.model.source import SourceRequest
from pelton.testing.plugins import plugins_of
from pelton_plugins.loaders import plugin as loaders
from pelton_plugins.loaders.gguf.config import hf_config
from pelton_plugins.loaders.gguf.dequantize import dequantize
from pelton_plugins.loaders.gguf.file import QUANT_TYPES, GGUFFile
from pelton_plugins.loaders.gguf.loader import GGUFLoader
from pelton_plugins.loaders.gguf.names import hf_name
from pelton_plugins.loaders.gguf.tokenizer import PRE_TOKENIZERS, load_gguf_tokenizer
from pelton_plugins.sources import plugin as sources
from pelton_plugins.sources.demo import resolve

PLUGINS = plugins_of(loaders, sources)
QUANT = {quant.name: quant for quant in QUANT_TYPES.values()}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 64, 4, 2, 16, 96, 40, 2


def tiny_shapes(arch):
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate_proj.weight": (MLP, HIDDEN),
            prefix + "mlp.up_proj.weight": (MLP, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, MLP),
        }
        if arch == "qwen2":
            shapes |= {prefix + f"self_attn.{part}_proj.bias": (heads * HEAD_DIM,)
                       for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}  # fmt: skip
        if arch == "qwen3":
            shapes |= {prefix + f"self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    return shapes


def write_model(path, arch="llama", *, drop=(), extra=(), skip=(), **metadata):
    """A GGUF file made as llama.cpp's converter makes it; returns the weights under their Hugging Face names."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in tiny_shapes(arch).items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], LAYERS)
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": MLP,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.freq_base": 50_000.0,
        "attention.layer_norm_rms_epsilon": 1e-6, **metadata,
    }  # fmt: skip
    for key, value in fields.items():
        if key not in skip:
            kind = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            kind[type(value)](f"{arch}.{key}", value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for name, tensor in weights.items():
        stem, _, suffix = name.rpartition(".")
        ggml_name = names.get_name(stem) + "." + suffix
        if ggml_name in drop:
            continue
        data = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = HEADS if "q_proj" in name else KV_HEADS
            data = data.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(ggml_name, np.ascontiguousarray(data))
    for name, data in extra:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def loader_of(path):
    config = EngineConfig.from_flat(model=str(path), skip_tokenizer_init=True)
    return GGUFLoader(config, resolve_model(config, PLUGINS))


# -- weights


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_weights_come_under_hugging_face_names_in_their_order_of_rows(tmp_path, arch):
    weights = write_model(tmp_path / "m.gguf", arch)
    found = {name: (weight.shape, weight.read()) for name, weight in loader_of(tmp_path / "m.gguf").weights()}
    assert found.keys() == weights.keys()
    for name, (shape, tensor) in found.items():
        assert torch.equal(tensor, weights[name]) and shape == tuple(weights[name].shape)


def test_slices_of_reordered_rows_are_those_of_the_whole(tmp_path):
    weights = write_model(tmp_path / "m.gguf")
    lazy = dict(loader_of(tmp_path / "m.gguf").weights())
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(lazy[name].read(0, 16, 48), weights[name][16:48])
    assert torch.equal(lazy[name].read(0, 60), weights[name][60:])
    assert torch.equal(lazy[name].read(1, 3, 9), weights[name][:, 3:9])
    assert torch.equal(lazy["model.norm.weight"].read(0, 5, 7), weights["model.norm.weight"][5:7])


@pytest.mark.parametrize("kind", sorted(QUANT.keys() - {"F32", "F16", "BF16"}))
def test_dequantizing_equals_the_gguf_package(kind):
    quant, rng = QUANT[kind], np.random.default_rng(0)
    rows = rng.integers(0, 256, (37, 3 * quant.block_bytes * (256 // quant.block_size)), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random bytes: some scales are NaN or infinite
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
        found = dequantize(rows, quant)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_each_kind_is_read_from_a_file(tmp_path, kind):
    values = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    data = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("output.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from pelton_plugins.loaders.gguf.loader import GGUFWeight

    file = GGUFFile(tmp_path / "q.gguf")
    weight = GGUFWeight(file, file.tensors["output.weight"])
    expected = torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]), dtype=np.float32))
    assert weight.shape == (48, 64)
    assert torch.equal(weight.read().float(), expected)
    assert torch.equal(weight.read(0, 5, 17).float(), expected[5:17])
    assert torch.equal(weight.read(1, 7, 40).float(), expected[:, 7:40])
    assert weight.read().dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)


def test_unknown_tensors_are_named():
    with pytest.raises(ConfigError, match=r"blk.0.ssm_in.weight"):
        hf_name("blk.0.ssm_in.weight")


def test_rows_that_heads_cannot_share_are_refused(tmp_path):
    write_model(tmp_path / "m.gguf", **{"attention.head_count": 3, "attention.key_length": 16})
    with pytest.raises(ConfigError, match=r"attn_q.weight has 64 rows, which 3 heads"):
        list(loader_of(tmp_path / "m.gguf").weights())


# -- config


@pytest.mark.parametrize(
    "arch, architecture", [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_config_from_metadata(tmp_path, arch, architecture):
    write_model(tmp_path / "m.gguf", arch)
    config = hf_config(GGUFFile(tmp_path / "m.gguf"))
    assert config["architectures"] == [architecture]
    expected = {
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-6, "rope_theta": 50_000.0,
        "max_position_embeddings": 128, "vocab_size": VOCAB, "tie_word_embeddings": True, "eos_token_id": 2,
        "rope_scaling": None, "attention_bias": arch == "qwen2",
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def test_an_output_tensor_unties_the_embeddings(tmp_path):
    write_model(tmp_path / "m.gguf", extra=[("output.weight", np.zeros((VOCAB, HIDDEN), np.float32))])
    assert hf_config(GGUFFile(tmp_path / "m.gguf"))["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_taken_over(tmp_path, kind):
    write_model(tmp_path / "m.gguf", **{
        "rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64})  # fmt: skip
    scaling = hf_config(GGUFFile(tmp_path / "m.gguf"))["rope_scaling"]
    assert scaling == {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}


def llama3_divisors(factor=32.0, context=8192, theta=50_000.0):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=HEAD_DIM, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    return (plain / scaled).numpy()


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path):
    write_model(tmp_path / "m.gguf", extra=[("rope_freqs.weight", llama3_divisors())])
    scaling = hf_config(GGUFFile(tmp_path / "m.gguf"))["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert "rope_freqs" not in str([name for name, _ in loader_of(tmp_path / "m.gguf").weights()])


def test_other_divisors_are_refused(tmp_path):
    write_model(tmp_path / "m.gguf", extra=[("rope_freqs.weight", llama3_divisors(context=512))])
    with pytest.raises(ConfigError, match=r"rope_freqs.weight is not Llama 3's"):
        hf_config(GGUFFile(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    "options, message",
    [
        pytest.param({"skip": ["block_count"]}, r"llama.block_count is None", id="missing"),
        pytest.param({"attention.head_count": 0}, r"head_count is 0", id="zero"),
        pytest.param({"attention.head_count_kv": [1, 2]}, r"head_count_kv is \[1, 2\]", id="per-layer"),
        pytest.param({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan", id="nan"),
        pytest.param({"drop": ["token_embd.weight"]}, "no tensor 'token_embd.weight'", id="no-embedding"),
        pytest.param({"rope.scaling.type": "longrope"}, "'longrope'", id="scaling"),
    ],
)
def test_metadata_that_does_not_do_is_named(tmp_path, options, message):
    write_model(tmp_path / "m.gguf", **options)
    with pytest.raises(ConfigError, match=message):
        hf_config(GGUFFile(tmp_path / "m.gguf"))


def test_another_architecture_lists_what_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'mamba'; llama, qwen2, qwen3"):
        hf_config(GGUFFile(tmp_path / "m.gguf"))


# -- the demo model


@pytest.fixture(scope="module")
def demo():
    return GGUFFile(resolve(SourceRequest(name="smollm2")))


@pytest.fixture(scope="module")
def tokenizer(demo):
    return load_gguf_tokenizer(demo)


def test_the_demo_model_resolves_by_name():
    config = EngineConfig.from_flat(model="smollm2")
    model = resolve_model(config, PLUGINS)
    assert (model.weights_format, model.architecture, model.dtype) == ("gguf", "LlamaForCausalLM", "bfloat16")
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (8192, 49152, [2])
    assert (model.hf_config["rms_norm_eps"], model.hf_config["rope_theta"]) == (1e-5, 100_000.0)
    assert model.hf_config["tie_word_embeddings"] is True
    found = load_tokenizer(config, model, PLUGINS)
    assert found.vocab_size == 49152
    without = EngineConfig.from_flat(model="smollm2", skip_tokenizer_init=True)
    assert load_tokenizer(without, resolve_model(without, PLUGINS), PLUGINS) is None
    other = EngineConfig.from_flat(model="smollm2", chat_template="{{ messages[0].content }}!")
    assert load_tokenizer(other, model, PLUGINS).apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_the_demo_models_special_tokens(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, *tokenizer.encode("user"), 2]
    assert tokenizer.special_token_ids == set(range(17))
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("text, pieces", [
    ("12345", ["1", "2", "3", "4", "5"]),
    ("a 12", ["a", " ", "1", "2"]),
    ("x   7", ["x", "   ", "7"]),  # without the Digits step: two spaces, then a space with the digit
    ("Hello world", ["Hello", " world"]),
])  # fmt: skip
def test_digits_stand_alone_and_spaces_before_them_stay_together(tokenizer, text, pieces):
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize("text", ["日本語 👩‍👩‍👧‍👦 café", "tabs\tand\r\nlines  ", " leading", "mixed 3.14 x2", "नमस्ते"])
def test_texts_come_back_as_they_were(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_demo_models_chat_template(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_ids_equal_llama_cpps(demo, tokenizer):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(demo.path), vocab_only=True, verbose=False)
    for text in ("Hello, world! 12345", "x   7  y", "日本語 👍🏽 café", "def f(x):\n    return x**2"):
        assert tokenizer.encode(text) == model.tokenize(text.encode(), add_bos=False, special=True)


# -- tokenizers of other models


def write_tokenizer(path, tokens, **fields):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    for key, value in fields.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}[
            type(value)
        ]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)


def byte_tokens():
    from pelton_plugins.loaders.text.tokenizer import BYTE_OF_CHARACTER

    return sorted(BYTE_OF_CHARACTER)


@pytest.mark.parametrize("pre, text, words", [
    ("llama-bpe", "it's 12345", ["it", "'s", " ", "123", "45"]),
    ("qwen2", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
    ("gpt-2", "it's 123", ["it", "'s", " 123"]),
    ("smollm", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
])  # fmt: skip
def test_each_pre_tokenizer_splits_words_its_way(pre, text, words):
    found = [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str(text)]
    assert [piece.replace("Ġ", " ") for piece in found] == words


@pytest.mark.parametrize("pre, says, expected", [
    ("llama-bpe", None, [256]), ("llama-bpe", False, []), ("gpt-2", None, []), ("gpt-2", True, [256]),
])  # fmt: skip
def test_bos_is_added_where_the_file_or_the_kind_says_so(tmp_path, pre, says, expected):
    fields = {"model": "gpt2", "pre": pre, "merges": ["a b"], "bos_token_id": 256, "eos_token_id": 257}
    fields |= {"token_type": [1] * 256 + [3, 3, 1]} | ({} if says is None else {"add_bos_token": says})
    file = write_tokenizer(tmp_path / "t.gguf", [*byte_tokens(), "<s>", "</s>", "ab"], **fields)
    tokenizer = load_gguf_tokenizer(file)
    assert tokenizer.encode("ab") == [*expected, 258]
    assert tokenizer.encode("ab", add_special_tokens=False) == [258]


def test_sentencepiece_joins_by_score(tmp_path):
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abc",
        "ab",
        "bc",
        "▁a",
        "▁abc",
        "abc",
    ]
    scores = [0.0] * 259 + [-10.0] * 4 + [-3.0, -1.0, -2.0, -4.0, -5.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 9
    fields = {
        "model": "llama",
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    tokenizer = load_gguf_tokenizer(write_tokenizer(tmp_path / "t.gguf", tokens, **fields))
    # "bc" has the best score, then "▁a"; "▁abc" is then no pair of tokens that merges know, but ▁a + bc is.
    assert [tokens[i] for i in tokenizer.encode("abc")] == ["<s>", "▁abc"]
    assert [tokens[i] for i in tokenizer.encode("ab", add_special_tokens=False)] == ["▁a", "b"]
    assert tokenizer.encode("é", add_special_tokens=False) == [259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3" and tokenizer.token_bytes(tokens.index("▁a")) == b" a"
    for text in ("abc", "a  é 日", " abc"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "tokens, fields, message",
    [
        pytest.param([], {"model": "gpt2"}, "no tokenizer.*--tokenizer.*--skip-tokenizer-init", id="none"),
        pytest.param(["a"], {"model": "bert"}, "kind 'bert'", id="kind"),
        pytest.param(["a"], {"model": "gpt2", "pre": "tekken"}, "pre-tokenizer 'tekken'", id="pre"),
        pytest.param(["a", "b"], {"model": "gpt2", "merges": ["a c"]}, "do not fit together", id="merge-of-unknown"),
        pytest.param(["a", "b"], {"model": "gpt2", "merges": ["ab"]}, "not a pair", id="merge-of-one"),
        pytest.param(["a"], {"model": "gpt2", "eos_token_id": 9}, "eos_token is 9", id="eos"),
        pytest.param(["a"], {"model": "gpt2", "token_type": [1, 1]}, "type for each", id="types"),
        pytest.param(["a"], {"model": "llama"}, "no score for each", id="scores"),
    ],
)
def test_a_tokenizer_that_does_not_do_is_one_clear_error(tmp_path, tokens, fields, message):
    file = write_tokenizer(tmp_path / "t.gguf", tokens, **fields)
    with pytest.raises(ConfigError, match=message):
        load_gguf_tokenizer(file)

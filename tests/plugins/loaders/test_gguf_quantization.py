"""`--quantization gguf`: a file's blocks stay packed, in Hugging Face's order of rows, and mean what they meant."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pelton import LLM, LoRARequest, SamplingParams
from pelton.builtin import pelton_fused_ops
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.build import make_build_config
from pelton.model.resolve import resolve_model
from pelton.ops.packed_blocks import KINDS, dequantize, panels_shape
from pelton.ops.selector import OpSelector
from pelton.plugins import load_plugins
from pelton.quantization.interface import LinearShard
from pelton.testing.model_driver import ModelDriver, TensorWeight
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.loaders.gguf.blocks import KEPT_AS, read_kept
from pelton_plugins.loaders.gguf.file import QuantType
from pelton_plugins.weight_forms.block_writing import pack
from pelton_plugins.weight_forms.blocks import BlockWeights, split_blocks

HIDDEN, HEADS, KV_HEADS, MLP, VOCAB, LAYERS = 64, 4, 2, 96, 50, 2
PLUGINS = load_plugins(only=[])
PROMPT = [5, 9, 31, 44, 4, 18]
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP),
}  # fmt: skip


def write_model(path, kinds=None, *, default="Q4_1", output=None, embedding="Q8_0", arch="llama"):
    """kinds: layer tensor -> GGML type, where it is not `default`."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {"block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": MLP,
                       "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}.items():  # fmt: skip
        writer.add_uint32(f"{arch}.{key}", value)

    def add(name, shape, kind, scale=1.0):
        values = (rng.standard_normal(shape) * scale / shape[-1] ** 0.5).astype(np.float32)
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (VOCAB, HIDDEN), embedding, scale=8.0)
    if output is not None:
        add("output.weight", (VOCAB, HIDDEN), output, scale=8.0)
    norms, head_norms = ["output_norm"], []
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            add(f"blk.{layer}.{name}.weight", shape, (kinds or {}).get(name, default), scale=2.0)
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
        head_norms += [f"blk.{layer}.attn_{part}_norm" for part in "qk" if arch == "qwen3"]
    for size, names in ((HIDDEN, norms), (HIDDEN // HEADS, head_norms)):
        for name in names:
            writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build(path, **flat):
    config = EngineConfig.from_flat(model=str(path), skip_tokenizer_init=True, **flat)
    model = resolve_model(config, PLUGINS)
    made = make_build_config(
        config, model, PLUGINS, device=torch.device("cpu"), max_num_seqs=4, max_num_batched_tokens=64
    )
    return config, model, made.quantization


def logits(path, *, dtype=torch.float32, native=False, **flat):
    config, model, quantization = build(path, **flat)
    loader = PLUGINS.find("pelton_model_loaders", model.weights_format, setting="load_format").resolve()(config, model)
    entries = PLUGINS.entries("pelton_ops", device_type="cpu")
    ops = OpSelector([entry for entry in entries if native or entry.name.startswith("reference.")], pelton_fused_ops())
    driver = ModelDriver(
        hf_config=model.hf_config, weights=loader.weights(), plugins=PLUGINS, dtype=dtype, quantization=quantization,
        ops=ops,
    )  # fmt: skip
    return driver.step({"a": PROMPT})["a"], driver


@pytest.mark.parametrize(
    "file",
    [
        pytest.param({}, id="q4_1"),
        pytest.param({"default": "Q8_0"}, id="q8_0"),
        pytest.param({"default": "Q4_0", "output": "Q8_0", "embedding": "Q4_1"}, id="q4_0-own-head"),
        pytest.param({"kinds": {"attn_v": "Q8_0", "ffn_up": "Q4_0", "ffn_down": "Q8_0"}}, id="mixed-parts"),
        pytest.param({"embedding": "F16", "kinds": {"attn_output": "BF16"}}, id="plain-beside"),
        pytest.param({"arch": "qwen3"}, id="rows-in-order"),
    ],
)
def test_logits_equal_those_of_the_dequantized_file(tmp_path, file):
    path = write_model(tmp_path / "m.gguf", **file)
    wanted, plain = logits(path)
    found, driver = logits(path, quantization="gguf")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert any(p.dtype == torch.uint8 for p in driver.model.parameters())
    assert not any(p.dtype == torch.uint8 for p in plain.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_come_near_the_dequantized_file(tmp_path, dtype):
    """In float32 the kernels' rounding of inputs is seen, else bfloat16's own."""
    path = write_model(tmp_path / "m.gguf", {"attn_v": "Q8_0", "ffn_up": "Q4_0"})
    wanted, _ = logits(path)
    found, _ = logits(path, quantization="gguf", native=True, dtype=dtype)
    assert (found - wanted).norm() < {torch.float32: 5e-4, torch.bfloat16: 0.03}[dtype] * wanted.norm()


def test_adapters_add_to_the_blocks(tmp_path):
    """By the names of the checkpoint that the file was made from; the same adapter on the dequantized file says the same."""
    path, adapter, random = write_model(tmp_path / "m.gguf"), tmp_path / "adapter", torch.Generator().manual_seed(1)
    adapter.mkdir()
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    tensors = {
        f"base_model.model.model.layers.{layer}.{names[part]}.lora_{letter}.weight": torch.randn(shape, generator=random) * 0.2
        for layer in range(LAYERS) for part in names
        for letter, shape in (("A", (4, SHAPES[part][1])), ("B", (SHAPES[part][0], 4)))
    }  # fmt: skip
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "up_proj", "down_proj"],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    settings = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**22, "dtype": "float32"}

    def logprobs(**more):
        with LLM(model=str(path), enable_lora=True, skip_tokenizer_init=True, **settings, **more) as llm:
            requests = [None, LoRARequest("mine", 1, str(adapter))]
            outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, params, use_tqdm=False, lora_request=requests)
        return [
            torch.tensor([at[token].logprob for at, token in zip(one.prompt_logprobs[1:], PROMPT[1:], strict=True)])
            for one in outputs
        ]

    (base, adapted), (packed_base, packed_adapted) = logprobs(), logprobs(quantization="gguf")
    apart = (adapted - base).norm()
    assert apart > 1.0
    assert (packed_base - base).norm() < 0.01 * apart
    assert (packed_adapted - adapted).norm() < 0.01 * apart


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1"])
def test_blocks_of_other_kinds_are_kept_near_what_they_say(kind):
    """Of any bytes but for the numbers of a float16, which are those of a model."""
    rng = np.random.default_rng(7)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (6, 2 * num_bytes), dtype=np.uint8).reshape(6, 2, num_bytes)
    halves = {"Q6_K": [208], "Q5_0": [0]}.get(kind, [0, 2])
    for place in halves:
        raw[..., place : place + 2] = rng.uniform(1e-4, 2e-3, (6, 2, 1)).astype(np.float16).view(np.uint8)
    rows = raw.reshape(6, -1)
    want = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).copy())
    weight = RawRows(kind, torch.from_numpy(rows), want)
    kept = KINDS[KEPT_AS[kind]]
    panels = torch.zeros(panels_shape(kept, 6, 2 * size), dtype=torch.uint8)
    pack(read_kept(weight, 0, 6), kept, panels)
    got = dequantize(panels, kept, 6)
    error = (got - want).norm() / want.norm()
    assert error < {"Q4_K": 3e-4, "Q5_0": 1e-6}.get(kind, 5e-3)
    codes, scales, minima = split_blocks(read_kept(weight, 0, 6), kept)
    spread = [part.float().repeat_interleave(32, 1) for part in (scales, minima)]
    torch.testing.assert_close(codes * spread[0] + spread[1], got, rtol=1e-5, atol=1e-7)


class RawRows:
    def __init__(self, kind, rows, values):
        self.quant_type = QuantType(kind, 0, 0)
        self._rows, self._values = rows, values

    def blocks(self, start, stop):
        return self._rows[start:stop]

    def read(self, dim, start, stop):
        return self._values[start:stop]


def test_a_file_of_five_bits_is_served(tmp_path):
    path = write_model(tmp_path / "m.gguf", {"ffn_down": "Q5_0", "attn_v": "Q5_0"}, default="Q5_1")
    wanted, _ = logits(path)
    found, _ = logits(path, quantization="gguf")
    assert (found - wanted).norm() < 3e-2 * wanted.norm()  # as in bfloat16: 8 bits anew


def test_a_kind_that_stays_not_packed_is_named(tmp_path):
    path = write_model(tmp_path / "m.gguf")
    _, _, method = build(path, quantization="gguf")
    name = "model.layers.0.mlp.down_proj"
    method._tensors[f"{name}.weight"] = replace(
        method._tensors[f"{name}.weight"], quant_type=QuantType("Q2_K", 256, 84)
    )
    with pytest.raises(
        ConfigError, match=r"blk.0.ffn_down.weight in Q2_K; kept packed are Q8_0, Q4_0, .*Q6_K. .* q8_0"
    ):
        method.kind(LinearShard(name, HIDDEN, MLP, (0, HIDDEN), (0, MLP)), is_vocabulary=False)


@pytest.mark.parametrize(
    "file", [{}, {"kinds": {"attn_v": "Q8_0", "ffn_up": "Q4_0", "ffn_down": "Q5_0"}}, {"default": "Q4_0"}], ids=str
)
def test_groups_of_gpus_say_what_the_file_says(tmp_path, file, monkeypatch):
    monkeypatch.setattr(BlockWeights, "create", BlockWeights.create_groups)
    path = write_model(tmp_path / "m.gguf", **file)
    wanted, _ = logits(path)
    found, driver = logits(path, native=True, quantization="gguf")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    choices = driver.build.ops.choices
    formats = {choice.needs.linear.weight_format for choice in choices if choice.op == "linear"}
    assert formats == {"int4_minima", "int8_minima"}  # the vocabulary's matrix is in Q8_0
    assert {choice.needs.weight_format for choice in choices if choice.op == "embed"} == {"int8_minima"}


def test_a_part_that_is_not_quantized_is_named(tmp_path):
    path = write_model(tmp_path / "m.gguf", {"attn_v": "F16"})
    with pytest.raises(ConfigError, match=r"'gguf', and model.layers.0.self_attn.v_proj is not quantized"):
        logits(path, quantization="gguf")


def test_another_form_of_checkpoint_is_refused(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match=r"quantization is 'gguf', and the weights of .* are read as 'safetensors'"):
        build(path, quantization="gguf")


def test_weights_of_another_loader_are_refused(tmp_path):
    _, _, method = build(write_model(tmp_path / "m.gguf"), quantization="gguf")
    with pytest.raises(ConfigError, match="the loader 'gguf' gives a TensorWeight, which has no blocks"):
        method.read_blocks(TensorWeight(torch.zeros(2, 32)), KINDS["q8_0"], 0, 2)


def test_the_methods_are_offered_by_their_hook():
    names = {entry.name for entry in PLUGINS.entries("pelton_quantization_methods")}
    assert {"gguf", "q8_0", "q4_0", "q4_1"} <= names

"""Every tensor once, in file order, sliced, within memory; broken and missing files by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.resolved import ResolvedModel
from pelton_plugins.loaders.safetensors_loader import SafetensorsLoader

WEIGHTS = {
    "b": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "a": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "c": torch.arange(24, dtype=torch.float16).reshape(2, 3, 4),
}


def resolved(path):
    return ResolvedModel(
        name="m", path=str(path), weights_format="safetensors", hf_config={}, architecture="X", dtype="float32",
        max_model_len=8, vocab_size=8, eos_token_ids=[], generation_config={}, tokenizer_path=None,
    )  # fmt: skip


def load(path):
    return SafetensorsLoader(EngineConfig(), resolved(path))


def read_all(loader):
    return {name: weight.read().clone() for name, weight in loader.weights()}


def write_sharded(folder, shards):
    for file, weights in shards.items():
        save_file(weights, folder / file)
    weight_map = {name: file for file, weights in shards.items() for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SHARDS = {
    "model-00001-of-00002.safetensors": {name: WEIGHTS[name] for name in ("c", "b")},
    "model-00002-of-00002.safetensors": {name: WEIGHTS[name] for name in ("a", "scalar", "empty")},
}


@pytest.fixture(params=["single", "sharded", "other-name"])
def folder(request, tmp_path):
    if request.param == "sharded":
        write_sharded(tmp_path, SHARDS)
    else:
        save_file(WEIGHTS, tmp_path / ("model.safetensors" if request.param == "single" else "weights.safetensors"))
    return tmp_path


def test_reads_every_tensor_once_as_it_is(folder):
    loader = load(folder)
    found = [name for name, _ in loader.weights()]
    assert sorted(found) == sorted(WEIGHTS)
    for name, tensor in read_all(loader).items():
        assert tensor.dtype == WEIGHTS[name].dtype and torch.equal(tensor, WEIGHTS[name])
    assert loader.total_bytes == sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "name, dim, start, stop", [("b", 0, 1, 3), ("b", 1, 2, 6), ("c", 2, 1, 2), ("c", 1, 2, None), ("a", 0, 0, 0)]
)
def test_reads_a_slice_along_any_dimension(folder, name, dim, start, stop):
    weight = dict(load(folder).weights())[name]
    expected = WEIGHTS[name].narrow(dim, start, (WEIGHTS[name].shape[dim] if stop is None else stop) - start)
    assert torch.equal(weight.read(dim, start, stop), expected)
    assert weight.shape == tuple(WEIGHTS[name].shape)


def test_tensors_come_in_the_order_of_the_file(tmp_path):
    save_file({f"w{i}": torch.zeros(1 + i) for i in (3, 1, 2)}, tmp_path / "model.safetensors")
    offsets = json.loads((tmp_path / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    names = sorted((name for name in offsets if name != "__metadata__"), key=lambda name: offsets[name]["data_offsets"])
    assert [name for name, _ in load(tmp_path).weights()] == names


def test_files_beside_the_index_are_left_alone(tmp_path):
    write_sharded(tmp_path, SHARDS)
    save_file({"b": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert torch.equal(read_all(load(tmp_path))["b"], WEIGHTS["b"])


def test_a_missing_shard_is_named(tmp_path):
    write_sharded(tmp_path, SHARDS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors is missing \(1 of 2"):
        load(tmp_path)


def test_a_shard_without_what_the_index_promises_is_named(tmp_path):
    write_sharded(tmp_path, SHARDS)
    save_file({"a": WEIGHTS["a"]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors lacks 'empty' and 1 other"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "header-size", "header-json", "overlap"])
def test_a_broken_file_is_named(tmp_path, damage):
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file)
    data = file.read_bytes()
    header = {"x": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    file.write_bytes(
        {
            "truncated": data[:-8],
            "empty": b"",
            "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "header-size": b"\xff" * 8 + data[8:],
            "header-json": data[:8] + b"!" + data[9:],
            "overlap": len(text).to_bytes(8, "little") + text + b"\0" * 8,
        }[damage]
    )
    with pytest.raises(ConfigError, match=r"model.safetensors is not a valid safetensors file"):
        read_all(load(tmp_path))


@pytest.mark.parametrize(
    "index, message",
    [
        pytest.param({}, "no weight_map", id="no-map"),
        pytest.param({"weight_map": {"a": "../x.safetensors"}}, "beside it", id="outside"),
        pytest.param({"weight_map": {"a": "pytorch_model.bin"}}, "beside it", id="pickle"),
        pytest.param({"weight_map": {"a": 3}}, "beside it", id="number"),
    ],
)
def test_a_senseless_index_is_refused(tmp_path, index, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_several_files_without_an_index_and_none_at_all_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*.safetensors"):
        load(tmp_path)
    for name in ("x", "y"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"2 \*.safetensors files.*index"):
        load(tmp_path)


# VmHWM, not ru_maxrss: that one starts at the peak of the process which started this one.
MEASURE = r"""
import re, sys
import torch
from pelton.config import EngineConfig
from pelton.model.resolved import ResolvedModel
from pelton_plugins.loaders.safetensors_loader import SafetensorsLoader

def peak():
    return int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]) * 1024

model = ResolvedModel(name="m", path=sys.argv[1], weights_format="safetensors", hf_config={}, architecture="X",
                      dtype="bfloat16", max_model_len=8, vocab_size=8, eos_token_ids=[], generation_config={}, tokenizer_path=None)
loader = SafetensorsLoader(EngineConfig(), model)
base, kept = peak(), []
for _, weight in loader.weights():
    kept.append(torch.empty(weight.shape, dtype=torch.bfloat16).copy_(weight.read()))
print((peak() - base) / sum(tensor.nbytes for tensor in kept))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_stays_under_1_3_times_the_weights(tmp_path):
    """192 MiB of weights in two files, in a process of its own, which has no other peak. One whole file beside them is too much."""
    num_shards = 2
    names = [f"w{index:02d}" for index in range(24)]
    each = torch.ones(4096, 1024, dtype=torch.bfloat16)
    size = len(names) // num_shards
    write_sharded(
        tmp_path,
        {
            f"model-{shard}.safetensors": {name: each.clone() for name in names[shard * size : (shard + 1) * size]}
            for shard in range(num_shards)
        },
    )
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    ratio = float(done.stdout)
    assert 0.9 < ratio < 1.3


def test_what_is_filled_at_once_is_there(tmp_path):
    """`--quantization fp8` reads it on the spot."""
    weights = {f"t{index}": torch.randn(900, 700) for index in range(3)}
    save_file(weights, tmp_path / "model.safetensors")
    for name, weight in load(tmp_path).weights():
        target = torch.zeros(900, 700)
        assert weight.fill(target) and torch.equal(target, weights[name])
        half = torch.zeros(900, 350)
        assert weight.fill(half, 1, 350) and torch.equal(half, weights[name][:, 350:])

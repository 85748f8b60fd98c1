"""One file a rank: saved once, read whole at the next start; other sizes and other settings are refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pelton import LLM, SamplingParams
from pelton.errors import ConfigError
from pelton.parallel.context import ParallelContext
from pelton.testing.model_loader import WeightLoaderConformance
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.loaders.save_command import run
from pelton_plugins.loaders.sharded_state import ShardedStateLoader, joined

pytestmark = pytest.mark.usefixtures("forks")
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": list(range(20, 60))}]
SETTINGS = {"device": "cpu", "enforce_eager": True, "kv_cache_memory_bytes": 2**22, "disable_log_stats": True}


def ids(path, **settings):
    with LLM(str(path), **SETTINGS, **settings) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]


def save(path, output, *flags):
    size = ("--device", "cpu", "--kv-cache-memory-bytes", str(2**22))
    assert run([str(path), "--output", str(output), *size, *flags]) == 0
    return output


class TestConformance(WeightLoaderConformance):
    loader_class = ShardedStateLoader

    def write(self, folder, weights):
        said = {"slices": {}, "world": [1, 1]}
        save_file(weights, folder / "model-rank-0-part-0.safetensors", {"pelton_sharded_state": json.dumps(said)})
        return folder

    def make(self, path):
        loader = super().make(path)
        loader.parallel = ParallelContext()
        return loader


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_two_ranks_read_their_own_files_alone(tmp_path, family, capsys):
    path = make_tiny_checkpoint(tmp_path / "whole", family)
    expected = ids(path)
    output = save(path, tmp_path / "ranks", "-tp", "2", "--max-file-bytes", "200000")
    assert "files," in capsys.readouterr().out
    files = sorted(file.name for file in output.glob("*.safetensors"))
    assert {f"model-rank-{one}.safetensors" for one in ("0-part-0", "0-part-1", "1-part-0")} <= set(files)
    assert not (output / "model.safetensors").exists() and (output / "tokenizer.json").is_file()
    assert all(not name.endswith("o_proj.weight") for file in files for name in load_file(output / file))
    assert ids(output, tensor_parallel_size=2) == expected, "the form is found by its files"
    with pytest.raises(
        ConfigError, match=r"saved with tensor_parallel_size 2, and this is tensor_parallel_size 1\. Use"
    ):
        ids(output)
    for context, message in ((ParallelContext(2, 4), "no state of rank 2 of tensor_parallel_size 4"),
                             (ParallelContext(1, 4), "saved with tensor_parallel_size 2, and this is tensor_parallel_size 4")):  # fmt: skip
        loader = WeightLoaderConformance.make(TestConformance(), output)
        loader.parallel = context
        with pytest.raises(ConfigError, match=message):
            list(loader.weights())


def test_packed_weights_are_packed_from_it(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "whole", "llama")
    output = save(path, tmp_path / "one", "--quantization", "q8_0")
    assert ids(output, quantization="q8_0") == ids(path, quantization="q8_0")
    assert ids(output, load_format="sharded_state") == ids(path)


def test_what_does_not_fit_is_refused(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "whole", "llama")
    with pytest.raises(ConfigError, match="There is no --output"):
        run([str(path)])
    with pytest.raises(ConfigError, match=r"--output is .*whole, which is not an empty folder"):
        run([str(path), "--output", str(path)])
    with pytest.raises(ConfigError, match=r"pattern is 'x', it needs \{rank\} and \{part\}"):
        save(path, tmp_path / "x", "--pattern", "x")
    with pytest.raises(ConfigError, match=r"rank-0-part-0.safetensors is missing: the folder has no state of rank 0"):
        ids(path, load_format="sharded_state")
    (path / "model.safetensors").rename(path / "model-rank-0-part-0.safetensors")
    with pytest.raises(ConfigError, match="not of pelton save-sharded-state"):
        ids(path)


def test_a_slice_that_was_not_saved_is_named(tmp_path):
    slices = {"a[0,2:4]": {"name": "a", "shape": [6, 3], "dim": 0, "start": 2}}
    said = json.dumps({"slices": slices, "world": [1, 1]})
    save_file(
        {"a[0,2:4]": torch.arange(6).view(2, 3)},
        tmp_path / "model-rank-0-part-0.safetensors",
        {"pelton_sharded_state": said},
    )
    loader = TestConformance().make(tmp_path)
    ((name, weight),) = loader.weights()
    assert (name, weight.shape, weight.read(0, 3, 4).tolist()) == ("a", (6, 3), [[3, 4, 5]])
    for wanted, said in ((weight.read, "all of it"), (lambda: weight.read(0, 1, 3), r"\[1, 3\) along 0")):
        with pytest.raises(ConfigError, match=rf"has \[2, 4\) along 0 of a, and {said} is asked for"):
            wanted()


def test_slices_are_joined():
    assert joined({(0, 0, 2), (0, 2, 4), (0, 6, 8)}) == [(0, 0, 4), (0, 6, 8)]
    assert joined({(0, 0, 2), (1, 0, 2)}) == joined({(0, 0, 2), (None, 0, 0)}) == [(None, 0, 0)]

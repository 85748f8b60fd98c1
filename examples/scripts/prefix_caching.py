"""Many questions about one long text: its blocks are computed once and found by every later prompt.

python examples/scripts/prefix_caching.py [MODEL]
"""

import sys
import time

from pelton import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
text = "The harbour master writes down every ship: her name, her cargo, and the hour she came in. " * 12
questions = ["Who writes?", "What is written down?", "When did the ship come in?"]
params = SamplingParams(temperature=0.0, max_tokens=8)

with LLM(model=model, max_model_len=1024, max_num_seqs=4) as llm:
    for question in questions:
        start = time.perf_counter()
        output = llm.generate(f"{text}\n{question}", params, use_tqdm=False)[0]
        seconds = time.perf_counter() - start
        num_tokens = len(output.prompt_token_ids)
        print(f"{question}: {output.num_cached_tokens} of {num_tokens} prompt tokens were cached, {seconds:.2f} s")

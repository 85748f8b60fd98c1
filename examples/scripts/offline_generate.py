"""Complete a few prompts in this process.

python examples/scripts/offline_generate.py [MODEL]
"""

import sys

from pelton import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
prompts = ["The capital of France is", "Water boils at", "Once upon a time"]

with LLM(model=model, max_model_len=512, max_num_seqs=4) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16)):
        completion = output.outputs[0]
        print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")

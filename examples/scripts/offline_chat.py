"""Ask a question, then another about the answer: the second prompt's beginning comes from the prefix cache.

python examples/scripts/offline_chat.py [MODEL]
"""

import sys

from pelton import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
questions = ["What is the capital of France? Answer in one sentence.", "And of Italy?"]
params = SamplingParams(temperature=0.0, max_tokens=32)

with LLM(model=model, max_model_len=512, max_num_seqs=4) as llm:
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        output = llm.chat(messages, params, use_tqdm=False)[0]
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"user: {question}\nassistant: {answer}")
        print(f"({len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them from the cache)")

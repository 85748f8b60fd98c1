"""Drive the engine step by step: requests join and leave while others run.

python examples/scripts/llm_engine_loop.py [MODEL]
"""

import sys

from pelton import EngineConfig, LLMEngine, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
engine = LLMEngine(EngineConfig.from_flat(model=model, max_model_len=512, max_num_seqs=4))
params = SamplingParams(temperature=0.0, max_tokens=12)

engine.add_request("first", "The first request", params)
num_steps = 0
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            print(f"step {num_steps}: {output.request_id} is done: {output.outputs[0].text!r}")
    num_steps += 1
    if num_steps == 4:
        engine.add_request("second", "The second request, in mid-run", params)
        engine.add_request("third", "The third request", params)
    if num_steps == 6:
        engine.abort_request("third")
engine.shutdown()

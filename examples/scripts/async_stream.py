"""Stream two answers at once with `AsyncLLM`; the engine runs in a process of its own.

python examples/scripts/async_stream.py [MODEL]
"""

import asyncio
import sys

from pelton import AsyncLLM, EngineConfig, SamplingParams
from pelton.sampling_params import RequestOutputKind


async def stream(llm: AsyncLLM, prompt: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate(prompt, params):
        completion = output.outputs[0]
        end = f" [{completion.finish_reason}]" if output.finished else ""
        print(f"{prompt!r}: {completion.text!r}{end}", flush=True)


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    async with AsyncLLM(EngineConfig.from_flat(model=model, max_model_len=512, max_num_seqs=4)) as llm:
        await asyncio.gather(stream(llm, "The sky is"), stream(llm, "Bread is made of"))


asyncio.run(main())

"""The simplest server around `AsyncLLM`: POST /generate with a prompt, one JSON object or a line for each piece of text.

For what clients expect of a server use `pelton serve`; this shows what an application of one's own needs.

python examples/scripts/demo_server.py [MODEL] [PORT]
curl localhost:8000/generate -H 'Content-Type: application/json' -d '{"prompt": "The sky is", "max_tokens": 8, "stream": true}'
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from litestar import Litestar, Response, get, post
from litestar.response import Stream

from pelton import AsyncLLM, EngineConfig, SamplingParams
from pelton.errors import RequestError
from pelton.sampling_params import RequestOutputKind

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 8000
llm: AsyncLLM


@asynccontextmanager
async def engine(_: Litestar) -> AsyncIterator[None]:
    """Runs as long as the server does."""
    global llm
    async with AsyncLLM(EngineConfig.from_flat(model=MODEL, max_model_len=512, max_num_seqs=8)) as llm:
        yield


@get("/health")
async def health() -> None:
    """200 while the engine is well."""
    await llm.check_health()


@post("/generate", status_code=200)
async def generate(data: dict[str, Any]) -> Any:
    """Every field but `prompt` and `stream` is one of `SamplingParams`."""
    prompt, is_streamed = data.pop("prompt", None), data.pop("stream", False)
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    try:
        outputs = llm.generate(prompt, SamplingParams(**data, output_kind=kind))
        first = await anext(outputs)  # what is wrong with the request is known by now
    except (RequestError, TypeError) as error:
        return Response({"error": str(error)}, status_code=400)
    if not is_streamed:
        return {"text": [prompt + one.text for one in first.outputs]}

    async def lines() -> AsyncIterator[str]:
        yield json.dumps({"text": [one.text for one in first.outputs]}) + "\n"
        async for output in outputs:
            yield json.dumps({"text": [one.text for one in output.outputs]}) + "\n"

    return Stream(lines(), media_type="application/x-ndjson")


if __name__ == "__main__":
    uvicorn.run(Litestar([generate, health], lifespan=[engine]), port=PORT)

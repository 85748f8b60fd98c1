"""One engine of `pelton bench busy`: `python -m pelton_plugins.bench.cpu.busy_engine JSON`, then a JSON command a line.

A command says for how long what is to be done; the answer, a line of JSON, says how fast it went.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pelton import LLM
from pelton.errors import EngineError
from pelton_plugins.bench.offline import greedy, run_batch


def main() -> int:
    job = json.loads(sys.argv[1])
    with LLM(**job["settings"]) as llm:
        worker = Work(llm, job["num_seqs"], job["input_len"], job["output_len"])
        for work in (worker.one, worker.many):
            work(0.0)  # warm up
        tell(device=llm.llm_engine.info.report.device)
        for line in sys.stdin:
            asked = json.loads(line)
            tell(**getattr(worker, asked["work"])(asked["seconds"]))
    return 0


class Work:
    """Work that is decoded. No prompt comes twice."""

    def __init__(self, llm: LLM, num_seqs: int, input_len: int, output_len: int) -> None:
        self.llm, self.num_seqs, self.input_len, self.output_len = llm, num_seqs, input_len, output_len
        self._num_prompts = 0

    def one(self, seconds: float) -> dict[str, float]:
        """Milliseconds a token of one request at a time, from its first token to its last."""
        engine, num_tokens, spent = self.llm.llm_engine, 0, 0.0
        room = engine.info.max_model_len - self.input_len
        while True:
            request_id = str(self._num_prompts)
            (params,) = greedy([min(room, 512)])
            engine.add_request(request_id, {"prompt_token_ids": self._prompt()}, params)
            count, first = 0, 0.0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.error is not None:
                        raise EngineError(f"Request {request_id} failed: {output.error.message}")
                    count, now = len(output.outputs[0].token_ids), time.perf_counter()
                    first = first or now
                if first and count > 1 and spent + now - first >= seconds:
                    engine.abort_request(request_id)
                    return {"ms_a_token": (spent + now - first) * 1e3 / (num_tokens + count - 1)}
            num_tokens, spent = num_tokens + count - 1, spent + now - first

    def many(self, seconds: float) -> dict[str, float]:
        """Output tokens a second of batches, their prompts included."""
        num_tokens, spent = 0, 0.0
        while not spent or spent < seconds:
            prompts = [self._prompt() for _ in range(self.num_seqs)]
            batch = run_batch(self.llm, prompts, greedy([self.output_len] * self.num_seqs))
            num_tokens, spent = num_tokens + batch.num_output_tokens, spent + batch.seconds
        return {"out_tok_s": num_tokens / spent}

    def _prompt(self) -> list[int]:
        self._num_prompts += 1
        vocab_size = self.llm.llm_engine.model.vocab_size
        return [10 + (self._num_prompts * 7919 + place * 31) % (vocab_size - 10) for place in range(self.input_len)]


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(main())

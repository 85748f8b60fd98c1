"""Clients with environments of their own: litellm, lm-eval and guidellm against a real engine over a tiny checkpoint.

They are asked in the environment that PELTON_CLIENTS_PYTHON names, or in this one; CONTRIBUTING.md says how to make one. What is not
there is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pelton_e2e import serving

PYTHON = os.environ.get("PELTON_CLIENTS_PYTHON", sys.executable)
ENVIRONMENT = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "NO_COLOR": "1"}


def client(module: str) -> pytest.MarkDecorator:
    """Skip where the client is not installed."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        is_there = subprocess.run([PYTHON, "-c", code], env=ENVIRONMENT, check=False).returncode == 0
    except OSError:
        is_there = False
    return pytest.mark.skipif(not is_there, reason=f"{PYTHON} has no {module}: see CONTRIBUTING.md, Other clients")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL, and a folder to work in."""
    from pelton.testing.models import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("clients")
    checkpoint = make_tiny_checkpoint(folder / "tiny", "llama")
    with serving(str(checkpoint), "--served-model-name", "tiny", "--max-num-seqs", "16", log=folder / "log") as (
        url,
        _,
    ):
        yield url, folder


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [PYTHON, *command], env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


LITELLM = """
import asyncio, json, litellm, sys
from litellm.exceptions import BadRequestError, ContextWindowExceededError, NotFoundError
to = dict(model="hosted_vllm/tiny", api_base=sys.argv[1] + "/v1", api_key="none", num_retries=0)
hi = [{"role": "user", "content": "hi"}]
def raised(kind, **call):
    try:
        litellm.completion(**(to | call))
    except kind:
        return True
    return False
whole = litellm.completion(messages=hi, max_tokens=6, temperature=0, **to)
stream = litellm.completion(messages=hi, max_tokens=6, temperature=0, stream=True, **to)
schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
formed = litellm.completion(messages=hi, max_tokens=40, response_format=wanted, **to)
text = litellm.text_completion(prompt="a b", max_tokens=4, **{**to, "model": "text-completion-openai/tiny"})
print(json.dumps({
    "same": whole.choices[0].message.content == "".join(part.choices[0].delta.content or "" for part in stream),
    "json": json.loads(formed.choices[0].message.content)["a"] in (1, 2),
    "text": text.usage.completion_tokens,
    "async": asyncio.run(litellm.acompletion(messages=hi, max_tokens=2, **to)).usage.completion_tokens,
    "no model": raised(NotFoundError, messages=hi, model="hosted_vllm/other"),
    "bad": raised(BadRequestError, messages=hi, temperature=9),
    "too long": raised(ContextWindowExceededError, messages=[{"role": "user", "content": "a " * 5000}]),
}))
"""


@client("litellm")
def test_litellm(served):
    url, folder = served
    found = json.loads(run(folder, "-c", LITELLM, url).strip().splitlines()[-1])
    assert found == {"same": True, "json": True, "text": 4, "async": 2, "no model": True, "bad": True, "too long": True}


TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@client("lm_eval")
def test_lm_eval_reads_likelihoods(served):
    """Choices by loglikelihood: echo with logprobs, and the server's tokenizer."""
    url, folder = served
    items = [
        {"text": f"{word} and", "choices": [" so", " to be or not to be, that"]} for word in ("a", "bc", "def", "g")
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "tiny_choice.yaml").write_text(TASK)
    run(
        folder, "-m", "lm_eval", "--model", "local-completions", "--tasks", "tiny_choice", "--include_path", ".",
        "--output_path", "out", "--model_args",
        f"model=tiny,base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=2,max_length=256",
    )  # fmt: skip
    (answer,) = (folder / "out").rglob("results_*.json")
    found = json.loads(answer.read_text())["results"]["tiny_choice"]
    # Of a random model the shorter continuation is the likelier one.
    assert found["acc,none"] == 1.0


@client("guidellm")
def test_guidellm_reports(served):
    url, folder = served
    run(
        folder, "-m", "guidellm", "run", "--backend", f"kind=openai_http,target={url},model=tiny",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--tokenizer", f"kind=huggingface_auto,model={folder / 'tiny'}", "--output", "kind=json,path=report.json",
        "--disable-console",
    )  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)

"""The soak: its requests, what it finds wrong in answers and processes, and a short run against a tiny model."""

from __future__ import annotations

import json
import math
import os
import random

import pytest
from pelton_http import Answers, answering

from pelton.cli.main import main
from pelton.testing import fake_engine
from pelton_plugins.bench.memory import ProcessState, family_states
from pelton_plugins.bench.soak import command as soak
from pelton_plugins.bench.soak.client import SoakClient
from pelton_plugins.bench.soak.requests import Request, Source, wrong_answer

FIELDS = {
    "prompt", "messages", "temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "include_stop_str_in_output", "ignore_eos", "min_tokens", "stop_token_ids",
    "logprobs", "top_logprobs", "echo", "stream",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def all_servers_are_forks() -> None:
    """None is: a soak looks at every process of its server, zygotes too."""


def make_source(seed=0, **more) -> Source:
    return Source(random.Random(seed), "m", **{"max_model_len": 2000, **more})


def test_requests_ask_for_everything_in_every_length():
    source = make_source()
    requests = [source.next() for _ in range(2000)]
    assert set().union(*(one.body for one in requests)) >= FIELDS
    lengths = [len(one.body["prompt"]) for one in requests if "prompt" in one.body]
    assert min(lengths) == 1 and max(lengths) > 1700 and sum(length < 45 for length in lengths) > len(lengths) / 3
    for one in requests:
        text = one.body.get("prompt") or "".join(message["content"] for message in one.body["messages"])
        assert len(text) + one.max_tokens <= 2000 and one.max_tokens >= 1
        if one.num_choices > 1:
            assert one.body["temperature"] > 0, "greedy samples are all the same, and refused"
    left = [one for one in requests if one.leaves_after is not None]
    assert 0.2 < len(left) / len(requests) < 0.3
    assert all(1 <= one.leaves_after <= one.max_tokens for one in left if one.is_stream)
    assert [make_source().next() for _ in range(3)] == [make_source().next() for _ in range(3)]


def test_prompts_keep_to_their_bound():
    source = make_source(max_prompt_len=40, leave_fraction=0.0)
    for _ in range(300):
        one = source.next()
        assert len(one.body["prompt"]) <= 40 and one.leaves_after is None


def answer(**more):
    choice = {"finish_reason": "length", "text": "abc", **more.pop("choice", {})}
    return {"choices": [choice], "usage": {"completion_tokens": 4}} | more


@pytest.mark.parametrize(
    "body, found, wrong",
    [
        ({}, answer(), None),
        ({"n": 2}, answer(), "1 choices; 2 were asked for"),
        ({}, answer(choice={"finish_reason": "error"}), "finish_reason is {'error'}"),
        ({}, answer(usage={"completion_tokens": 5}), "5 tokens; at most 4 were asked for"),
        ({}, answer(usage={}), "0 tokens; at most 4 were asked for"),
        ({"logprobs": 0}, answer(), "logprobs are missing"),
        ({"logprobs": 0}, answer(choice={"logprobs": {}}), None),
        ({"echo": True, "prompt": "x"}, answer(), "the prompt is not echoed"),
        ({"echo": True, "prompt": "ab"}, answer(), None),
    ],
)
def test_answers_are_looked_at(body, found, wrong):
    assert wrong_answer(Request("/v1/completions", {"max_tokens": 4, **body}), found) == wrong


def chunk(made, *, finish=None, index=0):
    data = {"choices": [{"index": index, "finish_reason": finish}], "usage": {"completion_tokens": made}}
    return f"data: {json.dumps(data)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@pytest.fixture
def scripted():
    """(client's URL, the list to put the next answers in): a server that sends what it is given."""
    answers = []

    class Next(Answers):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answers.pop(0)
            self.answer(body, status)

    with answering(Next) as url:
        yield url, answers


@pytest.mark.parametrize(
    "status, body, error",
    [
        (200, chunk(1) + chunk(3) + chunk(4, finish="stop") + DONE, None),
        (200, chunk(1) + chunk(2), "the stream ended after 0 of 1 choices"),
        (200, chunk(2, finish="stop"), "the stream ended after 1 of 1 choices"),
        (200, chunk(9, finish="length") + DONE, "9 tokens; at most 4 were asked for"),
        (200, chunk(1) + b'data: {"error": {"message": "boom"}}\n\n' + DONE, "EngineError: {'message': 'boom'}"),
        (500, b"broken", "EngineError: http://127.0.0.1"),
    ],
    ids=["well", "cut", "not done", "too many", "error", "status"],
)
async def test_streams_are_looked_at(scripted, status, body, error):
    url, answers = scripted
    answers.append((status, body))
    found = await SoakClient(url).send(Request("/v1/completions", {"max_tokens": 4, "stream": True}))
    assert found.error == error or (error is not None and found.error.startswith(error))
    if error is None:
        assert found.num_tokens == 4 and len(found.gaps_s) == 2 and found.ttft_s > 0 and not found.has_left


async def test_a_client_that_leaves_a_stream_is_no_failure(scripted):
    url, answers = scripted
    answers.append((200, chunk(1) + chunk(2) + chunk(3)))
    found = await SoakClient(url).send(Request("/v1/completions", {"max_tokens": 4, "stream": True}, 2.0))
    assert found.has_left and found.error is None and found.num_tokens == 2


async def test_a_client_that_leaves_a_whole_answer_is_no_failure():
    class Slow(SoakClient):
        async def _whole(self, request, body, answer):
            await soak.asyncio.sleep(60)

    found = await Slow("http://127.0.0.1:1").send(Request("/v1/completions", {"max_tokens": 4}, 0.01))
    assert found.has_left and found.error is None


def test_growth_is_that_of_the_fitted_line():
    assert soak.fitted_growth([0.0, 10.0, 20.0, 30.0], [5.0, 6.0, 7.0, 8.0]) == pytest.approx(3.0)
    assert soak.fitted_growth([0.0, 1.0, 2.0], [9.0, 5.0, 9.0]) == pytest.approx(0.0)
    assert math.isnan(soak.fitted_growth([0.0, 1.0], [1.0, 2.0]))


def state(pid, mib, *, num_fds=10, num_threads=5):
    return ProcessState(pid, "python", mib * 2**20, num_fds, num_threads)


def checked(before, samples, after):
    seen = soak.Seen(samples=samples)
    for third in seen.thirds:
        for gap in (0.01, 0.01, 0.02):
            third.gaps.add(gap)
    arguments = soak.SoakArguments(duration_s=9.0, max_growth_mib=5.0)
    result = soak._result(arguments, seen, 0.0, 0, before, after)
    soak.render(result | {"device": "d"})
    return {one["name"]: one["ok"] for one in result["checks"]}


def test_processes_are_compared_with_how_they_were():
    flat = [(float(at), [state(7, 100 if at >= 3 else 50)]) for at in range(9)]
    well = checked([state(7, 50)], flat, [state(7, 100)])
    assert all(well.values()), "what comes in the first third is warming up"
    growing = [(float(at), [state(7, 100 + 2 * at)]) for at in range(9)]
    assert not checked([state(7, 50)], growing, [state(7, 120)])["process 7: memory after the first third, MiB"]
    found = checked([state(7, 50)], flat, [state(7, 100, num_fds=15, num_threads=14)])
    assert not found["process 7: file descriptors more"] and not found["process 7: threads more"]
    found = checked([state(7, 50)], flat, [])
    assert not found["process 7: file descriptors more"], "it is gone"


def test_streams_that_stand_still_are_found():
    seen = soak.Seen()
    for gap in [0.01] * 50 + [0.05] * 2:
        seen.thirds[1].gaps.add(gap)
    result = soak._result(soak.SoakArguments(), seen, 0.1, 2, [], [])
    ok = {one["name"]: one["ok"] for one in result["checks"]}
    assert (
        not ok["p99 ITL over its median"] and not ok["KV blocks held, share"] and not ok["requests left in the engine"]
    )
    assert ok["requests that failed"]


def test_processes_are_seen_from_outside():
    (own, *_) = family_states(os.getpid())
    assert own.pid == os.getpid() and own.resident_bytes > 2**20 and own.num_fds > 2 and own.num_threads >= 1


def test_a_soak_of_a_tiny_model(tmp_path, capsys):
    folder = fake_engine.make_model_folder(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 512, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    out = tmp_path / "soak.json"
    argv = ["--clients", "4", "--sample-s", "0.2", "--max-output-len", "16"]
    bounds = ["--max-itl-ratio", "1e9", "--max-growth-mib", "1000"]  # a slow machine warms up for longer than a third
    engine = ["--load-format", "dummy", "--kv-cache-memory-bytes", "4M", "--max-num-seqs", "4", "--log-level", "error"]
    for duration_s in ("1.5", "6", "48"):  # how many requests that is enough for follows from the machine's speed
        timed = ["--duration-s", duration_s, "--output-json", str(out)]
        assert main(["bench", "soak", str(folder), *argv, *bounds, *engine, *timed]) == 0, capsys.readouterr().out
        result = json.loads(out.read_text())
        if result["num_sent"] > 40:
            break
    assert result["num_sent"] > 40 and result["num_left"] > 0 and result["errors"] == {}
    assert len(result["processes"]) == 2, "the server and its engine"
    assert all(one["first_mib"] > 20 and len(one["samples"]) > 3 for one in result["processes"])
    assert sum(third["answers"] for third in result["thirds"]) == result["num_sent"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--clients", "0"], "clients is 0; use at least 1."),
        (["--leave-fraction", "1"], "leave_fraction is a share below 1"),
        (["--duration-s", "0"], "positive times"),
        (["--server-pid", "5"], "server_pid names the process of a server at --url"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 cannot be reached"),
    ],
)
def test_mistakes_are_named(argv, message, capsys):
    assert main(["bench", "soak", *argv]) != 0
    assert message in capsys.readouterr().err

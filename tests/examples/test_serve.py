"""The server of the examples answers many clients, some of which leave, and keeps nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import runpy
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import graphkit as gk
from engine_target import engine_target

httpx2, uvicorn = pytest.importorskip("httpx2"), pytest.importorskip("uvicorn")
pytest.importorskip("starlette")  # of the example
pytest.importorskip("prometheus_client")

SERVE = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "examples" / "serve.py"))


class Letters:
    """Tokens 0 to 15 are the letters a to p."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def encode_chat(self, messages):
        return self.encode(messages[-1]["content"])

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids)

    def sampling_params(self, **changes):
        return gk.SamplingParams(**changes)


def continued(letter, count):
    tokens = Letters().encode(letter)
    while len(tokens) <= count:
        tokens.append((5 * tokens[-1] + 3) % 16)
    return Letters().decode(tokens[1:])


@contextmanager
def serving(app):
    """Serve on a free port of this machine; yield the address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def engine():
    with engine_target().engine(batch_sizes=[1, 3], device="cpu", backend=None) as engine:
        engine.capture()
        yield engine


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_completions_and_chats_are_those_of_openai(engine):
    app = SERVE["create_app"](engine, Letters())
    with serving(app) as address, httpx2.Client(base_url=address) as client:
        body = {"prompt": "b", "max_tokens": 12, "model": "letters"}
        whole = client.post("/v1/completions", json=body).json()
        streamed = client.post("/v1/completions", json={**body, "stream": True}).text
        chat = {"messages": [{"role": "user", "content": "b"}], "max_completion_tokens": 12}
        reply = client.post("/v1/chat/completions", json=chat).json()
        chunks = events(client.post("/v1/chat/completions", json={**chat, "stream": True}).text)
        stop = continued("b", 12)[4:6]
        stopped = client.post("/v1/completions", json={**body, "stop": stop}).json()
        refused = [
            client.post("/v1/completions", json=wrong)
            for wrong in (
                {},
                {**body, "temperature": -1},
                {**body, "prompt": ""},
                {**body, "n": 2},
                {**body, "tools": []},
                {"messages": "b"},
                {**body, "messages": [{"role": "user", "content": "c"}]},
                {**body, "max_completion_tokens": 3},
                {**body, "stream": "false"},
            )
        ]
        refused.append(client.post("/v1/completions", content="{"))
        no_effect = {"n": 1, "messages": None}
        ids = client.post("/v1/completions", json={**body, "prompt": [1], **no_effect}).json()
        metrics = client.get("/metrics").text
    text = continued("b", 12)
    assert (whole["object"], whole["model"]) == ("text_completion", "letters")
    assert whole["choices"] == [{"index": 0, "text": text, "finish_reason": "length"}]
    assert whole["usage"] == {"prompt_tokens": 1, "completion_tokens": 12, "total_tokens": 13}
    pieces = events(streamed)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[-2:]] == [None, "length"]
    assert pieces[-1]["usage"] == whole["usage"]
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
    assert stopped["choices"][0] == {"index": 0, "text": text[:4], "finish_reason": "stop"}
    assert [answer.status_code for answer in refused] == [400] * 10
    assert "the body has n: 2, which is not supported" in refused[3].json()["error"]["message"]
    assert ids["choices"] == whole["choices"], "a prompt of token ids"
    assert 'graphkit:request_success_total{finished_reason="length"} 5.0' in metrics


def test_a_full_queue_is_an_answer(engine):
    with serving(SERVE["create_app"](engine, Letters(), max_waiting=1)) as address:

        async def run():
            async with httpx2.AsyncClient(base_url=address, timeout=60) as client:
                body = {"prompt": "b", "max_tokens": 60}
                posts = [client.post("/v1/completions", json=body) for _ in range(60)]
                return [answer.status_code for answer in await asyncio.gather(*posts)]

        codes = asyncio.run(run())
    assert set(codes) == {200, 503}


@pytest.mark.slow
def test_a_thousand_requests_of_which_some_are_cut_leave_nothing(engine):
    count, max_tokens = 1000, 16
    before = [value for value in gc.get_objects() if type(value) is gk.Request]

    async def ask(client, number):
        letter = "bcdefghi"[number % 8]
        body = {"prompt": letter, "max_tokens": max_tokens, "stream": number % 2 == 0}
        if number % 10:
            answer = await client.post("/v1/completions", json=body)
            parts = events(answer.text) if body["stream"] else [answer.json()]
            return "".join(p["choices"][0]["text"] for p in parts) == continued(letter, max_tokens)
        body = {**body, "max_tokens": 80, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
        return None

    async def run(address):
        limits = httpx2.Limits(max_connections=64)
        async with httpx2.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(count)))

    app = SERVE["create_app"](engine, Letters(), max_waiting=count)
    with serving(app) as address:
        results = asyncio.run(run(address))
    assert results.count(True) == count - count // 10
    assert results.count(None) == count // 10
    stats = engine.stats
    assert stats.finished.total() == count
    assert stats.finished[gk.FinishReason.ABORTED] > 0
    assert stats.running == stats.waiting == engine.memory.held_slots == 0
    gc.collect()
    kept = [value for value in gc.get_objects() if type(value) is gk.Request]
    own = [value for value in kept if value not in before]  # other tests may hold some
    assert len(own) <= engine.sizes.max_batch_size, "those of the last batch"
    assert not any(type(value) is gk.RequestStream for value in gc.get_objects())
    assert "graphkit engine" not in {thread.name for thread in threading.enumerate()}

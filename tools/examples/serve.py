"""A server with the completions and the chat completions of OpenAI, whole or streamed.

``python tools/examples/serve.py [FOLDER]`` serves a folder of transformers, without one the
reference model. It needs ``pip install starlette uvicorn``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import graphkit as gk
from graphkit.engine.metrics import PrometheusCollector
from graphkit.models import FolderTokenizer, load, reference_model
from graphkit.models.tokenizer import ByteTokenizer

SETTINGS = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"} | {
    name: name
    for name in ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
}
REASONS = {"STOP": "stop", "STOP_STRING": "stop", "LENGTH": "length", "CONTEXT": "length"}


def create_app(engine: gk.SpeculativeEngine, tokenizer: Any, max_waiting: int = 1000) -> Starlette:
    """Return the application. It runs the engine while it serves; the caller closes the engine."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with gk.EngineThread(engine, tokenizer, max_waiting=max_waiting) as app.state.thread:
            app.state.registry = CollectorRegistry()
            app.state.registry.register(PrometheusCollector(app.state.thread))
            yield
            await asyncio.to_thread(app.state.thread.drain, 30)

    def submit(request: Request, body: dict[str, Any]) -> gk.RequestStream:
        is_chat = "messages" in body
        encode = tokenizer.encode_chat if is_chat else tokenizer.encode
        settings = {SETTINGS[name]: value for name, value in body.items() if name in SETTINGS}
        stop = body.get("stop") or ()
        return request.app.state.thread.submit(
            encode(body["messages" if is_chat else "prompt"]),
            tokenizer.sampling_params(**settings),
            stop=[stop] if isinstance(stop, str) else stop,
            timeout_s=300,
        )

    async def complete(request: Request) -> Response:
        try:
            body = await request.json()
            stream = submit(request, body)
        except gk.ReplayError as error:  # the queue is full, or the server stops
            return JSONResponse({"error": {"message": str(error)}}, 503)
        except (gk.GraphkitError, KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        is_chat, is_streamed = "messages" in body, bool(body.get("stream"))
        kind = ("chat.completion" + ".chunk" * is_streamed) if is_chat else "text_completion"
        head = {"id": uuid.uuid4().hex, "object": kind, "model": body.get("model", "")}

        def answer(text: str, *, is_last: bool) -> dict[str, Any]:
            choice: dict[str, Any] = {"index": 0, "finish_reason": None, "text": text}
            if is_chat:
                message = {"role": "assistant", "content": choice.pop("text")}
                choice["delta" if is_streamed else "message"] = message
            if not is_last:
                return {**head, "choices": [choice]}
            ended = stream.request
            choice["finish_reason"] = REASONS.get(ended.finish_reason.name, "abort")
            old, new = len(ended.prompt_ids), len(stream.token_ids)
            usage = {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
            return {**head, "choices": [choice], "usage": usage}

        async def events() -> AsyncIterator[str]:
            async with stream:  # ends the request if the client leaves
                async for output in stream:
                    yield f"data: {json.dumps(answer(output.text, is_last=False))}\n\n"
                yield f"data: {json.dumps(answer('', is_last=True))}\n\ndata: [DONE]\n\n"

        if is_streamed:
            return StreamingResponse(events(), media_type="text/event-stream")
        async with stream:
            async for _ in stream:
                if await request.is_disconnected():
                    return Response()
        return JSONResponse(answer(stream.text, is_last=True))

    async def metrics(request: Request) -> Response:
        page = await asyncio.to_thread(generate_latest, request.app.state.registry)
        return PlainTextResponse(page)

    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [Route(path, complete, methods=["POST"]) for path in paths]
    return Starlette(routes=[*routes, Route("/metrics", metrics)], lifespan=lifespan)


def main(folder: str | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    if folder is None:  # a small model: on a CPU, its operations are too short for more threads
        torch.set_num_threads(1)
        model, tokenizer, limits = reference_model("EAGLE"), ByteTokenizer(), (8, 256)
    else:
        model, limits = load(folder), (32, 4096)
        size = model.model.config.get_text_config(decoder=True).vocab_size
        tokenizer = FolderTokenizer(folder, size)
    requests, context = limits
    sizes = [1 << bits for bits in range(requests.bit_length())]
    with model.engine(
        max_batch_size=requests, max_context_len=context, batch_sizes=sizes
    ) as engine:
        engine.capture()
        uvicorn.run(create_app(engine, tokenizer), port=8000)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

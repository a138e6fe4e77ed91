"""A server with the completions and the chat completions of OpenAI, whole or streamed.

``python tools/examples/serve.py [FOLDER]`` serves a folder of transformers, without one the
reference model. It needs ``pip install starlette uvicorn prometheus-client``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import graphkit as gk
from graphkit.engine.metrics import PrometheusCollector


def create_app(
    engine: gk.SpeculativeEngine, tokenizer: gk.ChatTokenizer, max_waiting: int = 1000
) -> Starlette:
    """Return the application. It runs the engine while it serves; the caller closes the engine."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with gk.EngineThread(engine, tokenizer, max_waiting=max_waiting) as app.state.thread:
            yield
            await asyncio.to_thread(app.state.thread.drain, 30)

    async def complete(http: Request) -> Response:
        try:
            thread, body = http.app.state.thread, await http.json()
            request = gk.OpenAIRequest(thread, tokenizer, body, timeout_s=300)
        except (gk.GraphkitError, ValueError) as error:  # ValueError: the body is no JSON
            status = 503 if isinstance(error, gk.ReplayError) else 400
            return JSONResponse({"error": {"message": str(error)}}, status)
        if request.is_streamed:
            return StreamingResponse(request.events(), media_type="text/event-stream")
        async with request.stream as stream:  # ends the request if the client leaves
            async for _ in stream:
                if await http.is_disconnected():
                    return Response()
        return JSONResponse(request.reply())

    async def metrics(http: Request) -> Response:
        collector = PrometheusCollector(http.app.state.thread)
        return PlainTextResponse(await asyncio.to_thread(generate_latest, collector))

    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [Route(path, complete, methods=["POST"]) for path in paths]
    return Starlette(routes=[*routes, Route("/metrics", metrics)], lifespan=lifespan)


def main(folder: str = "graphkit/models/weights/target") -> None:
    """Serve until SIGINT or SIGTERM."""
    if not torch.cuda.is_available():  # operations of small models are too short for more threads
        torch.set_num_threads(1)
    model = gk.models.load(folder)
    with model.engine(max_batch_size=8) as engine:
        engine.capture(print)
        uvicorn.run(create_app(engine, model.tokenizer), port=8000)


if __name__ == "__main__":
    main(*sys.argv[1:])

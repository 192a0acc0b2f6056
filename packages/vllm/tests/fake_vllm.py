"""Stands in for vLLM's process: `fake_vllm.py START FD ARGUMENT... --uds PATH`. The prompt selects its behaviour.

As `fake_vllm.py .../look.py MODULE...` it reports which vLLM is installed: FAKE_VLLM_INSTALLED, or a recent one.

It appends what it receives, as one line of JSON each, to the file that FAKE_VLLM_SEEN names.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


def saw(**what: Any) -> None:
    with open(os.environ["FAKE_VLLM_SEEN"], "a") as file:
        file.write(json.dumps(what) + "\n")


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def health(request: Request) -> Response:
    """Return 200, or 503 while SEEN.sick exists; the first call notes its time in SEEN.asked (SEEN: FAKE_VLLM_SEEN)."""
    if not hasattr(request.app.state, "asked"):
        request.app.state.asked = True
        with open(os.environ["FAKE_VLLM_SEEN"] + ".asked", "a") as file:
            file.write(f"{time.monotonic()}\n")  # a monotonic time is the same in every process
    return Response(status_code=503 if os.path.exists(os.environ["FAKE_VLLM_SEEN"] + ".sick") else 200)


async def models(request: Request) -> Response:
    return JSONResponse({"data": [{"id": "m", "root": "/srv/secret/model", "max_model_len": 321}]})


async def version(request: Request) -> Response:
    return JSONResponse({"version": "0.0.fake"})


async def metrics(request: Request) -> Response:
    return PlainTextResponse("# TYPE vllm:some_total counter\nvllm:some_total 3.0\n")


async def complete(request: Request) -> Response:
    body = await request.json()
    saw(body=body, authorization=request.headers.get("authorization"), pid=os.getpid())
    prompt = str(body.get("prompt"))
    if prompt == "refuse":
        return JSONResponse({"error": {"message": "at /srv/secret/x.py 0x7fffabcd", "param": "prompt"}}, 422)
    if prompt == "die":
        os._exit(9)
    if not body.get("stream"):
        await asyncio.sleep(30 if prompt == "wait" else 0)
        return JSONResponse({"choices": [{"text": prompt.upper()}]})

    async def chunks() -> AsyncIterator[bytes]:
        try:
            for i in range(int(body.get("max_tokens", 3))):
                await asyncio.sleep(0.02)
                yield event({"choices": [{"index": 0, "text": f"{i} ", "finish_reason": None}]})
                if prompt == "die later" and i == 1:
                    os._exit(9)
                if prompt == "fail" and i == 1:
                    yield event({"error": {"message": "in /srv/secret/x.py"}})
                    break
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            saw(left=prompt)
            raise

    return StreamingResponse(chunks(), media_type="text/event-stream")


def main() -> None:
    if sys.argv[1].endswith("look.py"):
        told = {"version": "0.33.0", "cpu": False, "flags": [], "modules": sys.argv[2:]}
        print(json.dumps({**told, **json.loads(os.environ.get("FAKE_VLLM_INSTALLED", "{}"))}))
        return
    arguments = sys.argv[3:]
    told = {"key": os.environ.get("SAMESEED_API_KEY"), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    saw(arguments=arguments, **told, group=os.getpgrp() == os.getpid(), pid=os.getpid())
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/version", version),
            Route("/metrics", metrics),
            Route("/v1/completions", complete, methods=["POST"]),
        ]
    )
    uvicorn.run(app, uds=arguments[arguments.index("--uds") + 1], log_config=None, access_log=False)


if __name__ == "__main__":
    main()

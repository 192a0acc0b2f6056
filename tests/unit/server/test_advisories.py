"""Advisories of other engines as tests, where no other test covers them; docs/guides/security.md lists all."""

import asyncio
import hmac
import random
import threading
import time

import pytest
from fixtures_server import visiting

from sameseed.server import config as configs, frames, helper
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient
from sameseed.server.config import Keys, ServerConfig
from sameseed.server.errors import ApiError
from sameseed.server.frames import Render
from sameseed.server.text import INLINE, TextCodec


async def test_a_clock_that_jumps_ends_nothing(monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.choice([0.0, 4e9, 1.7e9]))
    app, service = create_app(EngineClient("x", {}), ServerConfig())
    async with visiting(app) as http:
        for _ in range(20):
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
    assert service.gate.num_inside == 0


def test_every_key_is_compared_whatever_matches(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(configs.hmac, "compare_digest", lambda a, b: (compared.append((a, b)), real(a, b))[1])
    keys = Keys(("first-key-1", "second-key-2", "third-key-33"))
    for given in (b"first-key-1", b"third-key-33", b"", b"wrong"):
        compared.clear()
        keys.tenant(given)
        assert len(compared) == 3 and all(len(a) == len(b) == 32 for a, b in compared), "digests of one length"


async def test_long_texts_are_cut_up_elsewhere(pair, monkeypatch):
    """Tokenizing and templating one request must not block the event loop for the others."""
    text = TextCodec(pair.tokenizer.as_files(), 304, 256)
    threads = []

    def noted(name):
        real = getattr(text.tokenizer, name)
        return lambda *a, **k: (threads.append(threading.current_thread().name), real(*a, **k))[1]

    for name in ("encode", "render_chat", "decode"):
        monkeypatch.setattr(text.tokenizer, name, noted(name))
    beats = 0

    async def beat():
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(beat())
    await text.encode("the sum of " * INLINE * 20, True)
    await text.encode(Render([{"role": "user", "content": "x" * INLINE}], [], {}))
    await text.spelt([[5] * (INLINE + 1)])
    beating.cancel()
    assert len(threads) >= 3 and all(name.startswith("tokenizer") for name in threads) and beats > 3


async def test_a_helper_that_cannot_be_started_is_no_fault_of_the_request():
    def short():
        raise OSError(24, "Too many open files")

    made = helper.Helper(lambda: frames.Setup(False, {}, 8, []), 1.0, 8, short)
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await made.ask(frames.Template("[[], []]"), "messages")
        assert caught.value.status == 503 and caught.value.retry_after
    await made.close()


def test_who_runs_the_programs_of_others_knows_no_secret(monkeypatch):
    """Templates and grammars run in a process whose environment holds only what Python needs."""
    started = []
    monkeypatch.setattr(helper.process.os, "posix_spawn", lambda path, command, env, **more: started.append(env) or 1)
    secret = {"SAMESEED_API_KEY": "k", "HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s", "LC_ALL": "C.UTF-8"}
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    for program in ("aside", "worker"):
        helper.process.spawn(program)[1].close()
    aside, worker = started
    assert not secret.keys() - {"LC_ALL"} & aside.keys() and aside["LC_ALL"] == "C.UTF-8" and aside["PYTHONPATH"]
    assert "SAMESEED_API_KEY" not in worker and worker["HF_TOKEN"] == "t", "who loads models may need it"

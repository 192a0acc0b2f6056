"""Hundreds or thousands of requests, some abandoned, malformed or read slowly, beside broken connections: no trace."""

import asyncio
import json
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fixtures_server import gauge, num_files, serving, wait_until

from sameseed import LLM, SamplingParams

CONCURRENCY = 32
PROMPTS = [f"{start} {end}" for start in ("the sum", "def add(", "für 你好", "a list") for end in ("of", "is a, b")]
BROKEN = [
    b"GET /", b"\x16\x03\x01" * 99, b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: x\r\n\r\n",
]  # fmt: skip
KINDS = ["plain"] * 10 + ["stream"] * 8 + ["slow"] * 2 + ["left"] * 6 + ["malformed"] * 3


def fields(i):
    """Parameters of the i-th request: greedy or sampled, short or long, with and without penalties."""
    made = {"max_tokens": 4 + i % 40, "seed": i % 5, "temperature": (0.0, 0.8, 1.2)[i % 3], "ignore_eos": True}
    return made | ({"presence_penalty": 0.5} if i % 4 == 0 else {})


async def visit(http, i, counts):
    """Send one request of a random kind; returns its text, if it has one."""
    rng, path = random.Random(i), "/v1/completions"
    kind, body = rng.choice(KINDS), {"prompt": PROMPTS[i % 8], **fields(i)}
    body |= {"speculation": "off"} if i % 5 == 0 else {}
    if kind == "left":
        try:
            await asyncio.wait_for(http.post(path, json={**body, "max_tokens": 200}), rng.random() * 0.1)
        except asyncio.TimeoutError:
            counts[kind, 499] += 1
        return None
    if kind in ("plain", "malformed"):
        response = await http.post(path, json=body | ({"temperature": "x"} if kind == "malformed" else {}))
        counts[kind, response.status_code] += 1
        return response.json()["choices"][0]["text"] if response.status_code == 200 else None
    text = ""
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        counts[kind, response.status_code] += 1
        async for line in response.aiter_lines():
            await asyncio.sleep(rng.random() * 0.05 if kind == "slow" else 0)
            text += json.loads(line[6:])["choices"][0]["text"] if line.startswith("data: {") else ""
    return text


async def visit_all(url, numbers, counts):
    """Send the requests with a fixed number of clients at once; texts by request."""
    todo, texts = iter(numbers), {}

    async def visitor(http):
        for i in todo:
            texts[i] = await visit(http, i, counts)

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=CONCURRENCY)) as http:
        await asyncio.gather(*(visitor(http) for _ in range(CONCURRENCY)))
    return {i: text for i, text in texts.items() if text is not None}


def resident(pid):
    """Resident memory of a process in kilobytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("num_requests", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_load(pair_folders, num_requests):
    counts, warm_up = Counter(), num_requests // 5
    flags = ("--model", str(pair_folders[0]), "--draft", str(pair_folders[1]), "--policy", "fixed")
    with serving(*flags, "--max-num-seqs", "8") as server, ExitStack() as stack:
        pids = (server.process.pid, server.engine_pid)
        for sent in BROKEN * 6:
            stack.enter_context(server.connect()).sendall(sent)
        texts = asyncio.run(visit_all(server.url, range(warm_up), counts))
        stack.close()
        before = [resident(p) for p in pids]
        texts |= asyncio.run(visit_all(server.url, range(warm_up, num_requests), counts))
        assert {status for _, status in counts} <= {200, 400, 499}, counts
        assert counts["malformed", 400] == sum(n for (kind, _), n in counts.items() if kind == "malformed")
        with server.client() as http:
            wait_until(lambda: gauge(http, "num_requests_running") + gauge(http, "num_requests_waiting") == 0)
            wait_until(lambda: gauge(http, "kv_cache_usage_perc") == 0)
            wait_until(lambda: num_files(pids[0]) < 30)
            assert gauge(http, "spec_decode_num_draft_tokens_total") > 0
        after = [resident(p) for p in pids]
        most = 1.05 if num_requests > 1000 else 1.5  # at first memory still grows to its usual size
        assert all(late < most * early for early, late in zip(before, after, strict=True)), (before, after)
        assert pids == (server.process.pid, server.engine_pid), "no engine died"
        assert not [entry for entry in server.log if "trace" in entry]
    llm = LLM(str(pair_folders[0]))
    for i in random.Random(0).sample(sorted(texts), num_requests // 50):
        assert texts[i] == llm.generate(PROMPTS[i % 8], SamplingParams(**fields(i)))[0].text, i

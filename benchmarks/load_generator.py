"""How late the load generator's clocks are, and how much it takes: against a server that only writes chunks.

    .venv/bin/python benchmarks/load_generator.py [RECORDS.jsonl]

The server is a process of its own. Every chunk carries the moment at which it was written (both processes read one
clock), so that what lies between is the generator's, the kernel's and the event loops' share. Two cases: 50 chunks a
second and stream, as a good server writes them, and as many as go through.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

from sameseed.study import record
from sameseed.study.load import drive, figures, outcome, wire
from sameseed.study.load.wire import Endpoint

OUT = Path(__file__).parent / "results" / "load_generator.jsonl"
CONCURRENCY, REPEAT, CHUNKS = (1, 8, 32), 5, 100
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: `max_tokens` chunks a request, `interval` seconds apart."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        asked = json.loads(await reader.readexactly(int(fields[b"content-length"])))
        writer.write(HEAD)
        start = time.perf_counter()
        for i in range(asked["max_tokens"]):
            await asyncio.sleep(max(0.0, start + i * asked["interval"] - time.perf_counter()))
            choice = {"index": 0, "text": repr(time.perf_counter()) + " ", "token_ids": [i], "finish_reason": None}
            event = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "model": "none", "choices": [choice]}
            data = f"data: {json.dumps(event)}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            if asked["interval"] == 0:
                await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()


async def serve() -> None:
    """Until killed; the port on stdout."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def measure(url: str, concurrency: int, interval: float) -> dict[str, float]:
    """One repetition at one level."""
    endpoint = Endpoint(url)
    chunks = CHUNKS if interval else 10 * CHUNKS
    async with wire.open_client(None, concurrency, 60.0) as client:
        send = partial(wire.exchange, client, endpoint, timeout=60.0, max_retries=0)
        bodies = [{"max_tokens": chunks, "interval": interval}] * concurrency
        await drive.closed(send, [{"max_tokens": 1, "interval": 0}] * concurrency, concurrency)
        cpu, start = time.process_time(), time.perf_counter()
        sent = await drive.closed(send, bodies, concurrency)
        took, busy = time.perf_counter() - start, time.process_time() - cpu
    outcomes = [outcome.read(e) for e in sent]
    assert all(o.error is None and o.num_output == chunks for o in outcomes), {
        (o.error, o.detail, o.num_output) for o in outcomes
    }
    late = [t - float(w) for o in outcomes for t, w in zip(o.arrivals, o.text.split(), strict=True)]
    spread = figures.spread_ms(late)
    return {
        "chunks_per_s": concurrency * chunks / took,
        "cpu_us_per_chunk": busy / (concurrency * chunks) * 1e6,
        "cpu_share": busy / took,
        **{f"late_{name}_ms": value or 0.0 for name, value in spread.items()},
    }


def main() -> None:
    """Measure, print, append."""
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
        return
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for interval in (0.02, 0.0):
            for concurrency in CONCURRENCY:
                runs = [asyncio.run(measure(url, concurrency, interval)) for _ in range(REPEAT)]
                line = {
                    "schema": "sameseed.load_generator/1",
                    "time": record.now(),
                    "commit": record.commit(),
                    "machine": record.machine(),
                    "config": {"concurrency": concurrency, "interval_s": interval, "chunks": CHUNKS},
                    "repetitions": runs,
                    **{name: median(run[name] for run in runs) for name in runs[0]},
                }
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print({k: round(v, 3) for k, v in line.items() if isinstance(v, float)}, concurrency, interval)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()

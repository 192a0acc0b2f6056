"""Tuning a running vLLM: what it is asked, which length pays, and what is written; with a stand-in for vLLM."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sameseed.cli import main
from sameseed.cost.curve import ENGINE_SCHEMA
from sameseed.errors import ConfigError
from sameseed.plan.metrics import Counted
from sameseed.tuned import Tuned
from sameseed_vllm.export import export
from sameseed_vllm.tune_server import added, best_of, look_of, next_run, read_costs, rows_of

RIGHT = (0.8, 0.6, 0.3)


class StandIn(http.server.ThreadingHTTPServer):
    """A vLLM with `k` draft tokens. By its metrics, a round of B sequences takes 10 + 0.5 B (1 + k) ms."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.k, self.peak, self.open, self.bodies = 3, 0, 0, []  # type: ignore[var-annotated]
        self.rounds, self.seconds, self.lock = 0, 0.0, threading.Lock()
        self.status = 200

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing if a client leaves early: printing it fails in Python 3.11 if another thread parses source too."""

    def page(self) -> str:
        with self.lock:
            running = self.peak
            self.rounds += 100 * running
            self.seconds += 100 * running * (0.010 + 0.0005 * running * (1 + self.k))
            n, right = self.rounds, RIGHT[: self.k]
        lines = {"num_requests_running": running, "generation_tokens_total": n * (1 + sum(right))}
        lines |= {"inter_token_latency_seconds_sum": self.seconds, "inter_token_latency_seconds_count": n}
        if self.k:
            lines |= {"spec_decode_num_drafts_total": n, "spec_decode_num_draft_tokens_total": n * self.k}
            lines |= {"spec_decode_num_accepted_tokens_total": n * sum(right)}
            for i, share in enumerate(right):
                lines[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] = n * share
        return "".join(f"vllm:{name} {value}\n" for name, value in lines.items())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.answer(self.server.page() if self.path == "/metrics" else '{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        with self.server.lock:
            self.server.open += 1
            self.server.peak = max(self.server.peak, self.server.open)
        try:
            if self.server.status == 200:
                time.sleep(0.1)
            self.answer("data: [DONE]\n\n", self.server.status)
        finally:
            with self.server.lock:
                self.server.open -= 1


@pytest.fixture
def server() -> Iterator[StandIn]:
    made = StandIn()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield made
    made.shutdown()


def counted(batch: int, k: int, **more: object) -> Counted:
    right = RIGHT[:k]
    drafts = {"drafts": 1000.0, "draft_tokens": 1000.0 * k, "accepted": 1000 * sum(right)} if k else {}
    places = {str(i): 1000 * s for i, s in enumerate(right)}
    known: dict[str, object] = {"gaps": 1000.0, "gap_seconds": 10.0 + 0.5 * batch * (1 + k), "running": batch, **drafts}
    return Counted("vllm", accepted_per_pos=places, **{**known, **more})  # type: ignore[arg-type]


def test_what_a_look_says() -> None:
    x = look_of(counted(2, 3), 2)
    assert (x.batch, x.k, x.round_ms, x.survival) == (2, 3, pytest.approx(14.0), pytest.approx(RIGHT))
    assert look_of(counted(2, 0), 2).k == 0
    half = look_of(counted(2, 3, gaps=2000.0, gap_seconds=28.0), 2)
    assert half.survival == pytest.approx([s / 2 for s in RIGHT]), "half of its rounds found no draft"
    for wrong, says in ((counted(2, 3, running=0.9), "max-num-seqs"), (counted(2, 3, gaps=3.0), "--seconds")):
        with pytest.raises(ConfigError, match=says):
            look_of(wrong, 2)
    with pytest.raises(ConfigError, match=r"metrics of llama\.cpp"):
        look_of(Counted("llama.cpp"), 1)


def test_lengths_are_compared_once_both_kinds_ran() -> None:
    first = added(None, [look_of(counted(b, 3), b) for b in (1, 16)], "head")
    assert not rows_of(first) and "without a draft" in str(next_run(first))
    both = added(first, [look_of(counted(b, 0), b) for b in (1, 16)], "head")
    rows = rows_of(both)
    assert {(r.batch, r.k): r.measured for r in rows if r.batch == 1} == {(1, 0): 1, (1, 1): 0, (1, 2): 0, (1, 3): 1}
    wanted = {(b, k): (1 + sum(RIGHT[:k])) * (10 + b / 2) / (10 + b * (1 + k) / 2) for b in (1, 16) for k in range(4)}
    assert {(r.batch, r.k): r.speedup for r in rows} == pytest.approx(wanted)
    assert {b: r.k for b, r in best_of(rows).items()} == {1: 3, 16: 2}
    assert '"num_speculative_tokens": 2' in str(next_run(both))
    seen = added(both, [look_of(counted(16, 2), 16)], "head")
    assert seen.survival == pytest.approx(RIGHT), "the longest knows most"
    assert next_run(seen) is None
    with pytest.raises(ConfigError, match="another --cost"):
        added(both, [look_of(counted(1, 2), 1)], "another")


def tuned(server: StandIn, folder: Path, *flags: str) -> int:
    own = ["--engine", "vllm", "--url", server.url, "--drafts", "embedded-head", "--batch", "1,4", "--seconds", "0.6"]
    files = ["--cost", str(folder / "costs.json"), "-o", str(folder / "tuned.toml")]
    return main(["tune", "embedded", *own, *files, *flags])


def test_two_runs_make_a_profile(server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuned(server, tmp_path) == 0
    assert "restart it without a draft" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "tuned.toml").exists()
    assert {body["model"] for body in server.bodies} == {"m"} and all(body["stream"] for body in server.bodies)
    server.k = server.peak = 0
    assert tuned(server, tmp_path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {(r["batch"], r["k"]) for r in told["rows"]} == {(b, k) for b in (1, 4) for k in range(4)}
    made = Tuned.read(tmp_path / "tuned.toml")
    assert made.chosen.num_draft_tokens == 3 and made.chosen.draft == "embedded-head"
    assert made.acceptance.marginal_accept_rates == pytest.approx(RIGHT)
    command = export(made, "vllm").command
    assert json.loads(command[command.index("--speculative-config") + 1])["num_speculative_tokens"] == 3
    costs = read_costs(tmp_path / "costs.json")
    assert costs.batches == (1, 4) and costs.draft == "embedded-head"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "sglang"}, "costs of sglang"), ({"schema": "other/1"}, "schema"), ({"passes": []}, "ms > 0"),
        ({"passes": [{"batch": 2, "rows": 1, "ms": 1.0}]}, "rows >= batch"),
        ({"passes": [{"batch": 1, "row": 1, "ms": 1.0}]}, "did you mean 'rows'"),
    ],
)  # fmt: skip
def test_cost_files_of_others_are_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    good = {"schema": ENGINE_SCHEMA, "engine": "vllm", "passes": [{"batch": 1, "rows": 1, "ms": 1.0}]}
    (tmp_path / "costs.json").write_text(json.dumps({**good, **changes}))
    with pytest.raises(ConfigError, match=words):
        read_costs(tmp_path / "costs.json")


def test_what_goes_wrong_is_said(server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*flags: str) -> str:
        assert main(["tune", "embedded", "--engine", "vllm", "--cost", str(tmp_path / "c"), *flags]) != 0
        return " ".join(capsys.readouterr().err.split())

    assert "--url" in said()
    assert "--drafts" in said("--url", server.url)
    both = ("--url", server.url, "--drafts", "ngram")
    assert "--seconds" in said(*both, "--seconds", "0")
    server.status = 400
    assert "failed on a request" in said(*both, "--seconds", "3600")
    assert main(["tune", "embedded", "--url", server.url]) != 0

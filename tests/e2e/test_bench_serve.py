"""`sameseed bench serve` against a real server: its figures add up, and bad input gets a clear message."""

import json

import pytest
from fixtures_server import gauge, serving

from sameseed.cli import main
from sameseed.report import record

KEY = "a-key-for-the-test"


@pytest.fixture(scope="module")
def server(pair_folders):
    target, draft = (str(p) for p in pair_folders)
    flags = ["--model", target, "--draft", draft, "--served-model-name", "tiny", "--max-num-seqs", "2"]
    with serving(*flags, "--policy", "fixed", "--max-queue", "1", env={"SAMESEED_API_KEY": KEY}) as made:
        yield made


def test_speculation_off_and_on(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SAMESEED_API_KEY", KEY)
    out = tmp_path / "load.jsonl"
    size = ["--lengths", "400-60", "--scale", "0.2", "--concurrency", "1,6", "--num-requests", "6", "--repeat", "1"]
    flags = [
        "--compare-speculation", "--temperature", "0.8", "--ttft-slo", "100", "--max-retries", "50", "--ignore-eos",
    ]  # fmt: skip
    assert main(["bench", "serve", "--url", f"{server.url}/v1", *size, *flags, "--out", str(out), "--json"]) == 0
    records = record.read(out)
    assert records == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    runs = [(r["config"]["concurrency"], r["config"]["label"]) for r in records]
    assert runs == [(1, "off"), (1, "on"), (6, "off"), (6, "on")]
    for made in records:
        once = made["repetitions"][0]
        assert (once["num_completed"], once["num_good"], made["errors"]) == (6, 6, {})
        assert (once["num_prompt_tokens"], once["num_output_tokens"]) == (6 * 80, 6 * 12)
        assert once["counted"] == {"usage": 6} and made["config"]["ignore_eos"] and made["itl_token_ms"] is not None
        assert 0 < made["ttft_ms"]["p50"] <= made["e2e_ms"]["p50"]
    for off, on in (records[:2], records[2:]):
        assert off["acceptance"] is None and on["acceptance"]["num_accepted_tokens"] > 0
        assert on["same_texts"] == [6, 6] and on["speedup"] > 0
    assert records[0]["retries"] == 0
    assert sum(r["retries"] for r in records[2:]) > 0  # six clients, room for three: the others retried
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as http:
        assert gauge(http, "admission_rejections_total") > 0


def test_what_is_wrong_is_said(server, capsys):
    for flags, says in (
        (["--url", server.url], "wants an API key"),
        (["--url", "http://127.0.0.1:9"], "is it running"),
        (["--compare-speculation", "--baseline-url", "http://h"], "one of them"),
    ):
        assert main(["bench", "serve", *flags]) == 2
        assert says in capsys.readouterr().err

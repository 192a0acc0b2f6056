"""`sameseed serve --engine vllm` in front of vLLM itself, with the embedded models (`make test-vllm`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_server import Server, children, serving, wait_until
from fixtures_vllm import real_pythons, stream

from sameseed import LLM, SamplingParams
from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
from sameseed_vllm.environments import look

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not real_pythons(), reason="no vLLM here: `make test-vllm` sets one up"),
]


START = 1800.0  # seconds: vLLM imports a lot, in three processes


@contextlib.contextmanager
def real(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[tuple[Server, httpx.Client]]:
    """A server in front of the real vLLM with the embedded target, and a client of it."""
    import fixtures_server

    fixtures_server.START = START
    known = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "SAMESEED_API_KEY": "", **(env or {})}
    own = ["--max-model-len", "1024", "--max-num-seqs", "4", "--per-request-spec-decode-metrics", "detailed"]
    own += ["--engine", "vllm", "--vllm-python", real_pythons()[0], "--vllm-args=--enforce-eager"]
    with serving(*own, *flags, env=known) as made, made.client() as http:
        yield made, http


def engine_of(pid: int) -> int:
    """The PID of vLLM's engine, a grandchild of the server: a child of the process that the server started."""
    below = [below for child in children(pid) for below in children(child)]
    found = [pid for pid in below if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1, found
    return found[0]


GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


def test_the_real_vllm_with_the_embedded_pair_and_after_a_kill() -> None:
    with real() as (made, http):
        fields = {"prompt": "def add(a, b):", **GREEDY}
        whole = http.post("/v1/completions", json=fields).json()
        told = whole["metrics"]["speculative_decoding"]
        assert whole["usage"]["completion_tokens"] == 24 and told["num_accepted_draft_tokens"] > 0
        assert sum(told["per_step_accepted"]) == told["num_accepted_draft_tokens"]
        text = whole["choices"][0]["text"]
        pieces = stream(http, fields["prompt"], **GREEDY)
        assert "".join(p["choices"][0]["text"] for p in pieces if p["choices"]) == text
        assert "vllm:spec_decode_num_drafts_total" in http.get("/metrics").text
        assert http.post("/tokenize", json={"prompt": "abc"}).json()["count"] > 0
        with ThreadPoolExecutor(3) as pool:
            long = [pool.submit(stream, http, f"{i}", **{**GREEDY, "max_tokens": 900}) for i in range(3)]
            wait_until(lambda: "sameseed:num_requests_inside 3.0" in http.get("/metrics").text)
            os.kill(engine_of(made.process.pid), signal.SIGKILL)
            assert all("error" in answer.result()[-1] for answer in long)
        wait_until(lambda: http.get("/ready").status_code == 503)
        wait_until(lambda: http.get("/ready").status_code == 200, START)
        assert http.post("/v1/completions", json=fields).json()["choices"][0]["text"] == text
        if look(real_pythons()[0]).cpu:
            refused = http.post("/v1/completions", json={**fields, "temperature": 0.5})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"


def test_the_real_vllm_with_a_head_on_two_workers() -> None:
    with real("--draft", "embedded-head", "--k", "3", "--tensor-parallel-size", "2") as (_, http):
        whole = http.post("/v1/completions", json={"prompt": "def add(a, b):", **GREEDY}).json()
        told = whole["metrics"]["speculative_decoding"]
        assert whole["usage"]["completion_tokens"] == 24 and told["num_accepted_draft_tokens"] > 0


OPTIONS: dict[str, dict[str, Any]] = {"ngram": {}, "suffix": {}, "embedded-draft": {}, "embedded-head": {"top_k": 1}}


@pytest.mark.parametrize("draft", OPTIONS)
def test_a_draft_is_worth_there_what_it_is_worth_here(
    draft: str, record_property: Callable[[str, object], None]
) -> None:
    """Tokens per round with a draft: vLLM's rate and ours, on the same prompts.

    Drafts with weights must agree. Other figures are only recorded: of equal n-grams vLLM copies the first one and we
    copy the last one, and suffix trees have different limits.
    """
    if draft == "suffix" and subprocess.run([real_pythons()[0], "-c", "import arctic_inference"]).returncode:
        pytest.skip("vLLM's suffix decoding needs the package arctic-inference, which is not there")
    llm = LLM("embedded", draft, draft_options=OPTIONS[draft], num_draft_tokens=3, policy="fixed", max_num_seqs=8)
    params = SamplingParams(max_tokens=96, ignore_eos=True, seed=0)
    prompts, rounds, accepted = [], 0, 0
    with real("--draft", draft, "--k", "3") as (_, http):
        for prompt in read_prompts(DEFAULT_PROMPTS, 33):
            ids = llm.tokenizer.encode(prompt.said)
            body = {"prompt": ids, **GREEDY, "max_tokens": 96, "return_token_ids": True}
            answer = http.post("/v1/completions", json=body).json()
            prompts.append(ids)
            told = answer["metrics"]["speculative_decoding"]
            rounds, accepted = rounds + told["num_spec_steps"], accepted + told["num_accepted_draft_tokens"]
    theirs = 1.0 + accepted / rounds
    counts = [c.metrics.spec for c in llm.generate(prompts, params)]
    ours = 1.0 + sum(m.num_accepted_tokens for m in counts) / sum(m.num_drafts for m in counts)
    record_property("tokens a round there and here", f"{theirs:.4f}, {ours:.4f}")
    assert accepted > 0
    if llm.config.spec.model:
        assert theirs / ours == pytest.approx(1.0, abs=0.05)  # a near-tie may change an output

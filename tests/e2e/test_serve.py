"""The server as clients see it: one text, however it is requested, and every field of the API works as documented."""

import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fixtures_server import events, gauge, serving, sockets, wait_until

from sameseed import LLM, SamplingParams
from sameseed.server.protocol import ChatFields, CompletionFields

PROMPTS = [f"{start} {end}" for start in ("the sum", "def add(", "für 你好", "🙂") for end in ("of", "is a, b")]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 24, "ignore_eos": True}
BLOCKS = 24  # blocks of 16 tokens: two of the longest texts fit, four sequences may run


@pytest.fixture(scope="module")
def server(pair_folders):
    target, draft = (str(p) for p in pair_folders)
    flags = ["--model", target, "--draft", draft, "--policy", "fixed", "--served-model-name", "tiny"]
    flags += ["--max-num-seqs", "4", "--num-blocks", str(BLOCKS), "--max-queue", "40"]
    with serving(*flags, "--per-request-spec-decode-metrics", "detailed") as made:
        yield made


@pytest.fixture(scope="module")
def llm(pair_folders):
    """The target alone, in this process: the texts to compare with."""
    return LLM(str(pair_folders[0]))


def complete(http, prompt, **fields):
    response = http.post("/v1/completions", json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    made = response.json()
    return made


def text_of(http, prompt, **fields):
    return str(complete(http, prompt, **fields)["choices"][0]["text"])


def streamed(http, prompt, **fields):
    body = {"prompt": prompt, "stream": True, **fields}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def refused(http, status=400, path="/v1/completions", **fields):
    response = http.post(path, json=fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error


def own(llm, prompt, **fields):
    return llm.generate(prompt, SamplingParams(**fields))[0].text


@pytest.mark.parametrize("prompt", PROMPTS[1::2])
def test_one_text_streamed_or_not_with_drafts_or_without(http, llm, prompt):
    alone = own(llm, prompt, **SAMPLED)
    assert text_of(http, prompt, **SAMPLED) == alone
    pieces = streamed(http, prompt, **SAMPLED)
    assert "".join(p["choices"][0]["text"] for p in pieces) == alone
    assert not any("\ufffd" in p["choices"][0]["text"] for p in pieces) or "\ufffd" in alone
    choices = ("off", "goodput", {"policy": "fixed", "num_draft_tokens": 7}, {"num_draft_tokens": 1})
    for choice in choices:
        assert text_of(http, prompt, speculation=choice, **SAMPLED) == alone
    assert text_of(http, llm.tokenizer.encode(prompt), **SAMPLED) == alone


def test_one_text_under_load(server, http, llm):
    """Four sequences run, but the cache fits two of the longest: some wait or are preempted, no text changes."""
    fields = {**SAMPLED, "max_tokens": 120}
    alone = [own(llm, p, **fields) for p in PROMPTS]
    before = gauge(http, "num_preemptions_total")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda p: text_of(http, p, **fields), PROMPTS))
    assert texts == alone
    assert gauge(http, "num_preemptions_total") > before
    wait_until(lambda: gauge(http, "kv_cache_usage_perc") == 0)


def test_choices_prompts_and_usage(http, llm):
    made = complete(http, PROMPTS[:2], n=3, **SAMPLED)
    assert [c["index"] for c in made["choices"]] == list(range(6))
    for p, prompt in enumerate(PROMPTS[:2]):
        expected = llm.generate(prompt, SamplingParams(n=3, **SAMPLED))
        assert [c["text"] for c in made["choices"][3 * p : 3 * p + 3]] == [c.text for c in expected]
    num_prompt = sum(len(llm.tokenizer.encode(p)) for p in PROMPTS[:2])
    assert made["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 6 * 24,
        "total_tokens": num_prompt + 6 * 24,
        "prompt_tokens_details": {"cached_tokens": 0},  # each prompt is shorter than a block
    }
    pieces = streamed(http, PROMPTS[:2], n=3, stream_options={"include_usage": True}, **SAMPLED)
    texts = [""] * 6
    for piece in pieces[:-1]:
        assert "usage" not in piece
        texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    assert texts == [c["text"] for c in made["choices"]]
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"] == made["usage"]
    assert {p["id"] for p in pieces} == {pieces[0]["id"]} and pieces[0]["id"] != made["id"]


def test_each_of_several_prompts_is_answered_as_alone(http):
    """Each draws its own seed, and has its own room in the context."""
    prompts, fields = [[5] * 250, [5, 6], [5, 6]], {"max_tokens": 24, "ignore_eos": True}
    made = complete(http, prompts, **fields)
    seeds = made["metrics"]["sameseed"]["seeds"]
    assert len(set(seeds)) == len(prompts)
    for prompt, seed, choice in zip(prompts, seeds, made["choices"], strict=True):
        assert text_of(http, prompt, seed=seed, **fields) == choice["text"]


def test_metrics_of_a_request(http):
    made = complete(http, "the sum of", **SAMPLED)["metrics"]
    spec = made["speculative_decoding"]
    assert len(spec["per_step_accepted"]) == spec["num_spec_steps"]
    assert sum(spec["per_step_accepted"]) == spec["num_accepted_draft_tokens"]
    assert sum(spec["per_step_drafted"]) == spec["num_draft_tokens"]
    assert sum(i * c for i, c in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"] > 0
    assert made["sameseed"]["time_split_s"]["draft"] > 0
    off = complete(http, "the sum of", speculation="off", **SAMPLED)["metrics"]
    assert off["speculative_decoding"] is None
    assert off["sameseed"]["undrafted"]["off"] > 10


def test_a_prefix_is_computed_once_for_each_tenant(http, llm):
    """Usage and metrics report how many prompt tokens were found in the prefix cache; a salt keeps requests apart."""
    prompt = " ".join(PROMPTS * 2)
    ids = llm.tokenizer.encode(prompt)
    asked = {"max_tokens": 4, "ignore_eos": True, "seed": 2}

    def found(**fields):
        made = complete(http, prompt, **asked, **fields)
        return made["choices"][0]["text"], made["usage"]["prompt_tokens_details"]["cached_tokens"]

    complete(http, "x", max_tokens=1)  # an answer brings the counters of all earlier requests
    before = {name: gauge(http, f"prefix_cache_{name}_total") for name in ("queries", "hits")}
    whole = (len(ids) - 1) // 16 * 16
    assert whole > 32
    first, second, salted, again = found(), found(), found(cache_salt="mine"), found(cache_salt="mine")
    assert [n for _, n in (first, second, salted, again)] == [0, whole, 0, whole]
    assert len({text for text, _ in (first, second, salted, again)}) == 1
    assert gauge(http, "prefix_cache_queries_total") - before["queries"] == 4 * len(ids)
    assert gauge(http, "prefix_cache_hits_total") - before["hits"] == 2 * whole
    streamed_usage = streamed(http, prompt, **asked, stream_options={"include_usage": True})[-1]["usage"]
    assert streamed_usage["prompt_tokens_details"] == {"cached_tokens": whole}
    several = complete(http, [prompt, prompt + " more"], n=2, **asked)["usage"]
    assert several["prompt_tokens"] == len(ids) + len(llm.tokenizer.encode(prompt + " more"))
    assert several["prompt_tokens_details"]["cached_tokens"] == whole + len(ids) // 16 * 16
    answer = http.post("/v1/responses", json={"input": prompt, "max_output_tokens": 2}).json()
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 0, "the template begins otherwise"


# What the panels of vLLM's dashboards select (examples/observability of vLLM 0.33). vLLM counts answers of its HTTP
# server under names without a prefix.
OF_VLLM = """
    vllm:request_success_total{finished_reason} vllm:prompt_tokens_total vllm:generation_tokens_total
    vllm:prompt_tokens_cached_total vllm:e2e_request_latency_seconds_bucket{le}
    vllm:time_to_first_token_seconds_bucket{le}
    vllm:inter_token_latency_seconds_bucket{le} vllm:request_time_per_output_token_seconds_bucket{le}
    vllm:request_prompt_tokens_bucket{le} vllm:request_generation_tokens_bucket{le} vllm:request_params_n_bucket{le}
    vllm:request_max_num_generation_tokens_sum vllm:request_params_max_tokens_bucket{le}
    vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
    vllm:request_inference_time_seconds_bucket{le} vllm:iteration_tokens_total_bucket{le} vllm:num_requests_running
    vllm:num_requests_waiting vllm:num_requests_waiting_by_reason{reason} vllm:kv_cache_usage_perc
    vllm:prefix_cache_hits_total vllm:prefix_cache_queries_total vllm:num_preemptions_total
    vllm:engine_sleep_state{sleep_state} vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total
    vllm:spec_decode_num_accepted_tokens_total vllm:spec_decode_num_accepted_tokens_per_pos_total{position}
    http_requests_total{handler,method,status} http_request_duration_seconds_bucket{handler,le}
"""
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "guides" / "grafana.json"


def test_dashboards_find_what_they_select(http):
    """Every series that a panel selects exists, with the labels that the panel filters and sums by."""
    complete(http, "the sum of", **SAMPLED)
    found = {}
    for line in http.get("/metrics").text.splitlines():
        name, _, labels = line.partition(" ")[0].partition("{")
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    for selector in OF_VLLM.split():
        name, _, labels = selector.rstrip("}").partition("{")
        assert found.get(name, set()) >= {*filter(None, labels.split(",")), *(["model_name"] if ":" in name else [])}, (
            name
        )
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        for expression in (target["expr"] for target in panel["targets"]):
            summed = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
            selected = re.findall(r"\b(vllm:\w+|http_\w+)(?:\{([^}]*)\})?", expression)
            known = set.union(*(found.get(name, set()) for name, _ in selected))
            assert all(found.get(name, set()) >= set(re.findall(r"(\w+)=~", labels)) for name, labels in selected)
            assert summed <= known and ("model_name" in known) == ("vllm:" in expression), panel["title"]


def test_fields_that_change_the_prompt_and_how_it_is_told(http, llm):
    text, short = "the sum of two numbers", {"max_tokens": 2, "temperature": 0}
    long = complete(http, [5] * 300, truncate_prompt_tokens=-1, max_tokens=8, temperature=0)
    assert long["usage"]["prompt_tokens"] == 256 - 8
    named = complete(http, text, logprobs=1, return_tokens_as_token_ids=True, **short)["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in (*named["tokens"], *named["top_logprobs"][0]))
    prints = {complete(http, text, seed=seed, **short)["system_fingerprint"] for seed in (1, 2)}
    assert len(prints) == 1 and prints.pop().startswith("fp_")
    chat = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True, **short}
    whole = http.post("/v1/chat/completions", json=chat).json()
    assert whole["prompt_token_ids"] == llm.tokenizer.chat(chat["messages"])
    with http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as response:
        assert events(response)[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_tokens_and_who_guessed_them(http):
    fields = {**SAMPLED, "return_token_ids": True}
    choice = complete(http, "für 你好 🙂", **fields)["choices"][0]
    assert choice["accepted"] == [int(level is not None) for level in choice["levels"]]
    assert set(choice["levels"]) == {None, "draft_model"}
    starts = choice["text_offset"]
    assert len(starts) == len(choice["token_ids"]) == len(choice["levels"]) == 24
    assert starts[0] == 0 and starts == sorted(starts) and starts[-1] <= len(choice["text"])
    pieces = [p["choices"][0] for p in streamed(http, "für 你好 🙂", **fields)]
    for key in ("token_ids", "accepted", "levels", "text_offset"):
        assert [value for piece in pieces for value in piece[key]] == choice[key]
    card = http.get("/v1/models").json()["data"][0]["speculation"]
    assert card == {"method": "draft_model", "levels": ["draft_model"], "policy": "fixed", "num_draft_tokens": 4}
    off = complete(http, "the", speculation="off", **fields)["choices"][0]
    assert set(off["levels"]) == {None}
    assert "levels" not in complete(http, "the", max_tokens=2)["choices"][0]


def test_choices_that_are_given(http):
    choices = ["yes", "no", "für 你好", "yes, of course"]
    fields = {"temperature": 1.5, "max_tokens": 30, "n": 8, "seed": 3}
    made = complete(http, "is it?", structured_outputs={"choice": choices}, **fields)
    texts = [c["text"] for c in made["choices"]]
    assert set(texts) <= set(choices) and len(set(texts)) > 1
    assert {c["finish_reason"] for c in made["choices"]} == {"stop"}
    same = complete(http, "is it?", structured_outputs={"choice": choices}, speculation="off", **fields)
    assert [c["text"] for c in same["choices"]] == texts
    chat = {"messages": [{"role": "user", "content": "is it?"}], "structured_outputs": {"choice": ["no"]}}
    assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == "no"
    assert refused(http, prompt="x", guided_choice=["a"])["param"] == "guided_choice"
    only = {"choice": ["a"]}
    assert text_of(http, "x", structured_outputs=only, ignore_eos=True, min_tokens=9) == "a", "it ends where it ends"
    assert "no token was left" in refused(http, prompt="x", structured_outputs=only, allowed_token_ids=[0])["message"]
    assert refused(http, prompt="x", structured_outputs={"lark": "a*"})["param"] == "structured_outputs"


def test_log_probabilities_and_echo(http, llm):
    prompt = "the sum of all parts"
    asked = {"temperature": 0, "max_tokens": 4, "logprobs": 2, "ignore_eos": True}
    made = complete(http, prompt, **asked)["choices"][0]
    mine = llm.generate(prompt, SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True))[0]
    assert made["logprobs"]["token_logprobs"] == [p.logprob for p in mine.logprobs]
    assert "".join(made["logprobs"]["tokens"]) == made["text"]
    echoed = complete(http, prompt, echo=True, **asked)["choices"][0]
    assert echoed["text"] == prompt + made["text"]
    lp = echoed["logprobs"]
    assert "".join(lp["tokens"]) == echoed["text"]
    assert [echoed["text"][o:].startswith(t) for o, t in zip(lp["text_offset"], lp["tokens"])] == [True] * len(
        lp["tokens"]
    )
    assert lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None
    special = llm.tokenizer.token(llm.tokenizer.special_ids[0])  # a text that spells it is repeated as it is
    spelled = complete(http, f"the sum{special} of all", echo=True, max_tokens=0, logprobs=0)["choices"][0]
    names, places = spelled["logprobs"]["tokens"], spelled["logprobs"]["text_offset"]
    assert special in names and all(map(spelled["text"].startswith, names, places))
    assert lp["token_logprobs"][-4:] == made["logprobs"]["token_logprobs"]
    assert all(v < 0 and math.isfinite(v) for v in lp["token_logprobs"][1:])
    for token, value, top in list(zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"]))[1:]:
        assert top[token] == value and 2 <= len(top) <= 3
    pieces = streamed(http, prompt, echo=True, **asked)
    assert "".join(p["choices"][0]["text"] for p in pieces) == echoed["text"]
    assert [v for p in pieces for v in p["choices"][0]["logprobs"]["token_logprobs"]] == lp["token_logprobs"]
    ids = llm.tokenizer.encode(prompt)
    scored = complete(http, [ids, ids[:3]], echo=True, logprobs=1, max_tokens=0, temperature=0)
    assert [c["text"] for c in scored["choices"]] == [prompt, llm.tokenizer.decode(ids[:3])]
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == lp["token_logprobs"][: len(ids)]
    assert scored["usage"]["completion_tokens"] == 0
    assert text_of(http, prompt, echo=True, temperature=0, max_tokens=4, ignore_eos=True) == echoed["text"]


def test_chat(http, llm):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the<|end|> sum 你好"}]
    fields = {**SAMPLED, "messages": messages, "logprobs": True, "top_logprobs": 1}
    made = http.post("/v1/chat/completions", json=fields).json()
    alone = llm.chat(messages, SamplingParams(**SAMPLED)).text
    choice = made["choices"][0]
    assert made["object"] == "chat.completion" and choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == alone
    entries = choice["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode("utf-8", "replace") == alone
    assert len(entries) == made["usage"]["completion_tokens"] == 24
    with http.stream("POST", "/v1/chat/completions", json={**fields, "stream": True, "max_completion_tokens": 24}) as r:
        pieces = events(r)
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == alone
    assert [e for p in pieces[1:] for e in p["choices"][0]["logprobs"]["content"]] == entries
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    long = http.post("/v1/chat/completions", json={"messages": messages, "ignore_eos": True, "temperature": 0}).json()
    assert long["usage"]["total_tokens"] == 256, "to the end of the context where nothing is said"


def test_responses(http, llm):
    asked = {"input": "the sum", "instructions": "be brief", "max_output_tokens": 20}
    asked |= {"temperature": 0, "ignore_eos": True}
    made = http.post("/v1/responses", json=asked).json()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the sum"}]
    alone = llm.chat(messages, SamplingParams(max_tokens=20, ignore_eos=True)).text
    assert made["output"][0]["content"][0]["text"] == alone
    assert made["status"] == "incomplete" and made["usage"]["output_tokens"] == 20
    with http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert [e["sequence_number"] for e in lines] == list(range(len(lines)))
    assert lines[0]["type"] == "response.created" and lines[-1]["type"] == "response.incomplete"
    assert "".join(e["delta"] for e in lines if e["type"] == "response.output_text.delta") == alone
    assert lines[-1]["response"]["output"][0]["content"] == made["output"][0]["content"]
    error = refused(http, 400, "/v1/responses", input="x", previous_response_id="resp_1")
    assert "not stored" in error["message"]


def test_tokens_and_models(http, llm):
    text = "für 你好 🙂"
    made = http.post("/tokenize", json={"prompt": text}).json()
    assert made["tokens"] == llm.tokenizer.encode(text) and made["count"] == len(made["tokens"])
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": text}
    chat = http.post(
        "/tokenize", json={"messages": [{"role": "user", "content": "x"}], "return_token_strs": True}
    ).json()
    assert chat["tokens"] == llm.tokenizer.chat([{"role": "user", "content": "x"}])
    assert len(chat["token_strs"]) == chat["count"]
    card = http.get("/v1/models").json()["data"][0]
    assert card.pop("speculation")["levels"] == ["draft_model"]
    fixed = {"id": "tiny", "object": "model", "owned_by": "sameseed", "max_model_len": 256}
    assert card == {**fixed, "created": card["created"]}
    assert http.get("/ready").status_code == http.get("/version").status_code == 200


def test_what_cannot_be_is_refused(http):
    assert refused(http, prompt="")["param"] == "prompt"
    assert refused(http, prompt="a b " * 400)["code"] == "context_length_exceeded"
    assert refused(http, prompt=["a", "a b " * 400])["code"] == "context_length_exceeded"
    assert refused(http, prompt="ab " * 10**6)["code"] == "context_length_exceeded"
    assert refused(http, prompt=["x"] * 5, n=16)["param"] == "n", "more than ever fit"
    assert refused(http, path="/detokenize", tokens=[304])["param"] == "tokens"


def test_the_document_names_every_field(http):
    document = http.get("/openapi.json").json()
    for path, kind in (("/v1/completions", CompletionFields), ("/v1/chat/completions", ChatFields)):
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
        assert schema["properties"].keys() == kind.model_fields.keys()
        assert {"200", "4XX", "5XX"} == operation["responses"].keys(), "422 is never sent"


def leave(server, body, read):
    """Send a request, read `read` bytes of the answer, hang up."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head.encode() + data)
        while read > 0:
            read -= len(connection.recv(min(read, 4096)))


@pytest.mark.parametrize(("stream", "read"), [(True, 700), (False, 0), (True, 0)])
def test_who_leaves_frees_the_engine(server, http, stream, read):
    body = {"prompt": "the sum of", "n": 16, "max_tokens": 240, "ignore_eos": True, "stream": stream}
    before = gauge(http, "generation_tokens_total")
    leavers = [threading.Thread(target=leave, args=(server, body, read)) for _ in range(2)]
    for thread in leavers:
        thread.start()
    for thread in leavers:
        thread.join()
    wait_until(lambda: gauge(http, "num_requests_running") + gauge(http, "num_requests_waiting") == 0)
    wait_until(lambda: gauge(http, "kv_cache_usage_perc") == 0)
    written = gauge(http, "generation_tokens_total") - before
    assert written < 2 * 16 * 240, "the engine wrote on for nobody"
    assert 'status="499"' in http.get("/metrics").text


def test_the_official_client(server, llm):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["tiny"]
    plain = {k: v for k, v in SAMPLED.items() if k != "ignore_eos"}
    more = {"ignore_eos": True}
    expected = own(llm, "the sum of", **SAMPLED)
    done = client.completions.create(model="tiny", prompt="the sum of", extra_body=more, **plain)
    assert done.choices[0].text == expected and done.usage.completion_tokens == 24
    stream = client.completions.create(model="tiny", prompt="the sum of", extra_body=more, stream=True, **plain)
    assert "".join(c.choices[0].text for c in stream) == expected
    messages = [{"role": "user", "content": "the sum"}]
    asked = {"model": "tiny", "input": messages, "max_output_tokens": 10, "temperature": 0.0}
    response = client.responses.create(**asked)
    kinds = [e.type for e in client.responses.create(stream=True, **asked)]
    assert response.output_text and kinds[-1] in ("response.completed", "response.incomplete")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="x", suffix="y")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_one_port_and_no_connection_outwards(server, http):
    """By /proc: the server has one listening socket and only connections accepted on it; the engine has no socket."""
    http.get("/version")
    mine = sockets(server.process.pid)
    assert [local for local, _, state in mine if state == "0A"] == [server.port]
    assert all(local == server.port for local, _, _ in mine)
    assert sockets(server.engine_pid) == []

"""Check V1 of the certificate: the server reads request fields as documented, and answers with the engine's text.

Bodies go through the whole application, in this process and without a network: routes, fields, frames, the engine,
replies. The meaning of the fields is written here a second time, independently of the server's code.
"""

import asyncio
import io
import json
import random
from dataclasses import dataclass, replace
from socket import socketpair
from typing import Any

from sameseed.laws.check import Found, check
from sameseed.request import Request, SamplingParams
from sameseed.server import frames
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient, Stream
from sameseed.server.config import ServerConfig
from sameseed.server.errors import bad_request
from sameseed.server.text import TextCodec
from sameseed.server.worker import Worker
from sameseed.spec.sampling import derive_seed

MOST_STEPS = 2_000  # engine steps for a request, after which it is given up
LENGTH, LONGEST = 12, 32  # tokens of an answer, if the request sets a length, and of a prompt
DEFAULTS = {"temperature": 1.0, "max_tokens": 16}  # of /v1/completions
DRAWN = 6  # most fields of a randomly drawn body
# Fields that must be refused, each alone.
REFUSED = (
    {"temperature": 2.1}, {"temperature": -0.1}, {"top_p": -0.1}, {"top_p": 1.1}, {"min_p": 1.5}, {"top_k": -2},
    {"n": 0}, {"presence_penalty": 2.5}, {"frequency_penalty": -2.5}, {"repetition_penalty": 0.0},
    {"logit_bias": {"x": 1.0}}, {"stop": ""}, {"logprobs": -1}, {"truncate_prompt_tokens": 0}, {"max_tokens": -1},
    {"best_of": 2}, {"speculation": {"num_draft_tokens": 65}},
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A body for `path`, and what the engine must get: prompt tokens, parameters, most draft tokens per round."""

    path: str
    body: dict[str, Any]
    prompt: tuple[int, ...]
    params: SamplingParams
    most: int | None = None


class Inside(EngineClient):
    """A client whose engine runs in this process: a submitted request runs at once. `adds` keeps the frames."""

    def __init__(self, subject):
        super().__init__("inside", {})
        self.engine, self.ends, spec = subject.engine(), socketpair(), subject.config.spec
        self.worker = Worker(self.ends[1])
        self.worker.engine = self.engine
        self.adds: list[frames.Add] = []
        size = self.engine.runner.model.config.vocab_size
        told = {"method": spec.method, "policy": spec.policy, "num_draft_tokens": spec.num_draft_tokens}
        limits = {"vocab_size": size, "max_model_len": self.engine.max_model_len, "max_num_seqs": subject.batch}
        self.facts = told | limits | {"levels": list(self.engine.level_names)}
        files = self.engine.tokenizer.as_files() | {"now": self.engine.tokenizer.now.isoformat()}
        self.text = TextCodec(files, size, self.engine.max_model_len)
        self.state = "ready"

    async def submit(self, add, grammar=b""):
        """Run a request to its end. It reaches the engine as a frame, and every piece comes back as a frame."""
        (add,) = frames.Unpacker[frames.Add](frames.Add).each(io.BytesIO(frames.pack(add)))
        self.adds.append(add)
        stream, back = Stream(add, lambda request_id: None), frames.Unpacker[frames.Deltas](frames.Deltas)
        self.worker._add(self.engine, add, self.worker.grammars.maker(add))
        steps = MOST_STEPS
        while self.engine.has_work and steps:
            steps -= 1
            deltas = self.engine.step()
            items = [(d.request_id, frames.piece(d)) for d in deltas]
            for frame in back.each(io.BytesIO(frames.pack(frames.Deltas(items, None)))):
                for _, piece in frame.items:
                    stream.push(piece)
        self.engine.abort(add.id)
        if stream.num_open:  # the engine refused or did not finish the request: its reader must not wait
            stream.push(bad_request("the engine does not take the request, or does not end it"))
        return stream

    def leave(self):
        """End threads and sockets."""
        for end in self.ends:
            end.close()


@check(
    "V1",
    "requests to a server",
    "0 requests read otherwise than they say, 0 answers that are not the engine's text, 0 bad fields taken",
    least={"requests": 40, "told_apart": 12, "refused": len(REFUSED)},
    remedy="take prompts whose text is longer, or a higher --effort",
    requests=2_000,
)
def requests(subject, effort):
    """Request fields, each alone and in random combinations, reach the engine with their documented meaning. The
    answer, whole or streamed, is the text that plain decoding writes with these parameters. Invalid fields are refused.
    """
    cases = made_cases(subject, random.Random(subject.seed), max(0, effort.of(2_000, 12)))
    zeros = {"misread": 0, "differing_answers": 0, "taken_though_bad": 0}
    found = Found({"requests": 0, "told_apart": 0, "refused": 0}, dict(zeros))
    asyncio.run(_ask_all(subject, found, cases))
    return found


async def _ask_all(subject, found, cases):
    inside = Inside(subject)
    app, _ = create_app(inside, ServerConfig(model_name="m", max_draft_tokens=64))
    bare = [replace(c, params=SamplingParams(**DEFAULTS, seed=c.params.seed)) for c in cases]
    truths = _plain(subject, [*cases, *bare])
    try:
        for turn, case in enumerate(cases):
            truth, usual = truths[turn], truths[len(cases) + turn]
            body, streamed = case.body | {"model": "m", "return_token_ids": True}, turn % 3 == 2
            if streamed:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            status, data = await call(app, case.path, body)
            found.sizes["requests"] += 1
            told = {k: v for k, v in case.body.items() if k not in ("prompt", "messages")}
            where = f"{case.path}, {json.dumps(told)[:160]}" + ", streamed" * streamed
            if status != 200:
                found.statistic["differing_answers"] += 1
                found.add(where, "an answer", data[:300].decode("utf-8", "replace"))
                continue
            _judge_add(found, where, case, inside.adds[-1])
            _judge_answer(found, where, case, truth, whole(data) if streamed else json.loads(data))
            found.sizes["told_apart"] += truth[0].token_ids != usual[0].token_ids
        for fields in (*REFUSED, *_beyond(subject)):
            before, bad = len(inside.adds), {"prompt": list(cases[0].prompt), "seed": subject.seed} | fields
            status, _ = await call(app, "/v1/completions", bad)
            right, taken = 404 if "model" in fields else 400, len(inside.adds) > before
            refused = status == right and not taken  # the engine gives 400 too, if a long answer does not fit
            found.sizes["refused"] += refused
            if not refused:
                found.statistic["taken_though_bad"] += 1
                found.add(f"{fields}"[:160], f"status {right}", f"{status}, from the engine" if taken else status)
        subject.over(inside.engine, [])
    finally:
        inside.leave()


def _beyond(subject):
    """Bodies with tokens outside the vocabulary, a prompt that fills the context, or another model's name."""
    size, few = subject.target.config.vocab_size, range(1, 4)
    lists = [{name: [size]} for name in ("banned_token_ids", "allowed_token_ids", "stop_token_ids", "prompt")]
    more = {"prompt": [t % 3 + 1 for t in range(subject.max_len)]}
    return [
        *lists, more, {"prompt": [-1]}, {"logit_bias": {str(size): 1.0}}, {"model": "another", "prompt": list(few)},
    ]  # fmt: skip


def made_cases(subject, rng, count):
    """Every field alone, then `count` bodies with several fields, then conversations if the model has a template."""
    alone = fields_of(subject, rng)
    nothing = dict.fromkeys(("temperature", "top_p", "stop", "n", "max_tokens", "seed_of_nobody"))
    chosen = [(one,) for one in [({}, {}), (nothing, {}), *alone]]
    chosen += [tuple(rng.sample(alone, rng.randint(2, min(DRAWN, len(alone))))) for _ in range(count)]
    cases = list[Case]()
    for i, parts in enumerate(chosen):
        own = subject.prompts[i % len(subject.prompts)]
        prompt = (own * LONGEST)[-LONGEST:]
        if i % 4 == 1:  # with the first and the last token of the vocabulary
            prompt = (*prompt[:-2], 0, subject.target.config.vocab_size - 1)
        seed = subject.seed * 1_000 + i
        body = {"seed": seed, "prompt": list(prompt)}
        params = {**DEFAULTS, "seed": seed}
        for fields, means in parts:
            body, params = body | fields, params | means
        if "cache_salt" in body:  # with the first prompt, whose KV rows are cached
            body |= {"prompt": list(cases[0].prompt), "cache_salt": f"salt {i}"}
            prompt = cases[0].prompt
        elif i % 4 == 3:  # as text, if its tokens fit
            text = subject.loaded.tokenizer.decode(list(prompt))
            ids = tuple(subject.loaded.tokenizer.encode(text))
            if ids and max(ids) < subject.vocab_size and len(ids) <= LONGEST:
                body["prompt"], prompt = text, ids
        if not _left(params, subject.target.config.eos_token_ids):  # fields that exclude all tokens together
            del body["allowed_token_ids"], params["allowed_token_ids"]
        if params["max_tokens"] > LONGEST and not _ends_at_once(params, subject.target.config.eos_token_ids):
            body["max_tokens"] = params["max_tokens"] = LENGTH  # more than a check's KV cache holds
        if (keep := body.get("truncate_prompt_tokens")) is not None:  # -1: what fits beside the answer
            prompt = prompt[-(keep if keep > 0 else max(1, subject.max_len - params["max_tokens"])) :]
        params["max_tokens"] = min(params["max_tokens"], subject.max_len - len(prompt))
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        most = {"off": 0, "fixed": 3}.get(body.get("speculation", {}).get("policy", ""))
        cases.append(Case("/v1/completions", body, prompt, SamplingParams(**params), most))
    return cases + _conversations(subject, [c for c in cases if len(c.body) > 3])


def _left(params, eos):
    """Whether a text with these parameters has a token to begin with."""
    allowed = params.get("allowed_token_ids")
    ends = {*eos, *params.get("stop_token_ids", ())} if params.get("min_tokens") else set[int]()
    return allowed is None or bool({*allowed} - {*params.get("banned_token_ids", ())} - ends)


def _ends_at_once(params, eos):
    """Whether only end tokens are allowed, and end the text. Then it is short, whatever max_tokens is."""
    only = set(eos).issuperset(params.get("allowed_token_ids") or [-1])
    return only and not params.get("ignore_eos") and not params.get("min_tokens")


def fields_of(subject, rng):
    """Fields as clients send them, each with the sampling parameters that it must lead to."""
    size, big, longest = subject.vocab_size, 2**63, subject.max_len
    end = min(subject.target.config.eos_token_ids)
    some, few = sorted(rng.sample(range(1, size), size // 4)), sorted(rng.sample(range(1, size), size // 3))
    usual = SamplingParams(max_tokens=2 * LENGTH, ignore_eos=True)
    text, tokens = next((c.text, c.token_ids) for c in subject.run(subject.plain(), subject.jobs(1, usual)))
    stops = [text[at : at + 2] for at in range(2, max(3, len(text) - 2), 5)][:3] or [" "]
    token, ends = rng.randrange(1, size), sorted(set(tokens[2:10]))
    same = [
        {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 2.0}, {"top_p": 0.2}, {"top_k": 2}, {"top_k": -1},
        {"min_p": 0.6}, {"repetition_penalty": 2.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
        {"max_tokens": 1}, {"max_tokens": LENGTH}, {"ignore_eos": True}, {"n": 2}, {"logprobs": 0}, {"logprobs": 3},
        {"skip_special_tokens": False},
    ]  # fmt: skip
    listed = (
        ("banned_token_ids", some),
        ("allowed_token_ids", [t for t in few if t not in some]),
        ("stop_token_ids", ends),
    )
    return [
        *((fields, fields) for fields in same), *(({name: tokens}, {name: tuple(tokens)}) for name, tokens in listed),
        ({"logit_bias": {str(token): 60.0}}, {"logit_bias": {token: 60.0}}),
        ({"logit_bias": {"1": -3.0, str(size - 1): 2.5}}, {"logit_bias": {1: -3.0, size - 1: 2.5}}),
        ({"stop": stops[0]}, {"stop": (stops[0],)}), ({"stop": stops}, {"stop": tuple(stops)}),
        ({"min_tokens": 6, "stop_token_ids": ends}, {"min_tokens": 6, "stop_token_ids": tuple(ends)}),
        ({"min_tokens": 40, "max_tokens": 9}, {"min_tokens": 40, "max_tokens": 9}), ({"seed": big + 5}, {"seed": 5}),
        ({"seed": -3}, {"seed": big - 3}), ({"truncate_prompt_tokens": 3}, {}), ({"truncate_prompt_tokens": -1}, {}),
        ({"echo": True}, {}), ({"echo": True, "logprobs": 2}, {"logprobs": 2}),
        ({"allowed_token_ids": [end], "max_tokens": longest}, {"allowed_token_ids": (end,), "max_tokens": longest}),
        ({"speculation": {"policy": "off"}}, {}), ({"speculation": {"policy": "fixed", "num_draft_tokens": 3}}, {}),
        ({"priority": 3}, {}), ({"cache_salt": "salt"}, {}),
    ]  # fmt: skip


def _conversations(subject, cases):
    """Chat requests with some of the same fields; `max_completion_tokens` takes precedence over `max_tokens`."""
    tokenizer, made = subject.loaded.tokenizer, list[Case]()
    if tokenizer.chat_template is None:
        return []
    messages = [{"role": "user", "content": "An iced latte, please."}]
    ids = tuple(tokenizer.encode(tokenizer.render_chat(messages), False))
    if max(ids) >= subject.vocab_size or len(ids) > subject.max_len - 64:
        return []
    for case in cases[::3]:
        if case.body.keys() & {"echo", "logprobs", "truncate_prompt_tokens", "prompt_logprobs"} or len(made) == 8:
            continue
        body = {k: v for k, v in case.body.items() if k not in ("prompt", "max_tokens")} | {"messages": messages}
        body |= {"max_tokens": 15, "max_completion_tokens": case.params.max_tokens}
        params = replace(case.params, max_tokens=min(case.params.max_tokens, subject.max_len - len(ids)))
        made.append(Case("/v1/chat/completions", body, ids, params, case.most))
    return made


def _plain(subject, cases):
    """The completions of plain decoding for each case."""
    jobs = [
        Request(f"v{i}-{n}", c.prompt, c.params, derive_seed(c.params.seed or 0, n))
        for i, c in enumerate(cases)
        for n in range(c.params.n)
    ]
    done = iter(subject.run(subject.plain(), jobs))
    return [[next(done) for _ in range(c.params.n)] for c in cases]


def _judge_add(found, where, case, add):
    """Compare what arrived at the engine with what the case asks for."""
    salt, priority = case.body.get("cache_salt"), case.body.get("priority") or 0
    drafts = None if add.speculation is None else add.speculation.of(64)
    for name, wanted, got in (
        ("parameters", case.params, add.params),
        ("prompt", [list(case.prompt)], add.prompts),
        ("priority", priority, add.priority),
        ("tenant of its own", salt is not None, ":" in add.tenant),
        ("draft tokens at most", case.most, drafts),
    ):
        if wanted != got:
            found.statistic["misread"] += 1
            found.add(f"{where}: {name}", wanted, got)


def _judge_answer(found, where, case, truth, answer):
    """Compare the answer with plain decoding's text, tokens and counts, and log-probabilities as JSON numbers."""
    chat = "messages" in case.body
    choices, size = answer["choices"], sum(len(c.token_ids) for c in truth)
    got = [answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"], len(choices)]
    wanted = [size, len(case.prompt), len(truth)]
    for choice, c in zip(choices, truth, strict=False):
        wanted += [c.text, list(c.token_ids), "stop" if c.finish_reason.value == "stop" else "length"]
        text = (choice["message"]["content"] if chat else choice["text"]) or ""
        got += [text[len(text) - len(c.text) :] if case.body.get("echo") else text]
        got += [choice["token_ids"], choice["finish_reason"]]
        if case.params.logprobs is not None and not chat:
            wanted += [t.logprob for t in c.logprobs or ()]
            got += choice["logprobs"]["token_logprobs"][len(case.prompt) if case.body.get("echo") else 0 :]
        if case.body.get("echo") and not chat:
            wanted.append(len(case.prompt) + len(c.token_ids))
            got.append(len(choice["logprobs"]["token_logprobs"]) if case.params.logprobs is not None else wanted[-1])
    if case.most is not None:
        spec = answer["metrics"]["speculative_decoding"]
        wanted.append(True)
        got.append(spec is None or (case.most > 0 and spec["num_draft_tokens"] <= case.most * spec["num_spec_steps"]))
    if "cache_salt" in case.body:
        wanted.append(0)
        got.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    if got != wanted:
        at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), 0)
        found.statistic["differing_answers"] += 1
        found.add(where, wanted[at : at + 1], got[at : at + 1])


def whole(data):
    """Join the events of a stream into one answer."""
    answer = {"choices": []}
    for line in data.decode().split("\n\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[len("data: ") :])
        answer |= {k: v for k, v in event.items() if k != "choices"}
        for part in event["choices"]:
            while len(answer["choices"]) <= part["index"]:
                blank = {"text": "", "token_ids": [], "message": {"content": ""}, "logprobs": {"token_logprobs": []}}
                answer["choices"].append(blank)
            choice = answer["choices"][part["index"]]
            choice["text"] += part.get("text") or ""
            choice["message"]["content"] += (part.get("delta") or {}).get("content") or ""
            choice["token_ids"] += part.get("token_ids") or []
            choice["logprobs"]["token_logprobs"] += (part.get("logprobs") or {}).get("token_logprobs") or []
            choice["finish_reason"] = part["finish_reason"]
    return answer


async def call(app, path, body):
    """POST a JSON body to the application, in this process; returns status and body of the answer."""
    data, sent, parts, status = json.dumps(body).encode(), False, [], 0

    async def receive():
        nonlocal sent
        if sent:  # no more data comes, and the client stays connected
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message):
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(parts)

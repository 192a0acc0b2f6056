"""Request fields reach the engine with their documented meaning, and the answer is the text of plain decoding.

Bodies go through the whole application, in this process and without a network: routes, fields, frames, the engine,
replies. The meaning of the fields is written here a second time, independently of the server's code.
"""

import io
from dataclasses import dataclass, replace
from socket import socketpair
from typing import Any

import pytest
from fixtures_server import events, visiting
from proof.mutants import toy_subject

from sameseed.request import FinishReason, Request, SamplingParams
from sameseed.server import frames
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient, Stream
from sameseed.server.config import ServerConfig
from sameseed.server.errors import bad_request
from sameseed.server.text import TextCodec
from sameseed.server.worker import Worker
from sameseed.spec.sampling import derive_seed
from sameseed.tokenizer import Tokenizer

LENGTH, LONGEST = 12, 32  # tokens of an answer, if the request sets a length, and of a prompt
DEFAULTS = {"temperature": 1.0, "max_tokens": 16}  # of /v1/completions


@dataclass(frozen=True)
class Case:
    """A body, and what the engine must get: prompt tokens, parameters, most draft tokens per round."""

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
        while self.engine.has_work:
            items = [(d.request_id, frames.piece(d)) for d in self.engine.step()]
            for frame in back.each(io.BytesIO(frames.pack(frames.Deltas(items, None)))):
                for _, piece in frame.items:
                    stream.push(piece)
        if stream.num_open:  # the engine refused the request: its reader must not wait
            stream.push(bad_request("the engine does not take the request"))
        return stream

    def leave(self):
        """End threads and sockets."""
        for end in self.ends:
            end.close()


@pytest.fixture
def subject(pair_folders):
    return toy_subject(Tokenizer.from_folder(pair_folders[0]))


@pytest.fixture
def inside(subject):
    made = Inside(subject)
    yield made
    made.leave()


def app_of(inside):
    return create_app(inside, ServerConfig(model_name="m", max_draft_tokens=64))[0]


async def test_fields_reach_the_engine_and_answers_are_its_text(subject, inside):
    """Every field alone, and many together; every third answer is streamed."""
    cases = made_cases(subject)
    bare = [replace(c, params=SamplingParams(**DEFAULTS, seed=c.params.seed)) for c in cases]
    written, usual = plain(subject, cases), plain(subject, bare)
    assert sum(a[0].token_ids != b[0].token_ids for a, b in zip(written, usual, strict=True)) > 12, "fields bite"
    async with visiting(app_of(inside)) as client:
        for turn, (case, truth) in enumerate(zip(cases, written, strict=True)):
            body, streamed = case.body | {"model": "m", "return_token_ids": True}, turn % 3 == 2
            if streamed:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, (body, response.text)
            add = inside.adds[-1]
            drafts = None if add.speculation is None else add.speculation.of(64)
            salted, priority = "cache_salt" in case.body, case.body.get("priority", 0)
            reached = (add.params, add.prompts, add.priority, ":" in add.tenant, drafts)
            assert reached == (case.params, [list(case.prompt)], priority, salted, case.most), body
            check_answer(case, truth, whole(response) if streamed else response.json())
    subject.over(inside.engine, [])
    assert not subject.leaks


async def test_what_cannot_be_is_refused(subject, inside):
    """Tokens outside the vocabulary, a prompt that fills the context, another model's name, values out of range."""
    size, longest = subject.target.config.vocab_size, subject.max_len
    lists = [{name: [size]} for name in ("banned_token_ids", "allowed_token_ids", "stop_token_ids", "prompt")]
    more = [
        {"prompt": [t % 3 + 1 for t in range(longest)]}, {"truncate_prompt_tokens": -1, "max_tokens": longest + 1},
        {"prompt": [-1]},
        {"logit_bias": {str(size): 1.0}}, {"model": "another"}, {"temperature": 2.1}, {"top_p": 1.1}, {"top_k": -2},
        {"presence_penalty": 2.5}, {"frequency_penalty": -2.5}, {"logprobs": -1}, {"truncate_prompt_tokens": 0},
        {"stop": ""}, {"best_of": 2},
    ]  # fmt: skip
    async with visiting(app_of(inside)) as client:
        for fields in lists + more:
            response = await client.post("/v1/completions", json={"prompt": [1, 2, 3]} | fields)
            assert response.status_code == (404 if "model" in fields else 400), fields
    assert not inside.adds, "the server knows without asking the engine"


def made_cases(subject):
    """Every field alone, and many together. The last prompt is the first one's, whose KV rows are cached, salted."""
    size, big, end = subject.vocab_size, 2**63, min(subject.target.config.eos_token_ids)
    some, others = list(range(1, size, 4)), list(range(2, size, 4))
    usual = SamplingParams(max_tokens=2 * LENGTH, ignore_eos=True)
    text, tokens = next((c.text, c.token_ids) for c in subject.run(subject.plain(), subject.jobs(1, usual)))
    stops, ends = [text[at : at + 2] for at in range(2, len(text) - 2, 5)][:3] or [" "], sorted(set(tokens[2:10]))
    same = [
        {}, {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 2.0}, {"top_p": 0.2}, {"top_k": 2},
        {"top_k": -1}, {"min_p": 0.6}, {"repetition_penalty": 2.5}, {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0}, {"max_tokens": 1}, {"max_tokens": LENGTH}, {"ignore_eos": True}, {"n": 2},
        {"logprobs": 0}, {"logprobs": 3}, {"skip_special_tokens": False},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.4, "n": 2, "logprobs": 1},
    ]  # fmt: skip
    listed = (("banned_token_ids", some), ("allowed_token_ids", others), ("stop_token_ids", ends))
    fields = [
        *((one, one) for one in same), *(({name: ids}, {name: tuple(ids)}) for name, ids in listed),
        (dict.fromkeys(("temperature", "top_p", "stop", "n", "max_tokens", "seed_of_nobody")), {}),
        ({"logit_bias": {"7": 60.0}}, {"logit_bias": {7: 60.0}}),
        ({"logit_bias": {"1": -3.0, str(size - 1): 2.5}}, {"logit_bias": {1: -3.0, size - 1: 2.5}}),
        ({"stop": stops[0]}, {"stop": (stops[0],)}), ({"stop": stops}, {"stop": tuple(stops)}),
        ({"min_tokens": 6, "stop_token_ids": ends}, {"min_tokens": 6, "stop_token_ids": tuple(ends)}),
        ({"min_tokens": 40, "max_tokens": 9}, {"min_tokens": 9, "max_tokens": 9}), ({"seed": big + 5}, {"seed": 5}),
        ({"seed": -3}, {"seed": big - 3}), ({"truncate_prompt_tokens": 3}, {}), ({"truncate_prompt_tokens": -1}, {}),
        ({"echo": True}, {}), ({"echo": True, "logprobs": 2}, {"logprobs": 2}),
        ({"allowed_token_ids": [end], "max_tokens": 999}, {"allowed_token_ids": (end,), "max_tokens": 999}),
        ({"speculation": {"policy": "off"}}, {}), ({"speculation": {"policy": "fixed", "num_draft_tokens": 3}}, {}),
        ({"priority": 3}, {}), ({"cache_salt": "salt"}, {}),
    ]  # fmt: skip
    cases = list[Case]()
    for i, (body, means) in enumerate(fields):
        prompt = (
            cases[0].prompt if "cache_salt" in body else (subject.prompts[i % len(subject.prompts)] * LONGEST)[:LONGEST]
        )
        params = {**DEFAULTS, "seed": i, **means}
        if (keep := body.get("truncate_prompt_tokens")) is not None:  # -1: what fits beside the answer
            prompt = prompt[-(keep if keep > 0 else max(1, subject.max_len - params["max_tokens"])) :]
        params["max_tokens"] = min(params["max_tokens"], subject.max_len - len(prompt))
        most = {"off": 0, "fixed": 3}.get(body.get("speculation", {}).get("policy", ""))
        cases.append(Case({"seed": i, "prompt": list(prompt), **body}, prompt, SamplingParams(**params), most))
    return cases


def plain(subject, cases):
    """The completions of plain decoding for each case."""
    jobs = [
        Request(f"v{i}-{n}", c.prompt, c.params, derive_seed(c.params.seed or 0, n))
        for i, c in enumerate(cases)
        for n in range(c.params.n)
    ]
    done = iter(subject.run(subject.plain(), jobs))
    return [[next(done) for _ in range(c.params.n)] for c in cases]


def check_answer(case, truth, answer):
    """Compare the answer with plain decoding's text, tokens, counts and log-probabilities."""
    usage, echo = answer["usage"], case.body.get("echo", False)
    size = sum(len(c.token_ids) for c in truth)
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (size, len(case.prompt)), case
    if "cache_salt" in case.body:
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, case
    if case.most is not None:
        spec = answer["metrics"]["speculative_decoding"]
        assert spec is None or 0 < spec["num_draft_tokens"] <= case.most * spec["num_spec_steps"], case
    for choice, c in zip(answer["choices"], truth, strict=True):
        end = "stop" if c.finish_reason == FinishReason.STOP else "length"
        text = choice["text"][len(choice["text"]) - len(c.text) :] if echo else choice["text"]
        assert (text, choice["token_ids"], choice["finish_reason"]) == (c.text, list(c.token_ids), end), case
        if case.params.logprobs is not None:
            values = choice["logprobs"]["token_logprobs"]
            assert len(values) == len(case.prompt) * echo + len(c.token_ids), case
            assert values[len(values) - len(c.token_ids) :] == [t.logprob for t in c.logprobs or ()], case


def whole(response):
    """Join the events of a stream into one answer."""
    answer, choices = {}, {}
    for event in events(response):
        answer |= event
        for part in event["choices"]:
            blank = {"text": "", "token_ids": [], "logprobs": {"token_logprobs": []}}
            choice = choices.setdefault(part["index"], blank)
            choice["text"] += part["text"]
            choice["token_ids"] += part["token_ids"]
            choice["logprobs"]["token_logprobs"] += (part.get("logprobs") or {}).get("token_logprobs", [])
            choice["finish_reason"] = part["finish_reason"]
    return answer | {"choices": [choices[i] for i in sorted(choices)]}

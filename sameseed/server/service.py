"""Service: turns the fields of a request into a stream of the engine's output. All routes share it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence as Seq
from functools import partial
from typing import Annotated, Any

from fastapi import Depends
from fastapi.responses import JSONResponse

from sameseed.errors import RequestError
from sameseed.models.harmony import Harmony
from sameseed.request import SamplingParams, Speculation
from sameseed.server import limits
from sameseed.server.answer import Answer, too_late
from sameseed.server.chat import ChatReply, ResponseReply
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.connection import INLINE, Visit, visit_of
from sameseed.server.errors import ApiError, bad_request
from sameseed.server.frames import Add, Render
from sameseed.server.gate import Gate
from sameseed.server.metrics import ServerMetrics
from sameseed.server.protocol import (
    ChatFields,
    Common,
    CompletionFields,
    DetokenizeFields,
    ResponseFields,
    SpeculationFields,
    TokenizeChatFields,
    TokenizeFields,
)
from sameseed.server.reasoning import Thoughts, marks_for
from sameseed.server.replies import CompletionReply, Reply
from sameseed.server.structured import GrammarSource
from sameseed.server.text import TextCodec
from sameseed.server.tools import FENCES, FORMATS, Parser


def sampling(fields: Common, text: TextCodec, room: int, bound: bool = False) -> SamplingParams:
    """The engine's parameters, with OpenAI's defaults. Raises ApiError 400.

    `room`: tokens left in the context beside the shortest prompt. `bound`: a grammar restricts the text and ends it.
    """
    bound = bound or fields.choice is not None
    wanted = fields.usual or room if fields.limit is None else max(1, fields.limit)
    max_tokens = min(wanted, room)  # at the context's end the text ends with finish_reason "length"
    bias = fields.logit_bias or {}
    if not all(k.isascii() and k.isdigit() and len(k) < 10 and k == str(int(k)) for k in bias):
        raise bad_request(f"logit_bias: keys must be token ids in 0..{text.vocab_size - 1}", "logit_bias")
    given: dict[str, Any] = {
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "logit_bias": {int(key): value for key, value in bias.items()},
        "ignore_eos": bool(fields.ignore_eos) and not bound,
        "min_tokens": 0 if bound else min(fields.min_tokens or 0, max_tokens),
        "skip_special_tokens": fields.skip_special_tokens is not False,
        "seed": None if fields.seed is None or fields.seed == -1 else fields.seed % 2**63,
    }
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    tokens = ("stop_token_ids", "banned_token_ids", "allowed_token_ids")
    for name in ("top_p", "top_k", "min_p", *penalties, "stop", *tokens, "n"):
        if getattr(fields, name) is not None:
            given[name] = getattr(fields, name)
    if fields.top_p == 0:  # the likeliest token alone
        given |= {"top_p": 1.0, "top_k": 1}
    try:
        params = SamplingParams(max_tokens=max_tokens, logprobs=fields.top, **given)
        params.check(text.vocab_size, text.max_model_len)
    except RequestError as error:
        raise bad_request(str(error), error.field) from None
    return params


def speculation(fields: Common, most: int) -> Speculation | None:
    """The request's own speculation settings; None if it has none.

    If its policy chooses lengths itself, drafts have up to `most` tokens unless the request says otherwise. Raises
    ApiError 400 for drafts of more than `most` tokens.
    """
    asked = fields.speculation
    if isinstance(asked, SpeculationFields) and (asked.num_draft_tokens or 0) > most:
        raise bad_request(f"speculation: num_draft_tokens may be {most} at most on this server", "speculation")
    if asked is None:
        return None
    policy, number = (asked, None) if isinstance(asked, str) else (asked.policy, asked.num_draft_tokens)
    return Speculation(policy, most if number is None and policy in ("history", "disco", "goodput") else number)


LAST_TOKENS = 16  # last tokens of a prompt, which may hold a mark that opens or closes the reasoning
Arrived = Annotated[Visit, Depends(visit_of)]  # no part of the API


class Service:
    """The engine's client, the gate (admission control) and the metrics. One object per server."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client, self.config = client, config
        self.gate = Gate(config.max_queue, len(config.keys))
        self.metrics = ServerMetrics(client, self.gate, config.model_name)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for the name of a model that is not served here."""
        if name is not None and name not in self.config.names:
            raise ApiError(404, "no model of this name here; see /v1/models", param="model", code="model_not_found")

    def loaded(self, model: str | None) -> TextCodec:
        """The model's tokenizer. Raises ApiError: 404 for a model that is not served here, 503 without an engine."""
        self.check_model(model)
        self.client.check_ready()
        text = self.client.text
        assert text is not None
        self.gate.max_running = self.client.facts["max_num_seqs"]
        return text

    async def completions(self, visit: Arrived, fields: CompletionFields) -> Answer:
        return await self._answer(visit, fields, CompletionReply)

    async def chat(self, visit: Arrived, fields: ChatFields) -> Answer:
        return await self._answer(visit, fields, ChatReply)

    async def responses(self, visit: Arrived, fields: ResponseFields) -> Answer:
        return await self._answer(visit, fields, ResponseReply)

    async def _answer(self, visit: Visit, fields: Common, kind: type[Reply]) -> Answer:
        """Admit a request at the gate, then tokenize it, then submit it to the engine."""
        text, timeout = self.loaded(fields.model), self.config.request_timeout
        with self.gate.enter(visit.tenant, fields.num_seqs, visit.size) as ticket:
            try:
                preparing = self._prepared(visit, fields, text, kind)
                reply, grammar = await asyncio.wait_for(preparing, timeout - (time.monotonic() - visit.arrived))
            except asyncio.TimeoutError:
                raise too_late(timeout) from None
            stream = await self.client.submit(reply.add, grammar)
            return Answer(reply, stream, ticket.pop_all(), self.metrics, timeout)

    async def _prepared(self, visit: Visit, fields: Common, text: TextCodec, kind: type[Reply]) -> tuple[Reply, bytes]:
        """The reply to come, and the frame of its grammar, if it has one. Raises ApiError."""
        large = visit.size > INLINE
        source, content = await limits.away(large, lambda: (fields.source(text.calls), fields.content()))
        parser = tool_parser(content.tools, text, source) if isinstance(content, Render) else None
        template = text.tokenizer.template_for(tools=True)
        reasoning = marks_for(template, text.calls, self.config.reasoning_parser)
        marks = {*(reasoning or ())[:2], *(FORMATS[text.calls].marks if parser and text.calls else ())}
        if isinstance(content, Render) and marks & text.hidden:
            fields.skip_special_tokens = False
        grammar = b"" if source is None else await self.client.grammars.compiled(source)
        keep = fields.keep(text.max_model_len)
        prompts = await text.prompts(content, fields.special, keep)
        params = sampling(fields, text, text.max_model_len - min(map(len, prompts)), source is not None)
        echoed = prompts if keep is not None or isinstance(content, Render) else content
        thoughts: Callable[[], Thoughts | Harmony] | None = None  # without them reasoning stays in the text
        if reasoning is not None and (thinks := fields.thinks(source)) is not None:
            end = text.tokenizer.decode(prompts[0][-LAST_TOKENS:], skip_special_tokens=False) if thinks else None
            thoughts = partial(Harmony, end) if text.calls == "openai" else partial(Thoughts, reasoning, end)
        own, facts = speculation(fields, self.config.max_draft_tokens), self.client.facts
        num_draft_tokens = facts["num_draft_tokens"] if facts["method"] != "none" else 0
        salt = "" if fields.cache_salt is None else f":{hashlib.sha256(fields.cache_salt.encode()).hexdigest()[:16]}"
        add = Add(
            visit.id,
            prompts,
            params,
            tenant=visit.tenant + salt,  # for the caches: what is kept of one tenant's texts never serves another's
            speculation=own,
            score_prompt=fields.repeats and fields.top is not None,
            choice=fields.choice,
            priority=fields.priority or 0,
            grammar=source and source.key,
            detailed=self.config.detailed,
            owner=visit.tenant,
        )
        reply = kind(
            add,
            fields,
            text,
            model=self.config.model_name,
            fingerprint=self.client.fingerprint,
            num_spec_tokens=own.of(num_draft_tokens) if own is not None and num_draft_tokens else num_draft_tokens,
            echoes=await text.spelt(echoed, params.skip_special_tokens) if fields.repeats else (),
            thoughts=thoughts,
            parser=parser,
        )
        return reply, grammar

    async def tokenize(self, visit: Arrived, fields: TokenizeFields | TokenizeChatFields) -> JSONResponse:
        text = self.loaded(fields.model)
        with self.gate.enter(visit.tenant, 0, visit.size):
            if isinstance(fields, TokenizeFields):
                ids = await text.encode(fields.prompt, fields.add_special_tokens is not False)
            else:
                content = await limits.away(visit.size > INLINE, fields.content)
                ids = await text.encode(content, bool(fields.add_special_tokens))

            def written() -> JSONResponse:
                strings = {"token_strs": [text.name(i) for i in ids]} if fields.return_token_strs else {}
                return JSONResponse({"count": len(ids), "max_model_len": text.max_model_len, "tokens": ids, **strings})

            return await limits.away(visit.size > INLINE, written)

    async def detokenize(self, visit: Arrived, fields: DetokenizeFields) -> JSONResponse:
        with self.gate.enter(visit.tenant, 0, visit.size):
            (text,) = await self.loaded(fields.model).spelt([fields.tokens], field="tokens")
            return JSONResponse({"prompt": text})

    async def tokenizer_info(self) -> JSONResponse:
        tokenizer = self.loaded(None).tokenizer
        named = {name: tokenizer.special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return JSONResponse({**named, "chat_template": tokenizer.chat_template})


def tool_parser(tools: Seq[Any], text: TextCodec, source: GrammarSource | None) -> Callable[[], Parser] | None:
    """Makes tool-call parsers, one per choice; None without tools. `source`: the answer's grammar. Raises ApiError."""
    if not tools:
        return None
    if text.calls is None:
        raise bad_request("this model's chat template has no tools, or none that this server can read", "tools")
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
    form = FORMATS[text.calls]
    if form.close and not (source is None or source.is_free):
        form = form._replace(marks=tuple(mark for mark in form.marks if mark not in FENCES), bare=False)
    return partial(Parser, schemas, form, source is not None and source.is_free)

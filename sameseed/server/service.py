"""Service: turns the fields of a request into a stream of the engine's output. All routes share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse

from sameseed.models.harmony import Harmony
from sameseed.request import SamplingParams
from sameseed.server import conversation, frames
from sameseed.server.answer import Answer, too_late
from sameseed.server.chat import ChatReply
from sameseed.server.client import EngineClient
from sameseed.server.completions import CompletionReply
from sameseed.server.config import ServerConfig
from sameseed.server.conversation import NamedTool
from sameseed.server.errors import ApiError, bad_request
from sameseed.server.frames import Add, Render
from sameseed.server.gate import Gate
from sameseed.server.grammars import Compiled
from sameseed.server.guard import visit_of
from sameseed.server.metrics import ServerMetrics
from sameseed.server.parameters import check_length, sampling, speculation, tenant
from sameseed.server.protocol import (
    ChatFields,
    Common,
    CompletionFields,
    DetokenizeFields,
    ResponseFields,
    TokenizeChatFields,
    TokenizeFields,
)
from sameseed.server.reading import INLINE, F, Intake, read
from sameseed.server.reasoning import PARSERS, Thoughts
from sameseed.server.replies import Reply
from sameseed.server.responses import ResponseReply
from sameseed.server.structured import GrammarSource
from sameseed.server.text import TextCodec
from sameseed.server.tools import FORMATS, Parser

COMPLETION_TOKENS = 16  # OpenAI's default
LAST_TOKENS = 16  # last tokens of a prompt, which may hold a mark that opens or closes the reasoning
TOKENIZE = (TokenizeFields, TokenizeChatFields)
T = TypeVar("T")


class Prepared(NamedTuple):
    """A request ready for the engine, and the reply to fill. `score`: log-probabilities of the prompt are wanted."""

    reply: Reply
    ids: list[list[int]]
    params: SamplingParams
    grammar: Compiled | None
    score: bool = False


class Service:
    """The engine's client, the gate (admission control) and the metrics. One object per server."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client, self.config = client, config
        self.gate = Gate(config.max_queue, len(config.keys), config.keys.limits)
        self._intake = Intake()
        self._threads = ThreadPoolExecutor(2, "bodies")  # more would only take turns on the interpreter lock
        self.metrics = ServerMetrics(client, self.gate, config.model_name, config.metrics_prefix)

    async def fields(self, request: Request, *kinds: type[F]) -> F:
        """The validated fields of a request's body: of the first kind, or of the last if the body has "messages".

        Raises ApiError.
        """
        async with self._intake.held(request) as body:
            kind = kinds[0 if body.get("messages") is None else -1]
            return await self.aside(request, lambda: read(kind, body))

    async def aside(self, request: Request, work: Callable[[], T]) -> T:
        """Run work whose cost grows with the request's body, in a thread if the body is large."""
        if visit_of(request).size <= INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def loaded(self, model: str | None) -> TextCodec:
        """The model's tokenizer. Raises ApiError: 404 for a model that is not served here, 503 without an engine."""
        if model is not None and model not in self.config.names:
            raise ApiError(
                404,
                f"no model of this name here; there is {' or '.join(map(repr, self.config.names))}",
                param="model",
                code="model_not_found",
            )
        self.client.check_ready()
        text = self.client.text
        assert text is not None
        self.gate.max_running = self.client.facts["max_num_seqs"]
        return text

    async def completions(self, request: Request) -> Answer:
        """Answer POST /v1/completions."""
        fields = await self.fields(request, CompletionFields)
        text, prompts = self.loaded(fields.model), fields.prompts
        num_seqs, with_logprobs = len(prompts) * (fields.n or 1), fields.logprobs is not None

        async def prepare(id: str) -> Prepared:
            grammar = await self._compiled(await self.aside(request, fields.source))
            keep = fields.keep(
                COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens, text.max_model_len
            )
            ids = await text.prompts(prompts, fields.add_special_tokens is not False, keep)
            room = text.max_model_len - max(len(i) for i in ids)
            max_tokens = min(COMPLETION_TOKENS, room) if fields.max_tokens is None else max(1, fields.max_tokens)
            params = sampling(fields, text, max_tokens, room, fields.logprobs, grammar is not None)
            shown = prompts if keep is None else ids
            texts = await text.spelt(shown, params.skip_special_tokens) if fields.echo else []
            more = self._shown(fields) | {"logprobs": with_logprobs, "hidden": fields.max_tokens == 0}
            echoes = list(zip(texts, ids, strict=True)) if fields.echo else []
            reply = CompletionReply(f"cmpl-{id}", self.config.model_name, text, num_seqs, echoes=echoes, **more)
            return Prepared(reply, ids, params, grammar, bool(fields.echo) and with_logprobs)

        return await self._answer(request, text, fields, num_seqs, prepare)

    async def chat(self, request: Request) -> Answer:
        """Answer POST /v1/chat/completions."""
        fields = await self.fields(request, ChatFields)
        text = self.loaded(fields.model)
        with_logprobs = bool(fields.logprobs or fields.top_logprobs)
        max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        check_length(fields.max_tokens or 0, text)
        named = isinstance(fields.tool_choice, NamedTool)

        def plain() -> tuple[GrammarSource | None, list[dict[str, Any]], Callable[[], Parser] | None]:
            return fields.compelled(text.calls), conversation.plain(fields.messages), tool_parser(fields.offered, text)

        async def prepare(id: str) -> Prepared:
            source, messages, parser = await self.aside(request, plain)
            if text.hides_marks and (parser is not None or text.calls == "openai"):
                fields.skip_special_tokens = False
            grammar = await self._compiled(source)
            asked, keep = Render(messages, fields.offered, fields.options), fields.keep(max_tokens, text.max_model_len)
            ids = await text.chat(asked, visit_of(request).size, bool(fields.add_special_tokens), keep)
            room = text.max_model_len - len(ids)
            top = (fields.top_logprobs or 0) if with_logprobs else None
            params = sampling(fields, text, room if max_tokens is None else max_tokens, room, top, grammar is not None)
            more = self._shown(fields) | {"logprobs": with_logprobs, "parser": parser, "named": named}
            more["one_call"] = named or fields.parallel_tool_calls is False
            if fields.separate_reasoning is not False:
                free = source is None or (source.field == "tools" and fields.tool_choice in (None, "auto"))
                more["thoughts"] = self._thoughts(text, ids, fields.choice is not None or not free)
            more["shows_thoughts"] = fields.include_reasoning is not False
            reply = ChatReply(f"chatcmpl-{id}", self.config.model_name, text, params.n, **more)
            return Prepared(reply, [ids], params, grammar)

        return await self._answer(request, text, fields, fields.n or 1, prepare)

    async def responses(self, request: Request) -> Answer:
        """Answer POST /v1/responses."""
        fields = await self.fields(request, ResponseFields)
        text = self.loaded(fields.model)

        async def prepare(id: str) -> Prepared:
            source, messages = await self.aside(request, lambda: (fields.source(), fields.messages))
            fields.skip_special_tokens = False if text.calls == "openai" else fields.skip_special_tokens
            grammar = await self._compiled(source)
            keep = fields.keep(fields.max_output_tokens, text.max_model_len)
            ids = await text.chat(Render(messages, [], fields.options), visit_of(request).size, keep=keep)
            room = text.max_model_len - len(ids)
            max_tokens = room if fields.max_output_tokens is None else fields.max_output_tokens
            params = sampling(fields, text, max_tokens, room, None, grammar is not None)
            more = self._shown(fields) | {"asked": fields}
            more["thoughts"] = self._thoughts(text, ids, grammar is not None or fields.choice is not None)
            reply = ResponseReply(f"resp_{id}", self.config.model_name, text, 1, **more)
            return Prepared(reply, [ids], params, grammar)

        return await self._answer(request, text, fields, 1, prepare)

    async def tokenize(self, request: Request) -> JSONResponse:
        """Answer POST /tokenize."""
        fields: TokenizeFields | TokenizeChatFields = await self.fields(request, *TOKENIZE)
        text, visit = self.loaded(fields.model), visit_of(request)
        with self.gate.enter(visit.tenant, 0, visit.size):
            if isinstance(fields, TokenizeFields):
                ids = await text.encode(fields.prompt, fields.add_special_tokens is not False)
            else:
                messages = await self.aside(request, lambda: conversation.plain(fields.messages))
                asked = Render(messages, [], fields.options)
                ids = await text.encode_chat(asked, visit.size, bool(fields.add_special_tokens))
            made: dict[str, Any] = {"count": len(ids), "max_model_len": text.max_model_len, "tokens": ids}

            def written() -> JSONResponse:
                strings = {"token_strs": [text.name(i) for i in ids]} if fields.return_token_strs else {}
                return JSONResponse(made | strings)

            return await self.aside(request, written)

    async def detokenize(self, request: Request) -> JSONResponse:
        """Answer POST /detokenize."""
        fields = await self.fields(request, DetokenizeFields)
        visit = visit_of(request)
        with self.gate.enter(visit.tenant, 0, visit.size):
            return JSONResponse({"prompt": (await self.loaded(fields.model).spelt([fields.tokens]))[0]})

    async def tokenizer_info(self) -> JSONResponse:
        """Answer GET /tokenizer_info."""
        tokenizer = self.loaded(None).tokenizer
        named = {name: tokenizer.special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return JSONResponse({**named, "chat_template": tokenizer.chat_template})

    async def _compiled(self, source: GrammarSource | None) -> Compiled | None:
        return None if source is None else await self.client.grammars.compiled(source)

    async def _answer(
        self,
        request: Request,
        text: TextCodec,
        fields: Common,
        num_seqs: int,
        prepare: Callable[[str], Awaitable[Prepared]],
    ) -> Answer:
        """Admit the request at the gate, then tokenize it, then submit it to the engine."""
        visit, timeout = visit_of(request), self.config.request_timeout

        async def packed() -> tuple[Prepared, Add, bytes]:
            made = await prepare(visit.id)
            made.reply.prompts, made.reply.max_tokens = made.ids, made.params.max_tokens
            made.reply.skip_special_tokens = made.params.skip_special_tokens
            add = Add(
                visit.id,
                made.ids,
                made.params,
                tenant=tenant(visit, fields.cache_salt),
                speculation=speculation(fields, self.config.max_draft_tokens),
                score_prompt=made.score,
                choice=fields.choice,
                priority=fields.priority or 0,
                grammar=None if made.grammar is None else made.grammar.key,
                detailed=self.config.detailed,
                owner=visit.tenant,
            )
            return made, add, await text.away(made.reply.num_prompt_tokens, lambda: frames.pack(add))

        with self.gate.enter(visit.tenant, num_seqs, visit.size) as ticket:
            try:
                made, add, data = await asyncio.wait_for(packed(), timeout - (time.monotonic() - visit.arrived))
            except asyncio.TimeoutError:
                raise too_late(timeout) from None
            reply = made.reply

            def used() -> int:  # nothing is charged for what the server itself failed to do
                failed = visit.outcome is None or visit.outcome >= 500
                return 0 if failed else reply.num_prompt_tokens + reply.num_output_tokens

            self.gate.reserve(visit.tenant, reply.num_prompt_tokens + num_seqs * reply.max_tokens, ticket, used)
            stream = self.client.submit(add, data, made.grammar)
            usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
            more: dict[str, Any] = {"events": bool(fields.stream), "usage": usage, "timeout": timeout}
            return Answer(reply, stream, ticket.pop_all(), self.metrics, **more)

    def _shown(self, fields: Common) -> dict[str, Any]:
        own = speculation(fields, self.config.max_draft_tokens)
        num_draft_tokens = self.client.facts["num_draft_tokens"] if self.client.facts["method"] != "none" else 0
        if own is not None and num_draft_tokens:
            num_draft_tokens = own.of(num_draft_tokens)
        return {
            "num_spec_tokens": num_draft_tokens,
            "tokens": bool(fields.return_token_ids),
            "ids_as_tokens": bool(fields.return_tokens_as_token_ids),
            "fingerprint": self.client.fingerprint,
        }

    def _thoughts(self, text: TextCodec, ids: list[int], bound: bool) -> Callable[[], Thoughts | Harmony] | None:
        """Factory of reasoning splitters, one per choice. `bound`: a format covers the whole text, so no reasoning."""
        name, harmony = self.config.reasoning_parser, text.calls == "openai"
        end = None if bound else text.tokenizer.decode(ids[-LAST_TOKENS:], skip_special_tokens=False)
        if name is None or harmony:
            return partial(Harmony, end) if harmony else None
        return partial(Thoughts, PARSERS[name], end)


def tool_parser(tools: Seq[dict[str, Any]], text: TextCodec) -> Callable[[], Parser] | None:
    """Factory of tool-call parsers, one per choice; None without tools. Raises ApiError 400 if the model has none."""
    if not tools:
        return None
    if (name := text.calls) is None:
        raise bad_request("this model's chat template has no tools, or none that this server can read", "tools")
    return partial(Parser, {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}, FORMATS[name])

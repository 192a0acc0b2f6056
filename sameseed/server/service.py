"""Service: from the fields of a request to a stream of the engine's pieces. What the routes have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from sameseed.request import SamplingParams
from sameseed.server import conversation, frames
from sameseed.server.answer import Answer, too_late
from sameseed.server.chat import ChatReply
from sameseed.server.client import EngineClient
from sameseed.server.completions import CompletionReply
from sameseed.server.config import ServerConfig
from sameseed.server.conversation import NamedTool
from sameseed.server.errors import ApiError, bad_request
from sameseed.server.frames import Add
from sameseed.server.gate import Gate
from sameseed.server.grammars import Compiled
from sameseed.server.guard import Visit, visit_of
from sameseed.server.intake import INLINE, Intake
from sameseed.server.metrics import ServerMetrics
from sameseed.server.parameters import check_length, sampling, speculation, tenant
from sameseed.server.protocol import (
    ChatFields,
    Common,
    CompletionFields,
    ResponseFields,
)
from sameseed.server.reading import F, read
from sameseed.server.replies import Reply
from sameseed.server.responses import ResponseReply
from sameseed.server.structured import GrammarSource
from sameseed.server.text import TextCodec
from sameseed.server.tools import PARSERS, Parser, parser_for

COMPLETION_TOKENS = 16  # OpenAI's default
T = TypeVar("T")


class Plain(NamedTuple):
    """What the engine and the template are told, of a body that may be large."""

    source: GrammarSource | None
    messages: Seq[dict[str, Any]] = ()
    tools: Seq[dict[str, Any]] = ()
    parser: Callable[[], Parser] | None = None


class Service:
    """The engine, its gate and what is counted; one a server."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client, self.config = client, config
        self.gate = Gate(config.max_queue, len(config.keys))
        self._intake = Intake()
        self._threads = ThreadPoolExecutor(2, "bodies")  # more would only take turns
        self.metrics = ServerMetrics(client, self.gate, config.model_name, config.metrics_prefix)

    async def fields(self, request: Request, *kinds: type[F]) -> F:
        """The checked fields of a request's body, of the first kind or, where it holds a conversation, the last.

        Raises ApiError.
        """
        async with self._intake.held(request) as body:
            kind = kinds[0 if body.get("messages") is None else -1]
            return await self.aside(request, lambda: read(kind, body))

    async def aside(self, request: Request, work: Callable[[], T]) -> T:
        """Work that grows with the request's body: in a thread where that is large."""
        if visit_of(request).size <= INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def loaded(self, model: str | None) -> TextCodec:
        """The tokenizer. Raises ApiError: 404 for a model that is not served here, 503 while there is no engine."""
        if model is not None and model != self.config.model_name:
            raise ApiError(
                404,
                f"no model {model!r} here; there is {self.config.model_name!r}",
                param="model",
                code="model_not_found",
            )
        self.client.check_ready()
        text = self.client.text
        assert text is not None
        self.gate.max_running = self.client.facts["max_num_seqs"]
        return text

    async def completions(self, request: Request) -> Answer:
        """/v1/completions."""
        fields = await self.fields(request, CompletionFields)
        text = self.loaded(fields.model)
        prompts, hidden = fields.prompts, fields.max_tokens == 0
        n = fields.n or 1

        def plain() -> Plain:
            return Plain(fields.source())

        async def encode(plain: Plain) -> list[list[int]]:
            return await text.prompts(prompts)

        async def make(id: str, ids: Seq[list[int]], plain: Plain) -> tuple[Reply, SamplingParams, bool]:
            room = text.max_model_len - max(len(i) for i in ids)
            asked = COMPLETION_TOKENS if fields.max_tokens is None else max(1, fields.max_tokens)
            if fields.max_tokens is None:
                asked = min(asked, room)
            params = sampling(fields, text, asked, room, fields.logprobs, plain.source is not None)
            texts = await text.spelt(prompts) if fields.echo else []
            reply = CompletionReply(
                f"cmpl-{id}",
                self.config.model_name,
                text,
                len(ids) * n,
                logprobs=fields.logprobs is not None,
                echoes=list(zip(texts, ids, strict=True)) if fields.echo else [],
                hidden=hidden,
                **self._shown(fields),
            )
            return reply, params, bool(fields.echo) and fields.logprobs is not None

        return await self._answer(request, text, fields, len(prompts) * n, plain, encode, make)

    async def chat(self, request: Request) -> Answer:
        """/v1/chat/completions."""
        fields = await self.fields(request, ChatFields)
        text = self.loaded(fields.model)
        with_logprobs = bool(fields.logprobs or fields.top_logprobs)
        asked = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        check_length(fields.max_tokens or 0, text)
        named = isinstance(fields.tool_choice, NamedTool)

        def plain() -> Plain:
            tools = fields.offered
            parser = tool_parser(tools, text)
            return Plain(grammar_source(fields, text), conversation.plain(fields.messages), tools, parser)

        async def encode(plain: Plain) -> list[list[int]]:
            return [await text.chat(plain.messages, plain.tools, visit_of(request).size)]

        async def make(id: str, ids: Seq[list[int]], plain: Plain) -> tuple[Reply, SamplingParams, bool]:
            room = text.max_model_len - len(ids[0])
            top = (fields.top_logprobs or 0) if with_logprobs else None
            params = sampling(fields, text, room if asked is None else asked, room, top, plain.source is not None)
            more = self._shown(fields)
            more |= {"logprobs": with_logprobs, "parser": plain.parser}
            more |= {"one_call": named or fields.parallel_tool_calls is False, "named": named}
            reply = ChatReply(f"chatcmpl-{id}", self.config.model_name, text, params.n, **more)
            return reply, params, False

        return await self._answer(request, text, fields, fields.n or 1, plain, encode, make)

    async def responses(self, request: Request) -> Answer:
        """/v1/responses."""
        fields = await self.fields(request, ResponseFields)
        text = self.loaded(fields.model)

        def plain() -> Plain:
            return Plain(fields.source(), fields.messages)

        async def encode(plain: Plain) -> list[list[int]]:
            return [await text.chat(plain.messages, size=visit_of(request).size)]

        async def make(id: str, ids: Seq[list[int]], plain: Plain) -> tuple[Reply, SamplingParams, bool]:
            room = text.max_model_len - len(ids[0])
            asked = room if fields.max_output_tokens is None else fields.max_output_tokens
            params = sampling(fields, text, asked, room, None, plain.source is not None)
            reply = ResponseReply(f"resp_{id}", self.config.model_name, text, 1, asked=fields, **self._shown(fields))
            return reply, params, False

        return await self._answer(request, text, fields, 1, plain, encode, make)

    async def _answer(
        self,
        request: Request,
        text: TextCodec,
        fields: Common,
        num_seqs: int,
        plain: Callable[[], Plain],
        encode: Callable[[Plain], Awaitable[list[list[int]]]],
        make: Callable[[str, Seq[list[int]], Plain], Awaitable[tuple[Reply, SamplingParams, bool]]],
    ) -> Answer:
        """Through the gate first; then tokens, then the engine."""
        visit = visit_of(request)

        async def prepared() -> tuple[Reply, Add, bytes, Compiled | None]:
            made = await self.aside(request, plain)
            grammar = None if made.source is None else await self.client.grammars.compiled(made.source)
            ids = await encode(made)
            reply, params, score = await make(visit.id, ids, made)
            reply.num_prompts, reply.num_prompt_tokens = len(ids), sum(map(len, ids))
            asked = self._add(visit, fields, ids, params)
            asked.score_prompt, asked.grammar = score, None if grammar is None else grammar.key
            return reply, asked, await text.away(reply.num_prompt_tokens, lambda: frames.pack(asked)), grammar

        timeout = self.config.request_timeout
        with self.gate.enter(visit.tenant, num_seqs, visit.size) as ticket:
            try:
                made = await asyncio.wait_for(prepared(), timeout - (time.monotonic() - visit.arrived))
            except asyncio.TimeoutError:
                raise too_late(timeout) from None
            reply, asked, packed, grammar = made
            stream = self.client.submit(asked, packed, grammar)
            more: dict[str, Any] = {"events": bool(fields.stream), "usage": fields.include_usage, "timeout": timeout}
            return Answer(reply, stream, ticket.pop_all(), self.metrics, **more)

    def _add(self, visit: Visit, fields: Common, ids: list[list[int]], params: SamplingParams) -> Add:
        return Add(
            visit.id,
            ids,
            params,
            tenant=tenant(visit, fields.cache_salt),
            speculation=speculation(fields),
            choice=fields.choice,
            priority=fields.priority or 0,
            detailed=self.config.detailed,
            owner=visit.tenant,
        )

    def _shown(self, fields: Common) -> dict[str, Any]:
        """What replies need to know for their metrics."""
        own = speculation(fields)
        num_draft_tokens = self.client.facts["num_draft_tokens"] if self.client.facts["method"] != "none" else 0
        if own is not None and num_draft_tokens:
            num_draft_tokens = own.of(num_draft_tokens)
        return {"num_spec_tokens": num_draft_tokens, "tokens": bool(fields.return_token_ids)}


def tool_parser(tools: Seq[dict[str, Any]], text: TextCodec) -> Callable[[], Parser] | None:
    """What makes a parser of tool calls for each choice. Raises ApiError 400 where the model knows no tools."""
    if not tools:
        return None
    name = parser_for(text.tokenizer.chat_template)
    if name is None:
        raise bad_request("this model's chat template has no tools, or none that this server can read", "tools")
    names = frozenset(t["function"]["name"] for t in tools)
    return partial(PARSERS[name], names)


def grammar_source(fields: ChatFields, text: TextCodec) -> GrammarSource | None:
    """What the answer must look like, by its format or by its tools. Raises ApiError 400 where both say so."""
    source, calls = fields.source(), fields.compelled(parser_for(text.tokenizer.chat_template))
    if calls is not None and (source is not None or fields.choice is not None):
        raise bad_request("a format, and tools that must be called (or are 'strict'), contradict each other", "tools")
    return calls or source

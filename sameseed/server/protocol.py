"""The request bodies of all routes as pydantic models: OpenAI's fields and sameseed's own, each with its range.

`read` validates a body. An error names the field and never repeats its value. Unknown fields are accepted, as by
OpenAI, and named in the debug log. Fields of other servers that would change the text (`habits.REQUEST`) are refused by
name, on routes that have no such field.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError

from sameseed.habits import REQUEST
from sameseed.server import limits, structured
from sameseed.server.conversation import WHOLE, Fields, Items, Messages, NamedTool, Tool, plain
from sameseed.server.errors import bad_request
from sameseed.server.frames import Render

log = logging.getLogger("sameseed.server")
LARGEST = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=LARGEST), WHOLE]
StopText = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
PromptText = Annotated[str, Field(min_length=1)]
Tokens = list[TokenId]
Prompt = list[str | list[int]] | Render  # texts or token ids, or a conversation


class ModelFields(Fields):
    """Base of every route's fields: the model's name, if the client gives it."""

    model: Annotated[str, Field(max_length=256)] | None = None


class SpeculationFields(Fields, extra="forbid"):
    """A request's own policy and maximum of draft tokens per round. They never change the text."""

    policy: Literal["off", "fixed", "history", "disco", "goodput"] | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=64), WHOLE] | None = None


class StreamOptions(Fields):
    """`include_usage`: end the stream with a chunk of usage and metrics."""

    include_usage: bool | None = None


class Common(ModelFields):
    """Fields of every route that generates text."""

    usual: ClassVar[int | None] = None  # tokens of an answer without a limit; None: as many as fit
    limited_by: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")  # the first that is given counts

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]], Field(max_length=limits.MAX_LOGIT_BIAS)]
        | None
    ) = None
    allowed_token_ids: Annotated[Tokens, Field(min_length=1, max_length=limits.MAX_ALLOWED)] | None = None
    banned_token_ids: Annotated[Tokens, Field(max_length=limits.MAX_ALLOWED)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=limits.MAX_STOP)] | None = None
    stop_token_ids: Annotated[Tokens, Field(max_length=limits.MAX_STOP_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST), WHOLE] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N), WHOLE] | None = None
    seed: Annotated[int, WHOLE] | None = None  # taken modulo 2**63; -1: a fresh one
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=LARGEST), WHOLE] | None = None  # -1: as many as fit
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=LARGEST), WHOLE] | None = None
    speculation: SpeculationFields | Literal["off", "fixed", "history", "disco", "goodput"] | None = None
    response_format: structured.ResponseFormat | None = None
    structured_outputs: structured.StructuredOutputs | None = None

    @property
    def limit(self) -> int | None:
        given = (getattr(self, name) for name in self.limited_by)
        return next((most for most in given if most is not None), None)

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens are wanted beside each; None: no log-probabilities."""
        return None

    @property
    def num_seqs(self) -> int:
        return self.n or 1

    @property
    def repeats(self) -> bool:
        return False

    @property
    def special(self) -> bool:
        return False

    def content(self) -> Prompt:
        """What the model reads. Raises ApiError 400."""
        raise NotImplementedError

    def thinks(self, source: structured.GrammarSource | None) -> bool | None:
        """May the answer begin with reasoning, beside this grammar? None: reasoning stays a part of the text."""
        return None

    @property
    def choice(self) -> list[str] | None:
        """The texts that the answer is chosen from; None: the answer is not restricted to given texts."""
        return self.structured_outputs.choice if self.structured_outputs else None

    def keep(self, max_model_len: int) -> int | None:
        """How many tokens at the end of the prompt are kept; None: all. Raises ApiError 400 if that is none."""
        if self.truncate_prompt_tokens == 0:
            raise bad_request("truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
        if self.truncate_prompt_tokens == -1 and (self.limit or 0) > max_model_len:
            why = f"leaves room for the answer, and max_tokens is beyond the context of {max_model_len}; lower it"
            raise bad_request(f"truncate_prompt_tokens: -1 {why}", "truncate_prompt_tokens", "context_length_exceeded")
        left = max(1, max_model_len - max(1, (self.usual if self.limit is None else self.limit) or 0))
        return left if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens

    def source(self, calls: str | None) -> structured.GrammarSource | None:
        """The grammar that the whole answer must match, or None. `calls`: how the model writes tool calls.

        Raises ApiError 400 if it is invalid, or given twice.
        """
        found = self._formats() + structured.of_outputs(self.structured_outputs)
        if len(found) + (self.choice is not None) > 1:
            names = [*(s.field for s in found), *(["a choice"] if self.choice else [])]
            raise bad_request(f"{', '.join(names)} contradict each other; give one", found[0].field)
        return found[0] if found else None

    def _formats(self) -> list[structured.GrammarSource]:
        return structured.of_format(self.response_format, "response_format")


class Templated(Fields):
    """Fields for the model's chat template."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=limits.MAX_OPTIONS)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=limits.MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The template's arguments except messages and tools. Raises ApiError 400 for names that may not be set."""
        named = {name: getattr(self, name) for name in ("documents", "add_generation_prompt", "reasoning_effort")}
        given = {name: value for name, value in named.items() if value is not None and value != []}
        if taken := sorted((self.chat_template_kwargs or {}).keys() & {"messages", "tools", "chat_template", *given}):
            raise bad_request(f"chat_template_kwargs may not set {taken[0]!r}", "chat_template_kwargs")
        return given | (self.chat_template_kwargs or {})


class CompletionFields(Common):
    """POST /v1/completions: `prompt` is a text, token ids, or a list of either."""

    usual: ClassVar[int | None] = 16  # OpenAI's default

    prompt: (
        PromptText
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[PromptText], Field(min_length=1, max_length=limits.MAX_PROMPTS)]
        | Annotated[list[Annotated[Tokens, Field(min_length=1)]], Field(min_length=1, max_length=limits.MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST), WHOLE] | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS), WHOLE] | None = None
    echo: bool | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def num_seqs(self) -> int:
        return len(self.content()) * (self.n or 1)

    @property
    def repeats(self) -> bool:
        return bool(self.echo)

    @property
    def special(self) -> bool:
        return self.add_special_tokens is not False

    def content(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatFields(Common, Templated):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS), WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # false: leave the reasoning out of the answer
    separate_reasoning: bool | None = None  # false: leave the reasoning in the text, as generated

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools in the form that a chat template takes; none if tool_choice is "none"."""
        wanted = self.tools if self.tools and self.tool_choice != "none" else []
        return [t.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for t in wanted]

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None

    @property
    def special(self) -> bool:
        return bool(self.add_special_tokens)

    def content(self) -> Render:
        return Render(plain(self.messages), self.offered, self.options)

    def thinks(self, source: structured.GrammarSource | None) -> bool | None:
        if self.separate_reasoning is False:
            return None
        optional = source is None or (source.field == "tools" and self.tool_choice in (None, "auto"))
        return optional and self.choice is None

    def source(self, calls: str | None) -> structured.GrammarSource | None:
        source, several = super().source(calls), self.parallel_tool_calls is not False
        beside = structured.GrammarSource("choice", "", "structured_outputs") if self.choice else source
        return structured.of_tools(self.tools or [], self.tool_choice, several, calls, beside) or source


class Reasoning(Fields):
    """`reasoning` of /v1/responses."""

    effort: Annotated[str, Field(max_length=32)] | None = None


class ResponseFields(Common):
    """POST /v1/responses, stateless: `input` holds the whole conversation."""

    limited_by: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: str | Items
    n: Annotated[int, Field(ge=1, le=1), WHOLE] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=LARGEST), WHOLE] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: bool | None = None
    text: structured.TextOptions | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=limits.MAX_OPTIONS)] | None = None
    reasoning: Reasoning | None = None

    def _formats(self) -> list[structured.GrammarSource]:
        return super()._formats() + structured.of_format(self.text.format if self.text else None, "text")

    def content(self) -> Render:
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        said = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else plain(self.input)
        effort = self.reasoning.effort if self.reasoning else None
        options = Templated(chat_template_kwargs=self.chat_template_kwargs, reasoning_effort=effort).options
        return Render(first + said, [], options)

    def thinks(self, source: structured.GrammarSource | None) -> bool | None:
        return source is None and self.choice is None


class TokenizeFields(ModelFields):
    """POST /tokenize of a text."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatFields(ModelFields, Templated):
    """POST /tokenize of a conversation, as the chat template writes it."""

    messages: Messages
    return_token_strs: bool | None = None

    def content(self) -> Render:
        return Render(plain(self.messages), [], self.options)


class DetokenizeFields(ModelFields):
    """POST /detokenize."""

    tokens: Tokens


_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", {"type": "text"})
_NEVER_NEUTRAL = ("enable_thinking", "thinking", "add_generation_prompt")  # false is a request too
F = TypeVar("F", bound=Fields)


def _kinds(base: type[Fields]) -> Iterator[type[Fields]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


_NAMES = frozenset(n for k in _kinds(Fields) for f, info in k.model_fields.items() for n in (f, info.alias) if n)


def read(kind: type[F], body: dict[str, Any]) -> F:
    """Validate a body as fields of this kind. Raises ApiError 400 that names one bad field."""
    for name in sorted(body.keys() & REQUEST.keys() - kind.model_fields.keys()):
        word, value = REQUEST[name], body[name]
        neutral = [*word.same, *([None] if name in _NEVER_NEUTRAL else _NEUTRAL)]
        neutral += [body.get("n") or 1] if name == "best_of" else []
        if not any(value == v and isinstance(v, bool) == isinstance(value, bool) for v in neutral):
            raise bad_request(f"{name!r} is not supported: {word.why}", param=name, code="unsupported_parameter")
    try:
        fields = kind.model_validate(body)
    except ValidationError as error:
        # If a field may have several forms, report the fault of the form that got furthest; never the value.
        faults = error.errors(include_url=False, include_input=False)
        fault = max(faults, key=lambda f: (not f["type"].endswith("_type"), len(f["loc"])))
        place = ""
        for part in fault["loc"]:  # skip names of forms, which stand between the fields' names
            if isinstance(part, int):
                place += f"[{part}]"
            elif part in _NAMES and not place.endswith(f".{part}"):
                place += f".{part}" if place else part
        param = str(fault["loc"][0])[:64] if fault["loc"] else None
        tags = fault["ctx"]["expected_tags"] if fault["type"] == "union_tag_invalid" else None
        said = re.sub("a valid dictionary.*", "an object", fault["msg"][:500])  # pydantic's words, without our class
        told = f"'type' must be one of {tags}" if tags else said  # that one's message repeats the value
        if fault["type"] == "extra_forbidden":
            told = f"{str(fault['loc'][-1])[:64]!r} is unknown here; leave it out"
        raise bad_request(f"{place or 'body'}: {told}", param, "invalid_value") from None
    unknown = sorted((fields.model_extra or {}).keys() - REQUEST.keys())
    if unknown:
        log.debug("fields that nobody reads: %s", ", ".join(repr(name[:64]) for name in unknown[:32]))
    return fields

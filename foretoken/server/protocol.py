"""What clients send: OpenAI's fields and our own, each with its range. Values are checked here, once, for all routes.

A field that nobody knows is accepted, as OpenAI does, and named in the debug log; one that would change the text and is
not offered is refused by its name.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from foretoken.request import Speculation
from foretoken.server import calls, limits, structured
from foretoken.server.conversation import (
    CallMessage,
    Fields,
    Function,
    Message,
    Messages,
    NamedTool,
    OfferedFunction,
    TextPart,
    Tool,
    ToolCall,
    plain,
)
from foretoken.server.errors import ApiError, bad_request

log = logging.getLogger("foretoken.server")
TOKEN = "x-token"  # marks token ids in a schema: how many there are is known once a model is loaded

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1, json_schema_extra={TOKEN: True})]
StopText = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
PromptText = Annotated[str, Field(min_length=1)]
Tokens = list[TokenId]

# Asked for by name, these would change what is written; silence would be a lie.
REFUSED = {
    "suffix": "text after the insertion is not offered; leave 'suffix' out",
    "best_of": "use 'n'; choices are not ranked",
    "prompt_embeds": "prompts are text or token ids",
    "functions": "use no 'functions'; they are not offered",
    "function_call": "use no 'functions'; they are not offered",
    "tools": "tools are for /v1/chat/completions",
    "grammar": "use 'guided_grammar'",
    "guided_whitespace_pattern": "space between parts of JSON is one character at most",
    "structural_tag": "use 'tools'",
    "chat_template": "the model's own chat template is used, never a request's",
    "chat_template_kwargs": "the model's own chat template is used, without arguments",
    "continue_final_message": "send the beginning of the answer to /v1/completions",
    "logits_processors": "programs in requests are not run",
    "bad_words": "use 'banned_token_ids' or 'logit_bias'",
    "use_beam_search": "beam search is not offered",
    "audio": "text only",
    "include_stop_str_in_output": "the stop text is always left out",
    "previous_response_id": "responses are not stored; send the whole conversation as 'input'",
    "background": "responses are not stored",
    "conversation": "responses are not stored; send the whole conversation as 'input'",
    "prompt": "a stored prompt is not offered",
}
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", {"type": "text"})


class SpeculationFields(Fields):
    """This request's own wish: a policy, the most draft tokens a round. Never changes the text."""

    policy: Literal["off", "fixed", "goodput"] | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = None

    def wish(self) -> Speculation:
        """As the engine takes it."""
        return Speculation(self.policy, self.num_draft_tokens)


class StreamOptions(Fields):
    """`include_usage`: a last chunk with usage and metrics."""

    include_usage: bool | None = None


class Common(Fields):
    """Fields that every route that writes text has."""

    model: Annotated[str, Field(max_length=256)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
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
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    seed: int | None = None  # any, modulo 2**63
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    speculation: SpeculationFields | Literal["off", "fixed", "goodput"] | None = None
    response_format: structured.ResponseFormat | None = None
    structured_outputs: structured.StructuredOutputs | None = None
    guided_choice: structured.Choices | None = None
    guided_json: Annotated[structured.Schema | None, Field(json_schema_extra=structured.SOME_SCHEMAS)] = None
    guided_regex: Annotated[str | None, Field(json_schema_extra=structured.SOME_PATTERNS)] = None
    guided_grammar: Annotated[str | None, Field(json_schema_extra=structured.SOME_GRAMMARS)] = None

    @property
    def choice(self) -> list[str] | None:
        """Texts of which the answer must be one."""
        return self.guided_choice or (self.structured_outputs.choice if self.structured_outputs else None)

    def source(self) -> structured.Source | None:
        """What the answer must look like. Raises ApiError 400 where that cannot be, or is said twice."""
        found = self._formats()
        found += structured.of_guides("guided_", self.guided_json, self.guided_regex, self.guided_grammar, None)
        if (s := self.structured_outputs) is not None:
            found += structured.of_guides("structured_outputs.", s.json_, s.regex, s.grammar, s.json_object)
        return structured.only(found, self.choice is not None)

    def _formats(self) -> list[structured.Source]:
        made = structured.of_format(self.response_format, "response_format")
        return [] if made is None else [made]

    @property
    def include_usage(self) -> bool:
        """Does a stream end with a chunk of usage and metrics?"""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionFields(Common):
    """POST /v1/completions: `prompt` is a text, token ids, or a list of either."""

    prompt: (
        PromptText
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[PromptText], Field(min_length=1, max_length=limits.MAX_PROMPTS)]
        | Annotated[list[Annotated[Tokens, Field(min_length=1)]], Field(min_length=1, max_length=limits.MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatFields(Common):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools as a chat template takes them."""
        wanted = self.tools if self.tools and self.tool_choice != "none" else []
        return [t.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for t in wanted]

    def compelled(self, parser: str | None) -> structured.Source | None:
        """What the tools make of the answer; `parser`: how the model writes calls. Raises ApiError 400."""
        return calls.source(self.tools or [], self.tool_choice, self.parallel_tool_calls is not False, parser)


class ResponseFields(Common):
    """POST /v1/responses, stateless: the whole conversation comes as `input`."""

    input: str | Messages
    n: Literal[1] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    store: bool | None = None
    text: structured.TextOptions | None = None

    def _formats(self) -> list[structured.Source]:
        made = None if self.text is None else structured.of_format(self.text.format, "text")
        return super()._formats() + ([] if made is None else [made])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation, instructions first."""
        first: list[dict[str, Any]] = []
        if self.instructions:
            first.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        return first + plain(self.input)


class TokenizeFields(Fields):
    """POST /tokenize of a text."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatFields(Fields):
    """POST /tokenize of a conversation, as the chat template writes it."""

    model: Annotated[str, Field(max_length=256)] | None = None
    messages: Messages
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """POST /detokenize."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: Tokens


F = TypeVar("F", bound=Fields)
_OFFERED = {
    CompletionFields: {"prompt"},
    TokenizeFields: {"prompt"},
    TokenizeChatFields: {"prompt"},
    ChatFields: {"tools"},
}


def read(kind: type[F], body: dict[str, Any]) -> F:
    """The fields of a request. Raises ApiError 400 that names the first bad one."""
    for name in sorted(body.keys() & REFUSED.keys()):
        if name not in _OFFERED.get(kind, ()) and not any(body[name] is v or body[name] == v for v in _NEUTRAL):
            if name == "best_of" and body[name] == (body.get("n") or 1):
                continue
            raise bad_request(f"{name!r} is not supported: {REFUSED[name]}", param=name, code="unsupported_parameter")
    try:
        fields = kind.model_validate(body)
    except ValidationError as error:
        raise _first_fault(error) from None
    unknown = sorted((fields.model_extra or {}).keys() - REFUSED.keys())
    if unknown:
        log.debug("fields that nobody reads: %s", ", ".join(repr(name[:64]) for name in unknown[:32]))
    return fields


_NAMES = frozenset(
    name
    for kind in (CompletionFields, ChatFields, ResponseFields, TokenizeFields, TokenizeChatFields, DetokenizeFields)
    for part in (
        kind,
        SpeculationFields,
        StreamOptions,
        Message,
        CallMessage,
        TextPart,
        Tool,
        OfferedFunction,
        ToolCall,
        Function,
        NamedTool,
        structured.StructuredOutputs,
        structured.SchemaFormat,
        structured.JsonSchema,
        structured.TextOptions,
    )
    for field, info in part.model_fields.items()
    for name in (field, info.alias)
    if name is not None
)


def _first_fault(error: ValidationError) -> ApiError:
    """Where a value got furthest before it was refused, among the forms that a field may have; never the value."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    fault = max(faults, key=lambda f: (not f["type"].endswith("_type"), len(f["loc"])))
    place = ""
    for part in fault["loc"]:  # names of the forms stand between those of the fields
        if isinstance(part, int):
            place += f"[{part}]"
        elif part in _NAMES:
            place += f".{part}" if place else part
    param = str(fault["loc"][0])[:64] if fault["loc"] else None
    return bad_request(f"{place or 'body'}: {fault['msg'][:500]}", param=param, code="invalid_value")

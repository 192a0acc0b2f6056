"""Frames between the server and its child processes: four bytes of length, then one struct of this file as MessagePack.

Frames hold numbers, text and lists, never code. A frame that does not fit its struct is refused.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, Generic, Literal, NamedTuple, TypeVar

import msgspec

from sameseed.config import SpecConfig
from sameseed.request import Delta, FinishReason, Metrics, SamplingParams, Speculation, TokenLogprob

MAX_FRAME = 64 * 2**20  # bytes; a longer one means that the other side has failed
LEAST_LOGPROB = -9999.0  # stands for minus infinity in JSON, as in other servers
PASS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens per pass: vLLM's buckets
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class FrameError(Exception):
    """A malformed frame, or one that is too long."""


class Frame(msgspec.Struct, tag=True):
    """Base of all frames. The struct's name is sent as a tag."""


class Load(Frame):
    """To the engine, as the first frame: the model, and the arguments of `make_config`."""

    model: str
    draft: SpecConfig | str | None
    settings: dict[str, Any]


class Add(Frame):
    """To the engine: add a request, to continue each prompt `params.n` times."""

    id: str
    prompts: list[list[int]]
    params: SamplingParams
    tenant: str = ""
    speculation: Speculation | None = None
    score_prompt: bool = False
    choice: list[str] | None = None  # the text must be one of these
    priority: int = 0  # lower goes first
    grammar: str | None = None  # key of the grammar that the text must match
    detailed: bool = False  # list every round's draft in the metrics
    owner: str = ""  # tenant that asked, for fair scheduling


class Abort(Frame):
    """To the engine: abort a request."""

    id: str


class Prepare(Frame):
    """To the engine: grammars will follow, so load the library for them."""


class LoadGrammar(Frame):
    """To the engine: a compiled grammar."""

    key: str
    data: str


class Forget(Frame):
    """To the engine: drop a grammar."""

    key: str


class EngineReady(Frame):
    """From the engine: the model is loaded, with this tokenizer and these limits."""

    tokenizer: dict[str, str]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: list[int] = []
    method: str = "none"
    policy: str = "fixed"
    levels: list[str] = []
    num_draft_tokens: int = 0


class Ended(msgspec.Struct, array_like=True):
    """The end of a sequence: why it ended, its costs, and, if it failed, the error.

    `ruled_out`: it failed because the request's own constraints left no token.
    """

    finish_reason: FinishReason
    seed: int
    metrics: Metrics
    ruled_out: bool = False
    error: str = ""


class Piece(msgspec.Struct, array_like=True):
    """New output of one sequence. Log-probabilities are [token, logprob, [[token, logprob]]], the last the likeliest.

    `levels`: for each token, the name of the drafter level that guessed it; None if no level did.
    `text_offset`: where in the text each token begins.
    """

    index: int
    text: str
    token_ids: list[int]
    levels: list[str | None]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    completion: Ended | None
    text_offset: list[int] = []
    reasoning: str = ""  # set by the server, if it splits the reasoning off the text


class Deltas(Frame):
    """From the engine: the output of one step by request id, and the counters if a request ended.

    A heartbeat has no output, but the seconds that the current step has taken so far.
    """

    items: list[tuple[str, Piece]]
    stats: dict[str, Any] | None
    step_seconds: float = 0.0


class Refused(Frame):
    """From the engine: the request is refused. `inside`: because of an error of the server's own."""

    id: str
    message: str
    inside: bool = False


class Failed(Frame):
    """From the engine: the model cannot be loaded."""

    message: str


class Setup(Frame):
    """To a helper, as the first frame: the model's tokenizer. `grammars`: compile grammars (else render templates)."""

    grammars: bool
    tokenizer: dict[str, str]
    vocab_size: int
    eos_token_ids: list[int]


class Render(NamedTuple):
    """A conversation to render with the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]  # further arguments of the template


class Job(Frame):
    """To a helper: compile a grammar of this kind (see `grammar.matching`); for "template", render a conversation.

    Its `source` is then a `Render` as JSON, whose whole numbers may be larger than MessagePack's.
    """

    kind: str
    source: str


class HelperResult(Frame):
    """From a helper: what a job made, or why it failed: because of the request, or perhaps because of the machine."""

    text: str
    fault: Literal["", "request", "machine"] = ""


ToEngine = Load | Add | Abort | Prepare | LoadGrammar | Forget
FromEngine = EngineReady | Deltas | Refused | Failed
ToHelper = Setup | Job


def pack(frame: Frame) -> bytes:
    """A frame as bytes. Raises FrameError for a frame that is too long."""
    body = _encode(frame)
    if len(body) > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


class Unpacker(Generic[T]):
    """Reads frames of these kinds: `each` from a file of a socket, one after the other, `next` from asyncio's stream.

    Both raise FrameError for bytes that are no such frame.
    """

    def __init__(self, kinds: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kinds).decode

    def each(self, file: BinaryIO) -> Iterator[T]:
        """The frames until the other side closes its end."""
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            if len(body := file.read(_size(head))) < _size(head):
                return
            yield self._frame(body)

    async def next(self, stream: asyncio.StreamReader) -> T:
        """The next frame. Raises IncompleteReadError once the other side has closed its end."""
        return self._frame(await stream.readexactly(_size(await stream.readexactly(_LENGTH.size))))

    def _frame(self, body: bytes) -> T:
        try:
            frame: T = self._decode(body)
            return frame
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(str(error)) from None


def _size(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes")
    return int(length)


def piece(delta: Delta) -> Piece:
    """A delta as a Piece."""
    c = delta.completion
    return Piece(
        delta.index,
        delta.text,
        list(delta.token_ids),
        list(delta.levels),
        [_logprob(p) for p in delta.logprobs],
        [_logprob(p) for p in delta.prompt_logprobs],
        None if c is None else Ended(c.finish_reason, c.seed, c.metrics, c.ruled_out, c.error),
        list(delta.text_offset),
    )


def _logprob(p: TokenLogprob) -> list[Any]:
    return [p.token_id, _number(p.logprob), [[token, _number(value)] for token, value in p.top]]


def _number(value: float) -> float:
    return max(value, LEAST_LOGPROB) if math.isfinite(value) else LEAST_LOGPROB

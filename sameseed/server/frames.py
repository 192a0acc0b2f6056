"""Frames between the server and its own processes: four bytes of length, then MessagePack of one struct of this file.

Nothing that could run: numbers, text, lists. A frame that does not fit its struct is refused.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Generic, TypeVar

import msgspec

from sameseed.config import SpecConfig
from sameseed.request import Delta, SamplingParams, Speculation, TokenLogprob

MAX_FRAME = 64 * 2**20  # bytes; a longer one means that the other side has failed
MAX_SCORES = 1024  # tokens of a prompt whose log-probabilities go in one frame
LEAST_LOGPROB = -9999.0  # what JSON has for minus infinity, as other servers write it
PASS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a pass: vLLM's buckets
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class FrameError(Exception):
    """The other side sent what no frame can be."""


class Frame(msgspec.Struct, tag=True):
    """Base of all frames; the struct's name goes with it."""


class Load(Frame):
    """To the engine, first: the model, and what `make_config` takes."""

    model: str
    draft: SpecConfig | str | None
    settings: dict[str, Any]


class Add(Frame):
    """To the engine: write each prompt `params.n` times."""

    id: str
    prompts: list[list[int]]
    params: SamplingParams
    tenant: str = ""
    speculation: Speculation | None = None
    score_prompt: bool = False
    choice: list[str] | None = None  # the text must be one of these
    priority: int = 0  # lower goes first
    grammar: str | None = None  # the text must match the grammar of this key
    detailed: bool = False  # every draft in the metrics
    owner: str = ""  # who asked, for fairness


class Abort(Frame):
    """To the engine: drop a request."""

    id: str


class Prepare(Frame):
    """To the engine: grammars will come."""


class LoadGrammar(Frame):
    """To the engine: a compiled grammar."""

    key: str
    data: str


class Forget(Frame):
    """To the engine: drop a grammar."""

    key: str


class EngineReady(Frame):
    """From the engine: it is loaded, with this tokenizer and these limits."""

    tokenizer: dict[str, str]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: list[int] = []
    method: str = "none"
    policy: str = "fixed"
    levels: list[str] = []
    num_draft_tokens: int = 0


class Piece(msgspec.Struct, array_like=True):
    """A delta of one sequence: log-probabilities are [token, logprob, [[token, logprob]]].

    `levels`: the name of the drafter's level that guessed each token, None for those that no level did.
    `text_offset`: where in the text each token begins.
    """

    index: int
    text: str
    token_ids: list[int]
    levels: list[str | None]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    completion: dict[str, Any] | None
    text_offset: list[int] = []
    reasoning: str = ""  # thoughts, where the server splits them off the text


class Deltas(Frame):
    """From the engine: what one step wrote, by request id; its counters, where a request ended."""

    items: list[tuple[str, Piece]]
    stats: dict[str, Any] | None


class Scores(Frame):
    """From the engine: log-probabilities of a prompt, which belong to the sequence's next piece."""

    id: str
    index: int
    items: list[Any]


class Beat(Frame):
    """From the engine: it is alive; how long its step has taken so far, and its counters."""

    step_seconds: float
    stats: dict[str, Any]


class Refused(Frame):
    """From the engine: it does not take this request. `message` None: by a fault of its own."""

    id: str
    message: str | None


class Failed(Frame):
    """From the engine: it cannot be loaded."""

    message: str


class Setup(Frame):
    """To a helper, first: the model's tokenizer. `grammars`: it compiles those (else it renders templates)."""

    grammars: bool
    tokenizer: dict[str, str]
    vocab_size: int
    eos_token_ids: list[int]


class Render(Frame):
    """To a helper: write a conversation by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any] = {}  # what else the template knows


class Compile(Frame):
    """To a helper: compile a grammar; `kind` as `grammar.matching` has it."""

    kind: str
    source: str


class Done(Frame):
    """From a helper: what came of its job."""

    text: str


class Rejected(Frame):
    """From a helper: the request is at fault."""

    message: str


class Stalled(Frame):
    """From a helper: the machine may be at fault."""

    message: str


ToEngine = Load | Add | Abort | Prepare | LoadGrammar | Forget
FromEngine = EngineReady | Deltas | Scores | Beat | Refused | Failed
ToHelper = Setup | Render | Compile
FromHelper = Done | Rejected | Stalled


def pack(frame: Frame) -> bytes:
    """A frame as bytes. Raises FrameError for one beyond all bounds."""
    body = _encode(frame)
    if len(body) > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


class Unpacker(Generic[T]):
    """Frames of these kinds from a stream of bytes that arrives in pieces."""

    def __init__(self, kinds: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The frames that are complete now. Raises FrameError."""
        self._buffer += data
        frames: list[T] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise FrameError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                frames.append(self._decode(self._buffer[_LENGTH.size : end]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise FrameError(str(error)) from None
            del self._buffer[:end]
        return frames


def scores(delta: Delta) -> list[Scores]:
    """Frames of a long prompt's log-probabilities, for which a piece has no room: no frame grows with the prompt."""
    found = delta.prompt_logprobs
    if len(found) <= MAX_SCORES:
        return []
    parts = ([_logprob(p) for p in found[at : at + MAX_SCORES]] for at in range(0, len(found), MAX_SCORES))
    return [Scores(delta.request_id, delta.index, part) for part in parts]


def piece(delta: Delta) -> Piece:
    """A delta as its reader gets it, without log-probabilities that go in frames of their own."""
    completion: dict[str, Any] | None = None
    if (c := delta.completion) is not None:
        completion = {"finish_reason": c.finish_reason.value, "ruled_out": c.ruled_out, "seed": c.seed}
        completion["metrics"] = c.metrics.as_dict()
    return Piece(
        delta.index,
        delta.text,
        list(delta.token_ids),
        list(delta.levels),
        [_logprob(p) for p in delta.logprobs],
        [_logprob(p) for p in delta.prompt_logprobs] if len(delta.prompt_logprobs) <= MAX_SCORES else [],
        completion,
        list(delta.text_offset),
    )


def _logprob(p: TokenLogprob) -> list[Any]:
    return [p.token_id, _number(p.logprob), [[token, _number(value)] for token, value in p.top]]


def _number(value: float) -> float:
    return max(value, LEAST_LOGPROB) if math.isfinite(value) else LEAST_LOGPROB

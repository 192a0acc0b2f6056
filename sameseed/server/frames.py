"""Frames between the server and its engine's process: four bytes of length, then JSON of a fixed layout.

Nothing that could run: numbers, text, lists. Each kind of frame is made and read here, so that both sides agree.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any

from sameseed.config import SpecConfig
from sameseed.request import Completion, Delta, SamplingParams, Speculation, TokenLogprob

MAX_FRAME = 64 * 2**20  # bytes; a longer one means that the other side has lost its mind
MAX_SCORES = 1024  # tokens of a prompt whose log-probabilities go in one frame
LEAST_LOGPROB = -9999.0  # what JSON has for minus infinity, as other servers write it
PASS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a pass: vLLM's buckets
PART = 4096  # numbers that are written at a time: meanwhile no other thread of the process gets on
_LENGTH = struct.Struct("<I")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode
Frame = dict[str, Any]


class FrameError(Exception):
    """The other side sent what no frame can be."""


def pack(frame: Frame) -> bytes:
    """A frame as bytes."""
    return _headed(_encode(frame).encode("utf-8"))


def pack_lists(frame: Frame, name: str, lists: Seq[Seq[int]]) -> bytes:
    """As `pack`, with one more field: lists of numbers, so long that they are written part by part."""
    written = ",".join(f"[{','.join(_parts(numbers))}]" for numbers in lists)
    return _headed(f"{_encode(frame)[:-1]},{_encode(name)}:[{written}]}}".encode())


def _parts(numbers: Seq[int]) -> Iterator[str]:
    return (_encode(numbers[at : at + PART])[1:-1] for at in range(0, len(numbers), PART))


def _headed(body: bytes) -> bytes:
    if len(body) > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Frames from a stream of bytes that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises FrameError."""
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise FrameError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                text = self._buffer[_LENGTH.size : end].decode()
                frame, stop = _decode(text)
            except ValueError as error:
                raise FrameError(str(error)) from None
            if stop != len(text) or not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
                raise FrameError("a frame without a type")
            frames.append(frame)
            del self._buffer[:end]
        return frames


def settings_to_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `make_config` as plain data; a SpecConfig becomes an object."""
    return {k: dataclasses.asdict(v) if isinstance(v, SpecConfig) else v for k, v in settings.items()}


def settings_from_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `settings_to_data`."""
    return {k: _spec(v) if k == "draft" and isinstance(v, dict) else v for k, v in data.items()}


def _spec(data: Mapping[str, Any]) -> SpecConfig:
    return SpecConfig(**{**data, "below": tuple(_spec(b) for b in data["below"])})


def params_to_data(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as plain data: only what differs from the defaults, token ids of biases as a list."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(params):
        value = getattr(params, f.name)
        if f.name == "logit_bias":
            if value:
                found["logit_bias"] = [[token, bias] for token, bias in value.items()]
        elif value != f.default:
            found[f.name] = value
    return found


def params_from_data(data: Mapping[str, Any]) -> SamplingParams:
    """The inverse of `params_to_data`. Raises RequestError."""
    values = dict(data)
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): float(bias) for token, bias in values["logit_bias"]}
    return SamplingParams(**values)


def wish_to_data(wish: Speculation | None) -> list[Any] | None:
    """A request's wish for its speculation."""
    return None if wish is None else [wish.policy, wish.num_draft_tokens]


def wish_from_data(data: list[Any] | None) -> Speculation | None:
    """The inverse of `wish_to_data`. Raises RequestError."""
    return None if data is None else Speculation(data[0], data[1])


def scores_first(delta: Delta) -> tuple[list[Frame], Delta]:
    """Frames of a long prompt's log-probabilities, and the delta without them: no frame grows with the prompt."""
    scores, id, index = delta.prompt_logprobs, delta.request_id, delta.index
    if len(scores) <= MAX_SCORES:
        return [], delta
    parts = [[_logprob(p) for p in scores[at : at + MAX_SCORES]] for at in range(0, len(scores), MAX_SCORES)]
    made = [{"type": "scores", "id": id, "index": index, "items": part} for part in parts]
    return made, dataclasses.replace(delta, prompt_logprobs=())


def delta_to_data(delta: Delta) -> list[Any]:
    """A delta of the engine as a list: its id, then the fields of a `Piece`."""
    return [
        delta.request_id,
        delta.index,
        delta.text,
        list(delta.token_ids),
        list(delta.levels),
        [_logprob(p) for p in delta.logprobs],
        [_logprob(p) for p in delta.prompt_logprobs],
        None if delta.completion is None else _completion(delta.completion),
        list(delta.text_offset),
    ]


def _logprob(p: TokenLogprob) -> list[Any]:
    return [p.token_id, _number(p.logprob), [[token, _number(value)] for token, value in p.top]]


def _number(value: float) -> float:
    return max(value, LEAST_LOGPROB) if math.isfinite(value) else LEAST_LOGPROB


def _completion(c: Completion) -> dict[str, Any]:
    return {
        "finish_reason": c.finish_reason.value,
        "ruled_out": c.ruled_out,
        "seed": c.seed,
        "num_prompt_tokens": len(c.prompt_token_ids),
        "metrics": c.metrics.as_dict(),
    }

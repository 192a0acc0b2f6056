"""A made-up server with OpenAI's API for tests of the promise checks: one letter is a token, one fault can be set."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

LETTERS = "abcdefghijkl"
BLOCK = 16  # letters per block of the prefix cache


def logprobs_after(text: str) -> dict[str, float]:
    """The made-up model: log-probabilities of each letter after a text."""
    digest = hashlib.sha256(text.encode()).digest()
    values = [3.0 * byte / 255 for byte in digest[: len(LETTERS)]]
    total = math.log(sum(map(math.exp, values)))
    return {letter: value - total for letter, value in zip(LETTERS, values)}


class Chunks(httpx.AsyncByteStream):
    """A stream that lets other tasks run before each part."""

    def __init__(self, server: PromiseServer, parts: list[bytes]) -> None:
        self.server, self.parts = server, parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            await asyncio.sleep(0)
            yield part

    async def aclose(self) -> None:
        self.server.inside -= 1


@dataclass
class PromiseServer:
    """`fault`: what the server does wrong; `lacks`: features that it does not have (seeds, logprobs, extras, ...).

    `says`: the field of a message that holds the text. `models`: another answer to what its models are.
    """

    fault: str = ""
    lacks: tuple[str, ...] = ()
    dies_after: int = 10**9
    changes_after: int = 10**9
    says: str = "content"
    models: httpx.Response | None = None
    lengths: tuple[int, ...] = ()  # lengths of answers, by length of the prompt; empty: as many tokens as allowed
    closed: bool = False
    inside: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)
    cached: dict[str, list[str]] = field(default_factory=dict)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if len(self.seen) >= self.dies_after:
            raise httpx.ConnectError("refused")
        if self.fault == "idle connections closed" and not self.closed and len(self.seen) % 5 == 4:
            self.closed = True
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        self.closed = False
        if request.url.path == "/v1/models":
            entry = {"id": "org/letters", "owned_by": "vllm", "max_model_len": 4096}
            return self.models or httpx.Response(200, json={"data": [entry]})
        body = json.loads(request.content)
        self.seen.append(body)
        if (refusal := self._refusal(request.url.path, body)) is not None:
            return httpx.Response(refusal[0], json={"error": {"message": refusal[1]}})
        if self.fault == "busy" and len(self.seen) > 20 and len(self.seen) % 2:
            return httpx.Response(503, headers={"retry-after": "0"}, json={"error": {"message": "busy"}})
        self.inside += 1
        await asyncio.sleep(60.0 if self.fault == "stalls" and len(self.seen) > 40 else 0)
        return httpx.Response(200, stream=Chunks(self, self._answer(body)))

    def _refusal(self, path: str, body: dict[str, Any]) -> tuple[int, str] | None:
        if "completions" in self.lacks and "chat" not in path:
            return 404, "no such route"
        if "completions of this model" in self.lacks and "chat" not in path:
            return 400, "this model has conversations only"
        if self.fault == "max_tokens":
            return 400, "Unsupported parameter: 'max_tokens' is not supported with this model."
        if "seeds" in self.lacks and "seed" in body:
            return 400, "seed is not supported"
        if "extras" in self.lacks and "cache_salt" in body:
            return 422, "extra fields"
        if "logprobs" in self.lacks and body.get("logprobs"):
            return 400, "log-probabilities are off"
        return None

    def _prompt(self, body: dict[str, Any]) -> str:
        given = body.get("prompt", body.get("messages"))
        if isinstance(given, str):
            return given
        return "".join(map(chr, given)) if isinstance(given[0], int) else "".join(m["content"] for m in given)

    def _answer(self, body: dict[str, Any]) -> list[bytes]:
        """The parts of an answer: events, or one body."""
        prompt, hit = self._prompt(body), self._hit(body)
        noise = self._noise(body)
        tokens: list[tuple[str, dict[str, float]]] = []
        most = self.lengths[len(prompt) % len(self.lengths)] if self.lengths else 10**9
        for _ in range(min(most, body["max_tokens"])):
            values = logprobs_after(prompt + "".join(t for t, _ in tokens))
            values |= {t: v + values[t] for t, v in self._bias(body).items()}
            tokens.append((self._choose(values, body, noise, len(tokens)), values))
        text = "".join(t for t, _ in tokens)
        if self._wrong(body, hit):
            tokens[5] = ("z" if tokens[5][0] != "z" else "y", tokens[5][1]) if len(tokens) > 5 else tokens[-1]
            text = text[:5] + "z" + text[6:]
        return self._parts(body, prompt, text, tokens, hit)

    def _bias(self, body: dict[str, Any]) -> dict[str, float]:
        return {chr(int(token)): value for token, value in body.get("logit_bias", {}).items()}

    def _noise(self, body: dict[str, Any]) -> random.Random:
        ignored = self.fault == "seed ignored" or (self.fault == "seed under load" and self.inside > 1)
        return random.Random(len(self.seen) if ignored else str(body.get("seed", len(self.seen))))

    def _choose(self, values: dict[str, float], body: dict[str, Any], noise: random.Random, at: int) -> str:
        best = sorted(values, key=lambda t: -values[t])
        if body["temperature"] > 0:
            return best[0] if self.fault == "no sampling" else noise.choice(best[:4])
        if self.fault == "ties" and self.inside > 1 and values[best[0]] - values[best[1]] < 0.05 and at == 0:
            return best[1]
        if self.fault == "equal tokens" and self.inside > 1 and self._bias(body) and at == 0:
            return best[1]
        penalized = self.fault == "penalty unless told otherwise" and body.get("repetition_penalty") != 1.0
        return best[1] if (penalized or self.fault == "not the likeliest") and at == 3 else best[0]

    def _wrong(self, body: dict[str, Any], hit: int) -> bool:
        """Whether this answer gets a wrong text."""
        if body["temperature"] > 0:
            return False
        return {
            "repeat": len(self.seen) % 2 == 0,
            "load": self.inside > 1,
            "stream": not body["stream"] and not body.get("logprobs"),
            "prefix": hit > 0,
            "speculation": body.get("speculation") == "fixed",
            "text with log-probabilities": bool(body.get("logprobs")),
            "later": len(self.seen) > self.changes_after,
        }.get(self.fault, False)

    def _hit(self, body: dict[str, Any]) -> int:
        prompt, known = self._prompt(body), self.cached.setdefault(body.get("cache_salt", ""), [])
        same = max((next((i for i, (a, b) in enumerate(zip(p, prompt)) if a != b), len(p)) for p in known), default=0)
        known.append(prompt)
        return 0 if "hits" in self.lacks else min(same, len(prompt)) // BLOCK * BLOCK

    def _parts(
        self, body: dict[str, Any], prompt: str, text: str, tokens: list[tuple[str, dict[str, float]]], hit: int
    ) -> list[bytes]:
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(text)}
        usage |= {} if "hits" in self.lacks else {"prompt_tokens_details": {"cached_tokens": hit}}
        end: dict[str, Any] = {"usage": usage}
        if "speculation" not in self.lacks and "extras" not in self.lacks:
            drafted = {"num_draft_tokens": len(text), "num_accepted_draft_tokens": len(text) // 2}
            asked = sum(b.get("speculation") == "off" for b in self.seen)
            off = body.get("speculation") == "off" and (self.fault != "drafts though off" or asked == 1)
            end["metrics"] = {"speculative_decoding": None if off else drafted}
        ids = {"token_ids": [ord(c) for c in text], "prompt_token_ids": [ord(c) for c in prompt]}
        ids = ids if body.get("return_token_ids") else {}
        chat = "messages" in body
        if not body["stream"]:
            said = {"message": {self.says: text}} if chat else {"text": text}
            scores = self._scores(body, prompt, tokens)
            choice = {"index": 0, **said, "finish_reason": "length", **ids, "logprobs": scores}
            return [json.dumps({"choices": [choice], **end}).encode()]
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, **({"delta": {self.says: c}} if chat else {"text": c}), "finish_reason": None}]}
            for c in text
        ]
        events[-1]["choices"][0] |= {"finish_reason": "length", **ids}
        lines = [b"data: " + json.dumps(e).encode() + b"\n\n" for e in [*events, {"choices": [], **end}]]
        return [*lines, b"data: [DONE]\n\n"]

    def _scores(self, body: dict[str, Any], prompt: str, tokens: list[tuple[str, dict[str, float]]]) -> Any:
        """Log-probabilities in the format of the route."""
        if not body.get("logprobs"):
            return None
        if body.get("echo"):
            shift = 0.5 if self.fault == "scored otherwise" else 0.0
            before = [(c, logprobs_after(prompt[:i]).get(c, -9.0) - shift) for i, c in enumerate(prompt)]
            rows = [(c, value, {c: value}) for c, value in before] + [(t, v[t], v) for t, v in tokens]
        else:
            rows = [(t, v.get(t, -9.0), self._top(v)) for t, v in tokens]
        if self.fault == "zeros for drafted tokens":
            rows = [(t, 0.0, {}) if n % 3 == 2 else (t, v, top) for n, (t, v, top) in enumerate(rows)]
        if self.fault == "tokens of another text":
            rows = rows[1:]
        if body.get("return_tokens_as_token_ids"):
            rows = [(_named(t), v, {_named(t): v for t, v in top.items()}) for t, v, top in rows]
        if "messages" in body:
            rows = [*([("<think>", -0.1, {"<think>": -0.1})] if self.says == "reasoning" else ()), *rows]
            content = [{"token": t, "logprob": v, "top_logprobs": _entries(top)} for t, v, top in rows]
            return {"content": content}
        values = [v for _, v, _ in rows]
        return {"tokens": [t for t, *_ in rows], "token_logprobs": values, "top_logprobs": [top for *_, top in rows]}

    def _top(self, values: dict[str, float]) -> dict[str, float]:
        best = dict(sorted(values.items(), key=lambda item: -item[1])[:5])
        return {t: v + 1.5 for t, v in best.items()} if self.fault == "sums above 1" else best


def _entries(top: dict[str, float]) -> list[dict[str, Any]]:
    return [{"token": t, "logprob": v} for t, v in top.items()]


def _named(token: str) -> str:
    return f"token_id:{ord(token)}"

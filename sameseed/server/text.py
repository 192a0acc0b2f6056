"""Text and tokens in the server. Long texts are encoded in threads, and templates run elsewhere, off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from sameseed.errors import RequestError
from sameseed.request import check_token_ids
from sameseed.server import limits
from sameseed.server.errors import ApiError, bad_request
from sameseed.server.frames import Render
from sameseed.server.tools import FORMATS, parser_for
from sameseed.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sameseed.grammar import Vocabulary

T = TypeVar("T")
Writer = Callable[[Render, int], Awaitable[str]]
INLINE = 1000  # characters that are encoded on the event loop: handing them to a thread would take longer
SLACK = 4  # a factor: a normalizer may shorten a text, but not by this much


class TextCodec:
    """A loaded model's tokenizer, with the model's limits."""

    def __init__(
        self, files: Mapping[str, str], vocab_size: int, max_model_len: int, render: Writer | None = None
    ) -> None:
        """`render` renders a conversation with the chat template, in a helper process. None: render in a thread."""
        self._render = render or self._render_here
        self.tokenizer = Tokenizer.from_files(files)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.pieces = Pieces(self.tokenizer)
        vocabulary = self.tokenizer.vocabulary()
        self._longest = max(map(len, vocabulary), default=1)
        form = FORMATS.get(parser_for(self.tokenizer.chat_template) or "")
        marks = [vocabulary[mark] for mark in form.marks if mark in vocabulary] if form else []
        self.hides_marks = any(map(self.tokenizer.is_silent, marks))  # does a text leave out what opens tool calls?
        self._begin = vocabulary.get(self.tokenizer.special.get("bos_token", ""))
        self._threads = ThreadPoolExecutor(2, "tokenizer")

    async def prompts(
        self, prompts: Seq[str | Seq[int]], add_special_tokens: bool = True, keep: int | None = None
    ) -> list[list[int]]:
        """Token ids of prompts, checked. Raises ApiError 400, also for over MAX_VALUES tokens in several prompts.

        `keep`: keep only the last `keep` tokens of each. The total length of the prompts decides whether a thread
        encodes them.
        """
        return await self.away(sum(map(len, prompts)), lambda: self._encoded(prompts, add_special_tokens, keep))

    def _encoded(self, prompts: Seq[str | Seq[int]], special: bool, keep: int | None) -> list[list[int]]:
        made: list[list[int]] = []
        num_tokens = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_size(len(prompt))
                ids = self.tokenizer.encode(prompt, special)
                # If the text itself begins with the begin (BOS) token, the tokenizer adds a second one: drop that.
                made.append(self._checked(ids[1:] if special and ids[:2] == [self._begin] * 2 else ids, keep))
            else:
                made.append(self._checked(list(prompt), keep))
            num_tokens += len(made[-1])
            if len(prompts) > 1 and num_tokens > limits.MAX_VALUES:
                raise bad_request(
                    f"the prompts have more than {limits.MAX_VALUES} tokens together; send fewer in a request", "prompt"
                )
        return made

    async def chat(self, asked: Render, size: int = 0, special: bool = False, keep: int | None = None) -> list[int]:
        """Token ids of a conversation, checked; if `keep` is given, the last `keep`. Raises ApiError 400.

        `size`: bytes of the request; `special`: the tokenizer adds its own special tokens to the template's.
        """
        self._check_size(sum(len(m["content"]) for m in asked.messages))
        ids = await self.encode_chat(asked, size, special)
        return await self.away(len(ids), lambda: self._checked(ids, keep))

    async def encode_chat(self, asked: Render, size: int = 0, special: bool = False) -> list[int]:
        """Token ids of a conversation of any length. Templates are programs, so `render` runs them elsewhere."""
        if self.tokenizer.chat_template is None:
            raise bad_request("this model has no chat template; use a plain prompt instead of messages", "messages")
        if "documents" in asked.options and "documents" not in self.tokenizer.chat_template:
            raise bad_request("this model's chat template knows no documents; put them into a message", "documents")
        return await self.encode(await self._render(asked, size), special)

    async def _render_here(self, asked: Render, size: int) -> str:
        messages, render = asked.messages, self.tokenizer.render_chat
        return await self.away(
            INLINE + 1, lambda: render(limits.opened(messages), tools=asked.tools, options=asked.options)
        )

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text of any length."""
        return await self.away(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def spelt(self, prompts: Seq[str | Seq[int]]) -> list[str]:
        """Prompts as texts. Raises ApiError 400 for token ids outside the vocabulary."""

        def spell(prompt: str | Seq[int]) -> str:
            if isinstance(prompt, str):
                return prompt
            self._check_ids(prompt)
            return self.tokenizer.decode(prompt, skip_special_tokens=False)

        size = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        return await self.away(size, lambda: [spell(prompt) for prompt in prompts])

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def away(self, size: int, work: Callable[[], T]) -> T:
        """Do work on `size` characters or tokens, in a thread if there are many. Raises ApiError 400."""
        try:
            if size <= INLINE:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RequestError as error:
            raise bad_request(str(error), error.field) from None

    def _check_size(self, size: int) -> None:
        if size > SLACK * self._longest * self.max_model_len:
            raise self._too_long(f"{size} characters")

    def _check_ids(self, token_ids: Seq[int]) -> None:
        check_token_ids("prompt", token_ids, self.vocab_size)

    def _checked(self, token_ids: list[int], keep: int | None = None) -> list[int]:
        token_ids = token_ids if keep is None else token_ids[-keep:]
        if not token_ids:
            raise bad_request("the prompt is empty; give at least one token of text", "prompt")
        if len(token_ids) >= self.max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens")
        self._check_ids(token_ids)
        return token_ids

    def _too_long(self, size: str) -> ApiError:
        return bad_request(
            f"This model's maximum context length is {self.max_model_len} tokens, one of them at least for the answer, "
            f"and the prompt has {size}; shorten it, or send 'truncate_prompt_tokens'",
            "prompt",
            "context_length_exceeded",
        )


class Pieces:
    """The bytes of single tokens, for log-probabilities: a token may be only part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.as_files()["tokenizer.json"])
        self._bytes = _byte_alphabet() if "ByteLevel" in json.dumps(spec.get("decoder")) else None
        added = spec.get("added_tokens") or []
        self._special = frozenset(t["id"] for t in added if t.get("special", True))
        self._known: dict[int, bytes] = {t["id"]: t["content"].encode("utf-8", "replace") for t in added}

    def written(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; empty for a special token, or outside the vocabulary."""
        return b"" if token_id in self._special else self.raw(token_id)

    def raw(self, token_id: int) -> bytes:
        """The token's bytes; empty outside the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._spell(self._tokenizer.token(token_id) or "")
        return found

    def text(self, token_id: int) -> str:
        """The token's text; if it is only part of a character, its bytes in OpenAI's notation."""
        raw = self.raw(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def _spell(self, piece: str) -> bytes:
        if self._bytes is not None and all(c in self._bytes for c in piece):
            return bytes(self._bytes[c] for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace("\u2581", " ").encode("utf-8", "replace")


def vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Seq[int]) -> Vocabulary:
    """The bytes of each token of a model, for grammars."""
    from sameseed.grammar import Vocabulary

    pieces = Pieces(tokenizer)
    return Vocabulary([pieces.written(token) for token in range(vocab_size)], eos_token_ids)


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies (Radford et al., 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}

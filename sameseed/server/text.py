"""Text and tokens in the server. Long texts are encoded in threads, and templates run elsewhere, off the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from sameseed.errors import RequestError
from sameseed.request import check_token_ids
from sameseed.server import limits
from sameseed.server.errors import ApiError, bad_request
from sameseed.server.frames import Render
from sameseed.server.reasoning import marks_for
from sameseed.server.tools import FORMATS, QUOTE, parser_for
from sameseed.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sameseed.grammar import Vocabulary

T = TypeVar("T")
Writer = Callable[[Render], Awaitable[str]]
INLINE = 1000  # characters that are encoded on the event loop: handing them to a thread would take longer
SLACK = 4  # a factor: a normalizer may shorten a text, but not by this much


class TextCodec:
    """A loaded model's tokenizer, with the model's limits."""

    def __init__(self, files: Mapping[str, str], vocab_size: int, max_model_len: int, render: Writer) -> None:
        """`render` renders a conversation with the chat template, which is a program: elsewhere."""
        self._render = render
        self.tokenizer = Tokenizer.from_files(files)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._longest = max(map(len, self.tokenizer.vocabulary()), default=1)
        self.calls = parser_for(self.tokenizer.template_for(tools=True))  # how the model writes tool calls
        self.hidden = set(map(self.tokenizer.token, self.tokenizer.special_ids))  # marks that a text leaves out
        self._threads = ThreadPoolExecutor(2, "tokenizer")  # which works on for a request that has run out of time

    async def prompts(
        self, content: Seq[str | Seq[int]] | Render, special: bool = True, keep: int | None = None
    ) -> list[list[int]]:
        """Token ids of prompts or of a conversation, checked.

        `special`: the tokenizer adds its special tokens; `keep`: keep only the last `keep` tokens of each. Raises
        ApiError 400, also for over MAX_VALUES tokens in several prompts.
        """
        if isinstance(content, Render):
            self._check_size(sum(len(str(m.get("content") or "")) for m in content.messages))
            ids = await self.encode(content, special)
            return [await self.away(len(ids), lambda: self._checked(ids, keep))]
        return await self.away(sum(map(len, content)), lambda: self._encoded(content, special, keep))

    def _encoded(self, prompts: Seq[str | Seq[int]], special: bool, keep: int | None) -> list[list[int]]:
        made: list[list[int]] = []
        num_tokens = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_size(len(prompt))
                made.append(self._checked(self.tokenizer.encode(prompt, special), keep))
            else:
                made.append(self._checked(list(prompt), keep))
            num_tokens += len(made[-1])
            if len(prompts) > 1 and num_tokens > limits.MAX_VALUES:
                raise bad_request(f"the prompts have over {limits.MAX_VALUES} tokens together; send fewer", "prompt")
        return made

    async def encode(self, content: str | Render, special: bool = False) -> list[int]:
        """Token ids of a text or a conversation of any length."""
        if isinstance(content, str):
            return await self.away(len(content), lambda: self.tokenizer.encode(content, special))
        documents = "documents" in content.options
        template = self.tokenizer.template_for(bool(content.tools), documents)
        if template is None:
            raise bad_request("this model has no chat template; give a plain prompt, or an instruct model", "messages")
        if documents and "documents" not in template:
            raise bad_request("this model's chat template knows no documents; put them into a message", "documents")
        text = await self._render(content)
        return await self.away(len(text), lambda: self.tokenizer.encode_chat(text, special))

    def name(self, token_id: int, begins: bool = False) -> str:
        """The text that a token adds, or its bytes in OpenAI's notation if it is part of a character: see `piece`."""
        raw = self.tokenizer.piece(token_id, begins)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    async def spelt(
        self, prompts: Seq[str | Seq[int]], skip_special_tokens: bool = False, field: str = "prompt"
    ) -> list[str]:
        """Prompts as texts. Raises ApiError 400 for token ids outside the vocabulary."""

        def spell(prompt: str | Seq[int]) -> str:
            if isinstance(prompt, str):
                return prompt
            check_token_ids(field, prompt, self.vocab_size)
            return self.tokenizer.decode(prompt, skip_special_tokens)

        size = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        return await self.away(size, lambda: [spell(prompt) for prompt in prompts])

    async def away(self, size: int, work: Callable[[], T]) -> T:
        """Do work on `size` characters or tokens, in a thread if there are many. Raises ApiError 400."""
        try:
            return await limits.away(size > INLINE, work, self._threads)
        except RequestError as error:
            raise bad_request(str(error), error.field) from None

    def _check_size(self, size: int) -> None:
        if size > SLACK * self._longest * self.max_model_len:
            raise self._too_long(f"{size} characters")

    def _checked(self, token_ids: list[int], keep: int | None = None) -> list[int]:
        token_ids = token_ids if keep is None else token_ids[-keep:]
        if not token_ids:
            raise bad_request("the prompt is empty; give at least one token of text", "prompt")
        if len(token_ids) >= self.max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens")
        check_token_ids("prompt", token_ids, self.vocab_size)
        return token_ids

    def _too_long(self, size: str) -> ApiError:
        return bad_request(
            f"This model's maximum context length is {self.max_model_len} tokens, one of them at least for the answer, "
            f"and the prompt has {size}; shorten it, or send 'truncate_prompt_tokens'",
            "prompt",
            "context_length_exceeded",
        )


def vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Seq[int]) -> Vocabulary:
    """The bytes of each token of a model, for grammars."""
    from sameseed.grammar import Vocabulary

    template = tokenizer.template_for(tools=True)
    calls = parser_for(template) or ""
    form, thoughts = FORMATS.get(calls), marks_for(template, calls) or ("", "")
    text = "".join((form.begin, form.separator, form.end, QUOTE, *thoughts[:2])) if form else ""
    marks = {t for t in tokenizer.special_ids if t < vocab_size and (tokenizer.token(t) or "\0") in text}
    hidden = [token not in marks and tokenizer.is_silent(token) for token in range(vocab_size)]
    pieces = zip(hidden, tokenizer.pieces(range(vocab_size)), strict=True)
    return Vocabulary([b"" if gone else piece for gone, piece in pieces], eos_token_ids, marks)


def same_at_beginning(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.bool_]:
    """bool [V]: the tokens that add the same text to an empty text as to another one."""
    import numpy as np

    both = (tokenizer.pieces(range(vocab_size), begins) for begins in (True, False))
    return np.array([one == other for one, other in zip(*both, strict=True)], np.bool_)

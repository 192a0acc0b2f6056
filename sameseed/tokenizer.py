"""Tokenizer: encode, decode, incremental decode (no broken UTF-8 between chunks), and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HFTokenizer

from sameseed import habits
from sameseed.errors import ModelLoadError, RequestError, VocabularyError

MAX_ADDED = 2**20  # characters that a chat template may add to a conversation
BROKEN = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
LONGEST_CHARACTER = 4  # most UTF-8 bytes of a character, so also most tokens: a token with text has a byte or more
CONTEXT = 16  # most tokens kept as decoding context: keeping some is cheaper than decoding a new context for each token
LONGEST_WAIT = 12  # most tokens that wait for a complete character; more of them are bytes that never form one


class Tokenizer(habits.Hinted):
    """A Hugging Face tokenizer.json with its special tokens and chat template."""

    def __init__(
        self, backend: HFTokenizer, chat_template: str | None = None, special: dict[str, str] | None = None
    ) -> None:
        self._backend = backend
        self.chat_template = chat_template
        self._silent = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._gives_text: dict[int, bool] = {}  # cache, by token
        self._compiled: Template | None = None
        self.special = special or {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, which compiles the template again."""
        return vars(self) | {"_compiled": None}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, if present, tokenizer_config.json, chat_template.jinja. Raises ModelLoadError."""
        path = folder / "tokenizer.json"
        if not path.exists():
            if (folder / "tokenizer.model").exists():
                raise ModelLoadError(
                    f"{folder} has a sentencepiece file only; convert it once: "
                    "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` with transformers writes it"
                )
            raise ModelLoadError(f"{path} is missing; the model's tokenizer.json belongs beside its weights")
        try:
            backend = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"{path} is no tokenizer that the tokenizers library can read ({error})") from None
        backend.no_truncation()
        backend.no_padding()
        config = _read_object(folder / "tokenizer_config.json")
        template = config.get("chat_template")
        jinja = folder / "chat_template.jinja"
        if jinja.exists():
            try:
                template = jinja.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ModelLoadError(f"{jinja} is no UTF-8 text ({error}); download it again") from None
        elif isinstance(template, list):  # several templates by name
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
        special = {k: _content(v) for k, v in config.items() if k.endswith("_token") and _content(v)}
        return cls(backend, template if isinstance(template, str) else None, special)

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> Tokenizer:
        """The inverse of `as_files`."""
        config = json.loads(files["tokenizer_config.json"])
        backend = HFTokenizer.from_str(files["tokenizer.json"])
        backend.no_truncation()
        backend.no_padding()
        special = {k: v for k, v in config.items() if k.endswith("_token")}
        return cls(backend, config.get("chat_template"), special)

    def as_files(self) -> dict[str, str]:
        """File contents by name, as `from_folder` reads them, for a tokenizer that was not read from such files."""
        config = {**self.special, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return {"tokenizer.json": self._backend.to_str(), "tokenizer_config.json": json.dumps(config, indent=2)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError for invalid Unicode (lone surrogates)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is no valid UTF-8 ({error.reason} at {error.start}); convert it first"
            ) from None
        # The batched form lets other threads run meanwhile, and computes no character offsets.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id outside the vocabulary."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def is_silent(self, token_id: int) -> bool:
        """Does the token have no text when special tokens are skipped?"""
        known = self._gives_text.get(token_id)
        if known is None:
            known = self._gives_text[token_id] = token_id not in self._silent and self.token(token_id) is not None
        return not known

    def vocabulary(self) -> dict[str, int]:
        """The spelling and id of every token, added tokens included."""
        entries: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return entries

    def chat(
        self,
        messages: Seq[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Seq[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of `render_chat`."""
        return self.encode(self.render_chat(messages, add_generation_prompt, tools), add_special_tokens=False)

    def render_chat(
        self,
        messages: Seq[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Seq[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation of {"role", "content"} messages as text, rendered by the chat template in a sandbox.

        `tools`: in OpenAI's format. `options`: further variables of the template, such as `enable_thinking`. Raises
        RequestError if there is no template or if it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template; use a plain prompt instead of messages")
        if not messages:
            raise RequestError("the conversation is empty; give at least one message")
        messages = [_with_text(m) for m in messages]
        for m in messages:
            if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
                raise RequestError(f"a message needs 'role' and 'content', both text, got {m!r}")
        values = {"documents": None, "add_generation_prompt": add_generation_prompt, **self.special, **(options or {})}
        values |= {"messages": messages, "tools": list(tools) if tools else None}
        most = MAX_ADDED + sum(len(m["content"]) for m in messages)
        return self._rendered(self.chat_template, values, most)

    def _rendered(self, template: str, values: Mapping[str, Any], most: int) -> str:
        """The chat template with these variables, at most `most` characters. Raises RequestError."""
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(template)
            kept, size = [], 0
            for part in self._compiled.generate(values):
                size += len(part)
                if size > most:
                    raise RequestError(f"the chat template writes more than {most} characters; use a plain prompt")
                kept.append(part)
            return "".join(kept)
        except RequestError:
            raise
        except TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from None
        except Exception as error:  # any error of the template's own code
            raise RequestError(
                f"the chat template fails on these messages ({type(error).__name__}: {error}); use a plain prompt"
            ) from None

    def stream(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        return IncrementalDecoder(self, skip_special_tokens)


def _with_text(message: Any) -> Any:
    """A message with a list of text parts as content gets their texts as lines; other messages stay as they are."""
    parts = message.get("content") if isinstance(message, dict) else None
    if isinstance(parts, list) and parts and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
        texts = [p.get("text") for p in parts]
        if all(isinstance(text, str) for text in texts):
            return {**message, "content": "\n".join(texts)}
    return message


class IncrementalDecoder:
    """Decodes token by token; a character is returned once it is complete. The pieces concatenate to the whole text.

    The tokens of the last pieces are kept as context, since some decoders strip a space at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []  # last tokens with returned text: at least one piece, up to CONTEXT tokens
        self._known = ""  # the text of `_context`
        self._waiting: list[int] = []  # tokens whose text was not returned yet

    def push(self, token_id: int) -> str:
        """The text that this token completes (may be empty). Its time does not depend on how many came before."""
        if self._skip and self._tokenizer.is_silent(token_id):
            return ""
        self._waiting.append(token_id)
        text = self._decode(self._context + self._waiting)
        new = text[len(self._known) :]
        if new and not new.endswith(BROKEN):
            self._give_out(len(self._waiting), text)
            return new
        if len(self._waiting) <= LONGEST_WAIT:
            return ""
        # Invalid bytes: return the part of `new` that no later token can change. It must not end within a character; of
        # LONGEST_CHARACTER consecutive token boundaries, at least one lies between two characters.
        last = len(self._waiting) - LONGEST_CHARACTER
        for cut in range(last, last - LONGEST_CHARACTER, -1):
            text = self._decode(self._context + self._waiting[:cut])
            head = text[len(self._known) :]
            if new.startswith(head):
                self._give_out(cut, text)
                return head
        return ""

    def _give_out(self, count: int, text: str) -> None:
        """Move the first `count` waiting tokens to the context, which then decodes to `text`."""
        piece, self._waiting = self._waiting[:count], self._waiting[count:]
        self._context, self._known = self._context + piece, text
        if len(self._context) > CONTEXT:
            self._context, self._known = piece, self._decode(piece)

    def flush(self) -> str:
        """The remaining text at the end; an incomplete character becomes the replacement character."""
        new = self._decode(self._context + self._waiting)[len(self._known) :] if self._waiting else ""
        self._context, self._known, self._waiting = [], "", []
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as in transformers, but without the date (strftime_now), so that tokens do not change from day to day."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    # Jinja's own filter escapes < > & ' for HTML, which models were not trained on.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment


def _content(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}); download it again") from None
    return value if isinstance(value, dict) else {}


def check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise VocabularyError unless both tokenizers have the same tokens with the same ids (padding is ignored)."""
    mine, its = target.vocabulary(), draft.vocabulary()
    for piece, token in sorted(its.items(), key=lambda item: item[1]):
        if mine.get(piece) != token:
            other = target.token(token)
            raise VocabularyError(
                f"the draft model has another vocabulary: its token {token} is {piece!r}, the target's is {other!r}; "
                "use a draft of the target's own family"
            )
    if len(its) < len(mine):
        piece, token = next((p, t) for p, t in sorted(mine.items(), key=lambda item: item[1]) if p not in its)
        raise VocabularyError(
            f"the draft model lacks the target's token {token} ({piece!r}); use a draft with the target's own tokenizer"
        )

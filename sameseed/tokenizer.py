"""Tokenizer: encode, decode, and the text that tokens add to what stands before them, which comes from here alone."""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from datetime import date, datetime, time
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer as HFTokenizer

from sameseed import habits
from sameseed.chat_template import ChatTemplate
from sameseed.errors import ModelLoadError, RequestError, say_once
from sameseed.special import TokenizerFiles, named_templates

BROKEN = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
LONGEST_CHARACTER = 4  # most UTF-8 bytes of a character, so also most tokens: a token with text has a byte or more
CONTEXT = 16  # most tokens kept as decoding context: keeping some is cheaper than decoding a new context for each token
LONGEST_WAIT = 12  # most tokens that wait for a complete character; more of them are bytes that never form one
GUARDS = "\ufdd0\ufdd1"  # around what is text in a rendered conversation, although it spells a special token
GUARDED = re.compile(f"{GUARDS[0]}(.+?){GUARDS[1]}", re.DOTALL)
TRUSTED = ("system", "developer")  # roles that may write special tokens; a model may repeat what a user typed
FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")  # of an added token
LONGEST_RUN = 64  # most byte tokens that wait for the end of their run: 16 characters of 4 bytes


class Tokenizer(habits.Hinted):
    """A Hugging Face tokenizer.json with its special tokens and chat templates."""

    def __init__(
        self,
        backend: HFTokenizer,
        templates: str | Mapping[str, str] | None = None,
        special: dict[str, str] | None = None,
    ) -> None:
        """`templates`: the chat template, or several by name: "default", "tool_use" (with tools), "rag" (documents)."""
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.templates = named_templates(templates)
        self.now = datetime.combine(date.today(), time())  # of templates that ask for the date; it stands still
        self._silent = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._pieces: dict[tuple[int, bool], bytes] = {}  # cache
        self._compiled: dict[str, ChatTemplate] = {}
        self.special = special or {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        decoder = "" if backend.decoder is None else str(backend.decoder)
        self._alphabet = _byte_alphabet() if "ByteLevel(" in decoder else {}
        falls_back = "ByteFallback(" in decoder
        spelled = [f"<0x{b:{form}}>" for b in range(256) for form in ("02X", "02x")] if falls_back else []
        found = {backend.token_to_id(piece): bytes([int(piece[3:5], 16)]) for piece in spelled}
        self.byte_tokens = {t: byte for t, byte in found.items() if t is not None}  # tokens that stand for one byte

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it that transformers reads. Raises ModelLoadError."""
        path = folder / "tokenizer.json"
        if not path.exists():
            older = ("tokenizer.model", "vocab.json", "tekken.json")
            if (name := next((n for n in older if (folder / n).exists()), None)) is not None:
                raise ModelLoadError(
                    f"{folder} has {name} in place of tokenizer.json; convert it once: "
                    "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` with transformers writes it"
                )
            raise ModelLoadError(f"{path} is missing; the model's tokenizer.json belongs beside its weights")
        try:
            backend = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"{path} is no tokenizer that the tokenizers library can read ({error})") from None
        files = TokenizerFiles(folder)
        _add_tokens(backend, files)
        return cls(backend, files.templates(), {role: text for role, (text, _) in files.names.items()})

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> Tokenizer:
        """The inverse of `as_files`; "now", if it is there, is the clock of chat templates."""
        config = json.loads(files["tokenizer_config.json"])
        backend = HFTokenizer.from_str(files["tokenizer.json"])
        special = {k: v for k, v in config.items() if k.endswith("_token")}
        made = cls(backend, named_templates(config.get("chat_template")), special)
        made.now = datetime.fromisoformat(files["now"]) if "now" in files else made.now
        return made

    def as_files(self) -> dict[str, str]:
        """File contents by name, as `from_folder` reads them, for a tokenizer that was not read from such files."""
        config: dict[str, Any] = {**self.special, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.templates.keys() == {"default"}:
            config["chat_template"] = self.templates["default"]
        elif self.templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self.templates.items()]
        return {"tokenizer.json": self._backend.to_str(), "tokenizer_config.json": json.dumps(config, indent=2)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with one begin token even if it spells one. Raises RequestError for lone surrogates."""
        return self._encode([text], add_special_tokens)

    def encode_chat(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a guarded rendering: special tokens that a user typed are text, and end no turn."""
        return self._encode(GUARDED.split(text), add_special_tokens)

    def _encode(self, parts: list[str], special: bool) -> list[int]:
        """Token ids of the parts' text. In every other part no special token is recognized."""
        text = "".join(parts)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is no valid UTF-8 ({error.reason} at {error.start}); convert it") from None
        if len(parts) == 1:  # the batched form lets other threads run meanwhile, and computes no character offsets
            ids = list(_asked(self._backend.encode_batch_fast, [text], add_special_tokens=special)[0].ids)
        else:
            backend, mark, known = self._aside
            parts[::2] = [self._special.sub(lambda m: mark * (mark + m[0] in known) + m[0], p) for p in parts[::2]]
            found, ids = _asked(backend.encode_batch, ["".join(parts)], add_special_tokens=special)[0], []
            unknown = getattr(backend.model, "unk_token", None)
            for token, name, added in zip(found.ids, found.tokens, found.special_tokens_mask, strict=True):
                if token in self._silent and not added and unknown != name == self.token(token):  # a piece as well
                    ids += [t.id for part in (name[:1], name[1:]) for t in _asked(backend.model.tokenize, part)]
                else:
                    ids.append(known.get(name, token))
        begin = self._backend.token_to_id(self.special.get("bos_token", ""))
        return ids[1:] if special and ids[:2] == [begin, begin] else ids

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool = True) -> str:
        return str(_asked(self._backend.decode, list(token_ids), skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int, begins: bool = False) -> bytes:
        """`pieces` of one token."""
        key = (token_id, begins)
        if key not in self._pieces:
            self._pieces[key] = self.pieces([token_id], begins)[0]
        return self._pieces[key]

    def pieces(self, token_ids: Seq[int], begins: bool = False) -> list[bytes]:
        """The bytes that each token adds to a text, or to an empty one (`begins`); it may be part of a character.

        A special token's are its name; there are none for an id outside the vocabulary.
        """
        before = [] if begins else self._before
        known = self.decode(before, skip_special_tokens=False)
        found: list[bytes | None] = []
        for token in token_ids:
            spelled, byte = self.token(token) or "", self.byte_tokens.get(token)
            if begins and byte is not None and byte.isascii():
                byte = None  # a space may get lost there
            elif byte is None and self._alphabet:
                known_bytes = all(c in self._alphabet for c in spelled)
                byte = bytes(self._alphabet[c] for c in spelled) if known_bytes else spelled.encode()
            found.append(byte)
        rest = [[*before, token] for token, byte in zip(token_ids, found, strict=True) if byte is None]
        texts = iter(_asked(self._backend.decode_batch, rest, skip_special_tokens=False))
        return [_beyond(known, next(texts)).encode() if byte is None else byte for byte in found]

    @cached_property
    def _before(self) -> list[int]:
        """A token that stands for what comes before another one."""
        for token in range(self.vocab_size):
            text = "" if self.is_silent(token) or token in self.byte_tokens else self.decode([token])
            if text.strip() and self.decode([token, token]).startswith(text):
                return [token]
        return []

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id outside the vocabulary."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def is_silent(self, token_id: int) -> bool:
        """Does the token have no text when special tokens are skipped?"""
        return token_id in self._silent or self.token(token_id) is None

    def has_text(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> bool:
        """Does any of the tokens have text?"""
        hidden = self.is_silent if skip_special_tokens else lambda token: self.token(token) is None
        return not all(map(hidden, token_ids))

    @property
    def special_ids(self) -> list[int]:
        """The ids of all special tokens, in order."""
        return sorted(self._silent)

    def vocabulary(self) -> dict[str, int]:
        """The spelling and id of every token, added tokens included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def chat_template(self) -> str | None:
        """The chat template of conversations without tools and documents; None if the model has none."""
        return self.template_for()

    def template_for(self, tools: bool = False, documents: bool = False) -> str | None:
        """The template of such conversations, chosen as transformers does."""
        wanted = ["tool_use"] * tools + ["rag"] * documents + ["default"]
        return next((self.templates[name] for name in wanted if name in self.templates), None)

    def chat(
        self,
        messages: Seq[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Seq[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered as by `render_chat`."""
        return self.encode_chat(self.render_chat(messages, add_generation_prompt, tools, guarded=True))

    @cached_property
    def _aside(self) -> tuple[HFTokenizer, str, dict[str, int]]:
        """The tokenizer with its special tokens only behind a mark that no user knows; the mark; added tokens' ids."""
        backend, mark = HFTokenizer(self._backend.model), secrets.token_hex(16)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            setattr(backend, part, getattr(self._backend, part))
        added = dict(sorted(self._backend.get_added_tokens_decoder().items()))
        for token in added.values():
            token.content = mark * token.special + token.content
        backend.add_tokens(list(added.values()))
        return backend, mark, {token.content: token_id for token_id, token in added.items()}

    def _guarded(self, value: Any) -> Any:
        """The value with the special tokens in its texts between GUARDS."""
        if isinstance(value, Mapping):
            return {name: self._guarded(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item) for item in value]
        return self._special.sub(GUARDS[0] + r"\g<0>" + GUARDS[1], value) if isinstance(value, str) else value

    @cached_property
    def _special(self) -> re.Pattern[str]:
        names = sorted(filter(None, (*map(self.token, self._silent), *GUARDS)), reverse=True)  # the longer ones first
        begun = ((start, "|".join(re.escape(n[3:]) for n in same)) for start, same in groupby(names, lambda n: n[:3]))
        return re.compile("|".join(f"{re.escape(start)}(?:{rest})" for start, rest in begun))

    def render_chat(
        self,
        messages: Seq[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Seq[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        guarded: bool = False,
    ) -> str:
        """A conversation of {"role", "content"} messages as text, rendered by the chat template in a sandbox.

        `tools`: in OpenAI's format. `options`: further variables of the template, such as `enable_thinking`. `guarded`:
        for `encode_chat`. Raises RequestError.
        """
        values = {"documents": None, "add_generation_prompt": add_generation_prompt, **self.special, **(options or {})}
        if not isinstance(messages, Seq) or isinstance(messages, str):
            raise RequestError('a conversation is a list of messages: [{"role": "user", "content": "hi"}, ...]')
        if guarded:
            trusted = [isinstance(m, Mapping) and m.get("role") in TRUSTED for m in messages]
            messages = [m if own else self._guarded(m) for own, m in zip(trusted, messages, strict=True)]
            values["documents"] = self._guarded(values["documents"])
        source = self.template_for(bool(tools), bool(values["documents"]))
        if source is None:
            named = f"templates {', '.join(self.templates)}, but no default" if self.templates else "no chat template"
            raise RequestError(f"this model has {named}; use a plain prompt instead of messages")
        if not messages:
            raise RequestError("the conversation is empty; give at least one message")
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, self.special)
        return self._compiled[source].render(messages, values | {"tools": list(tools) if tools else None}, self.now)

    def stream(self, skip_special_tokens: bool = True, before: Seq[int] = ()) -> IncrementalDecoder:
        """A decoder of the text that follows the tokens `before`."""
        return IncrementalDecoder(self, skip_special_tokens, before)


class IncrementalDecoder:
    """Decodes token by token what follows `before`; a character is returned once it is complete.

    The pieces join to what decode(before + tokens) has beyond decode(before). A few tokens are kept as context, since
    decoders treat a text's start apart.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, before: Seq[int] = ()) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._waiting: list[int] = []  # tokens whose text was not returned yet
        self._context: list[int] = []  # the last tokens before them
        self._known = ""  # the text of `_context`
        self.tail = ""  # the complete characters among it
        shown = (t for t in reversed(before) if tokenizer.has_text((t,), skip_special_tokens))
        self._most = LONGEST_RUN if tokenizer.byte_tokens else CONTEXT  # tokens among which a context is looked for
        self._follow(list(islice(shown, self._most))[::-1])

    def push(self, token_id: int) -> str:
        """The text that this token completes (may be empty). Its time does not depend on how many came before."""
        if not self._tokenizer.has_text((token_id,), self._skip):
            return ""
        self._waiting.append(token_id)
        text = self._decode(self._context + self._waiting)
        new = _beyond(self._known, text)
        # A run of byte tokens has its text once it has ended: one wrong byte makes all of it invalid.
        in_run = token_id in self._tokenizer.byte_tokens and len(self._waiting) <= LONGEST_RUN
        if new and not new.endswith(BROKEN) and not in_run:
            self._give_out(len(self._waiting), text)
            return new
        self.tail = new.rstrip(BROKEN)
        if in_run or len(self._waiting) <= LONGEST_WAIT:
            return ""
        # Invalid bytes: return the part of `new` that no later token can change. It must not end within a character; of
        # LONGEST_CHARACTER consecutive token boundaries, at least one lies between two characters.
        last = len(self._waiting) - LONGEST_CHARACTER
        for cut in range(last, last - LONGEST_CHARACTER, -1):
            text = self._decode(self._context + self._waiting[:cut])
            head = _beyond(self._known, text)
            if new.startswith(head):
                self._give_out(cut, text)
                self.tail = new[len(head) :].rstrip(BROKEN)
                return head
        return ""

    def flush(self) -> str:
        """The remaining text at the end; an incomplete character becomes the replacement character."""
        new = _beyond(self._known, self._decode(self._context + self._waiting)) if self._waiting else ""
        self._context, self._known, self._waiting, self.tail = [], "", [], ""
        return new

    def _give_out(self, count: int, text: str) -> None:
        """Move the first `count` waiting tokens to the context, which then decodes to `text`."""
        self._context, self._known, self.tail = self._context + self._waiting[:count], text, ""
        del self._waiting[:count]
        if len(self._context) > CONTEXT:
            self._follow(self._context[-self._most :])

    def _follow(self, tokens: list[int]) -> None:
        """Take as context the fewest last tokens that begin between two characters and have text of their own."""
        text, start, runs = "", len(tokens), self._tokenizer.byte_tokens.keys()
        while start and (not text or text.startswith(BROKEN) or runs >= {*tokens[start - 1 : start + 1]}):
            start -= 1
            text = self._decode(tokens[start:])
        self._context, self._known = tokens[start:], text

    def _decode(self, token_ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(token_ids, self._skip)
        except RequestError:  # one text's fault: the engine's other texts go on
            say_once(f"the model's tokenizer.json cannot decode some runs of tokens; there the text is {BROKEN}")
            return BROKEN


def _asked(call: Callable[..., Any], given: Any, **how: Any) -> Any:
    """What the tokenizers library answers. Raises RequestError where it panics, which is no Exception."""
    try:
        return call(given, **how)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"the model's tokenizer.json breaks down at {str(given)[:60]} ({error}); mend it") from None


def _beyond(known: str, text: str) -> str:
    """What `text` has beyond `known`, or beyond what both have in common."""
    return text[len(known) if text.startswith(known) else shared(known, text) :]


def shared(one: Seq[Any], other: Seq[Any]) -> int:
    """The length of what two texts, or lists of tokens, have in common at their beginning."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return bisect_left(range(1, most + 1), True, key=lambda length: one[:length] != other[:length])


def _add_tokens(backend: HFTokenizer, files: TokenizerFiles) -> None:
    """Add the tokens that are named beside tokenizer.json, whose flags win there, where their ids are known."""
    known = {t.content: t for t in backend.get_added_tokens_decoder().values()}
    for token, text, flags in files.added:
        if text in known and all(getattr(known[text], name) == flags[name] for name in FLAGS if name in flags):
            continue
        if backend.token_to_id(text) is None and token != backend.get_vocab_size(with_added_tokens=True):
            say_once(f"{files.folder}: left out the added token {text!r}, for which the id {token} is not free")
            continue
        how = {name: bool(flags[name]) for name in FLAGS if name in flags}
        special = how.pop("special", False) or text in files.special
        backend.add_tokens([AddedToken(text, special=special, **{"normalized": not special, **how})])
    roles, added = {text for text, _ in files.names.values()}, backend.get_added_tokens_decoder().values()
    settled = {token.content for token in added if token.special or token.content not in roles}
    present = {text for text in files.special if backend.token_to_id(text) is not None}
    # New ones get the next ids, as in transformers; not where a token with a role has none, which would come first.
    new = [text for text in files.extra if text not in present and roles <= present]
    named = (AddedToken(text, special=True, normalized=False) for text in (*sorted(present - settled), *new))
    backend.add_special_tokens(list(named))


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies (Radford et al., 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}

"""Answers of /v1/completions: the continuation of a prompt, after the prompt itself if `echo` is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import Any

from sameseed.server.frames import Piece
from sameseed.server.replies import Reply, ReplyChoice, shown_tokens
from sameseed.tokenizer import BROKEN, LONGEST_RUN, shared


class CompletionReply(Reply):
    """An answer of /v1/completions. `echoes`: text and tokens of prompts to repeat; `hidden`: max_tokens was 0."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, *args: Any, logprobs: bool, echoes: Seq[tuple[str, list[int]]], hidden: bool, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.with_logprobs, self.echoes, self.hidden = logprobs, echoes, hidden

    def _echo(self, index: int) -> tuple[str, list[int]]:
        return self.echoes[index * len(self.echoes) // len(self.choices)] if self.echoes else ("", [])

    def _prefix(self, index: int, choice: ReplyChoice) -> str:
        """The echoed text, without a last character that the output completes."""
        text, ids = self._echo(index)
        if self.hidden or not self._is_open(index):
            return text
        decode, ids = self.text.tokenizer.decode, ids[-LONGEST_RUN:]
        known = decode(ids, self.skip_special_tokens)
        return text.removesuffix(known[shared(known, decode(ids + choice.token_ids, self.skip_special_tokens)) :])

    def _is_open(self, index: int) -> bool:
        """May the output still change the end of the echoed text?"""
        text, ids = self._echo(index)
        return bool(ids) and (text.endswith(BROKEN) or ids[-1] in self.text.tokenizer.byte_tokens)

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.hidden else super().num_output_tokens

    def whole_choice(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        text = self._prefix(index, choice) + ("" if self.hidden else "".join(choice.text))
        made: dict[str, Any] = {"index": index, "text": text, "finish_reason": choice.finish_reason}
        made["logprobs"] = self._logprobs(index, choice) if self.with_logprobs else None
        return made | (shown_tokens(choice) | {"prompt_token_ids": self.prompt_of(index)} if self.show_tokens else {})

    def events(self, piece: Piece) -> Iterator[bytes]:
        choice = self.choices[piece.index]
        first, ended = len(choice.text) == 1, piece.completion is not None
        text = "" if self.hidden else piece.text
        if choice.unsent and (text or ended or not self._is_open(piece.index)):
            text, choice.unsent = self._prefix(piece.index, choice) + text, False
        if not text and not ended and not self.with_logprobs and not self.show_tokens:
            return
        entry: dict[str, Any] = {"index": piece.index, "text": text, "logprobs": None}
        if self.with_logprobs:
            entry["logprobs"] = self._logprobs(piece.index, choice)
        entry["finish_reason"] = choice.finish_reason if ended else None
        entry |= shown_tokens(piece) if self.show_tokens else {}
        entry |= {"prompt_token_ids": self.prompt_of(piece.index)} if self.show_tokens and first else {}
        yield self.chunk(entry)

    def _logprobs(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        """Log-probabilities of the tokens that were not sent yet, those of an echoed prompt first."""
        made: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        new = slice(choice.num_sent, None if not self.hidden else choice.num_sent)
        entries, base = choice.logprobs[new], len(self._prefix(index, choice))
        offsets = [base + at for at in choice.text_offset[new]]
        echo = self._echo(index)[1]
        if echo and not choice.echoed:
            entries = [[echo[0], None, []], *choice.prompt_logprobs, *entries]
            offsets = [min(at, base) for at in self._offsets(echo)] + offsets
        choice.num_sent, choice.echoed = len(choice.logprobs), True
        for (token, logprob, top), at in zip(entries, offsets, strict=True):
            begins = self.begins(choice, token, [] if echo else self.prompt_of(index))
            name = self.name(token, begins)
            made["tokens"].append(name)
            made["token_logprobs"].append(logprob)
            made["text_offset"].append(at)
            if logprob is None:
                made["top_logprobs"].append(None)
                continue
            alternatives: dict[str, float] = {name: logprob}
            for other, value in top:
                alternatives.setdefault(self.name(other, begins), value)
            made["top_logprobs"].append(alternatives)
        return made

    def _offsets(self, ids: Seq[int]) -> list[int]:
        """Where each token of an echoed prompt begins."""
        decoder = self.text.tokenizer.stream(self.skip_special_tokens)
        at, found = 0, []
        for token in ids:
            found.append(at + len(decoder.tail))
            at += len(decoder.push(token))
        return found

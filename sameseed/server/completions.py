"""Answers of /v1/completions: the continuation of a prompt, after the prompt itself if `echo` is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import Any

from sameseed.server.frames import Piece
from sameseed.server.replies import Reply, ReplyChoice, shown_tokens


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

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.hidden else super().num_output_tokens

    def whole_choice(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        text = self._echo(index)[0] + ("" if self.hidden else "".join(choice.text))
        made: dict[str, Any] = {"index": index, "text": text, "finish_reason": choice.finish_reason}
        made["logprobs"] = self._logprobs(index, choice) if self.with_logprobs else None
        return made | (shown_tokens(choice) | self._prompt(index) if self.show_tokens else {})

    def _prompt(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[index * len(self.prompts) // len(self.choices)]}

    def events(self, piece: Piece) -> Iterator[bytes]:
        choice = self.choices[piece.index]
        first = len(choice.text) == 1
        text = (self._echo(piece.index)[0] if first else "") + ("" if self.hidden else piece.text)
        if not text and piece.completion is None and not self.with_logprobs and not self.show_tokens:
            return
        entry: dict[str, Any] = {"index": piece.index, "text": text, "logprobs": None}
        if self.with_logprobs:
            entry["logprobs"] = self._logprobs(piece.index, choice)
        entry["finish_reason"] = choice.finish_reason if piece.completion is not None else None
        entry |= shown_tokens(piece) if self.show_tokens else {}
        entry |= self._prompt(piece.index) if self.show_tokens and first else {}
        yield self.chunk(entry)

    def _logprobs(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        """Log-probabilities of the tokens that were not sent yet, those of an echoed prompt first."""
        made: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        entries = [] if self.hidden else choice.logprobs[choice.num_sent :]
        echo = self._echo(index)[1]
        if echo and not choice.echoed:
            entries = [[echo[0], None, []], *choice.prompt_logprobs, *entries]
        choice.num_sent, choice.echoed = len(choice.logprobs), True
        for token, logprob, top in entries:
            name = self.name(token)
            made["tokens"].append(name)
            made["token_logprobs"].append(logprob)
            made["text_offset"].append(choice.offset)
            choice.offset += len(self.text.pieces.text(token))
            if logprob is None:
                made["top_logprobs"].append(None)
                continue
            alternatives: dict[str, float] = {name: logprob}
            for other, value in top:
                alternatives.setdefault(self.name(other), value)
            made["top_logprobs"].append(alternatives)
        return made

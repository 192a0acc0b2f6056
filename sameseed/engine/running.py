"""Running: one request inside the engine, its output so far with stop strings, and how the output is given out."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

from sameseed.request import Completion, Delta, FinishReason, Metrics, Request, Sequence
from sameseed.tokenizer import Tokenizer


class OutputText:
    """Collects text. `push` returns whether a stop string is complete; `delta` returns new text that cannot change."""

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], skip_special_tokens: bool = True, before: Seq[int] = ()
    ) -> None:
        """`before`: the prompt, which the text continues."""
        self.text = ""
        self._decoder = tokenizer.stream(skip_special_tokens, before)
        self._stop = stop
        self._longest = max((len(s) for s in stop), default=0)
        self.num_sent = 0  # characters returned by `delta`
        self._stopped = False

    @property
    def length(self) -> int:
        """Characters of the text so far, those included that later tokens may still change."""
        return len(self.text) + (0 if self._stopped else len(self._decoder.tail))

    def push(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token; True if it completes a stop string. The text then ends before that stop string.

        `may_stop` false (the minimum length is not reached): a stop string is ordinary text.
        """
        known, old = self.length, self._decoder.tail
        settled = len(self.text)
        self.text += self._decoder.push(token_id)
        if not self._stop:
            return False
        # Only occurrences that end in the new piece count: older ones were treated as ordinary text.
        begin = max(0, settled - self._longest + 1)
        latest = self.text[begin:] + self._decoder.tail
        if not latest.startswith(old, settled - begin):
            known = settled  # the last bytes became another text
        found = [at for s in self._stop if (at := latest.find(s, max(0, known - len(s) + 1 - begin))) >= 0]
        if found and may_stop:
            self.text = self.text[:begin] + latest[: min(found)]
            self._stopped = True
        return self._stopped

    def finish(self) -> None:
        """End the text: what the decoder still holds (an incomplete character) is appended."""
        if not self._stopped:
            self.text += self._decoder.flush()
        self._stopped = True

    def delta(self) -> str:
        """The text not returned before. A tail that may become a stop string is held back until that is decided."""
        end = len(self.text)
        for length in range(0 if self._stopped else min(self._longest - 1, end), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                end -= length  # the longest suffix of the text that begins a stop string
                break
        new = self.text[self.num_sent : end]
        self.num_sent = max(self.num_sent, end)
        return new


@dataclass
class Running:
    """A request with its sequence and its text. Times are values of `time.perf_counter`."""

    request: Request
    seq: Sequence
    output: OutputText
    eos: frozenset[int]
    arrived: float
    started: float | None = None
    first_token: float | None = None
    levels: list[str | None] = field(default_factory=list)  # which level drafted each token; None: the target's
    offsets: list[int] = field(default_factory=list)  # the character of the text at which each token begins
    unwritten: list[int] = field(default_factory=list)  # the latest tokens, whose text is not made yet
    num_scored: int = 0  # log-probabilities of prompt tokens given out so far

    def take(self, tokens: Seq[int]) -> tuple[int, FinishReason | None]:
        """How many of `tokens`, the sequence's last ones, belong to the text, and the reason if the text ends.

        The sequence drops the tokens after its end. Without stop strings, `write` makes the tokens' text later.
        """
        base, taken = len(self.seq) - len(tokens), 0
        reason: FinishReason | None = None
        for taken, token in enumerate(tokens, 1):
            reason = self._end(token, base + taken)
            if reason is not None:
                break
        del self.seq.token_ids[base + taken :]
        return taken, reason

    def _end(self, token: int, length: int) -> FinishReason | None:
        """The reason if this token, with which the sequence has `length` tokens, ends the sequence; else None."""
        params = self.request.params
        self.unwritten.append(token)
        if token in params.ending(self.eos):
            return FinishReason.STOP
        num_output = length - self.seq.num_prompt
        if params.stop and self.write(may_stop=num_output >= params.min_tokens):
            return FinishReason.STOP
        if num_output >= params.max_tokens or length >= self.seq.context:
            return FinishReason.LENGTH
        return None

    def write(self, may_stop: bool = True) -> bool:
        """Make the text of the tokens that have none yet; True if a stop string is complete."""
        ending, stops = self.request.params.ending(self.eos) if self.unwritten else (), False
        for token in self.unwritten:
            self.offsets.append(self.output.length)
            if token not in ending:
                stops = self.output.push(token, may_stop)
        self.unwritten.clear()
        return stops

    def delta(self, num_tokens: int, completion: Completion | None = None) -> Delta:
        """The Delta to give out: the last `num_tokens` tokens, new text, and new log-probabilities of the prompt."""
        self.write()
        r, seq = self.request, self.seq
        new, logprobs = len(self.levels) - num_tokens, seq.logprobs if r.params.logprobs is not None else []
        start, self.num_scored = self.num_scored, len(seq.prompt_logprobs)
        text = self.output.delta()
        return Delta(
            r.request_id,
            r.index,
            text,
            tuple(seq.token_ids[len(seq) - num_tokens :]),
            tuple(self.levels[new:]),
            completion,
            tuple(logprobs[max(0, len(logprobs) - num_tokens) :]),
            tuple(seq.prompt_logprobs[start:]),
            tuple(self.offsets[new:]),
            partial(self.so_far, self.output.num_sent, len(self.levels)),
        )

    def so_far(self, length: int, num_tokens: int) -> tuple[str, tuple[int, ...]]:
        """The first `length` characters and the first `num_tokens` tokens of the output."""
        return self.output.text[:length], tuple(self.seq.output_token_ids[:num_tokens])

    def complete(self, reason: FinishReason) -> Completion:
        """End the text, and return the Completion with the whole output."""
        seq, r = self.seq, self.request
        self.write()
        self.output.finish()
        now = time.perf_counter()
        first = self.first_token if self.first_token is not None else now
        metrics = Metrics(
            num_prompt_tokens=seq.num_prompt,
            num_output_tokens=max(0, seq.num_output),
            spec=seq.metrics,
            time_split=seq.times,
            time_to_first_token=first - self.arrived,
            time_per_output_token=(now - first) / (seq.num_output - 1) if seq.num_output > 1 else 0.0,
            total_time=now - self.arrived,
            num_preemptions=seq.num_preemptions,
            num_cached_tokens=seq.num_shared,
            queue_time=(self.started if self.started is not None else now) - self.arrived,
        )
        return Completion(
            request_id=r.request_id,
            index=r.index,
            prompt=r.prompt,
            prompt_token_ids=r.prompt_token_ids,
            text=self.output.text,
            token_ids=tuple(seq.output_token_ids),
            finish_reason=reason,
            seed=r.seed,
            metrics=metrics,
            levels=tuple(self.levels),
            logprobs=tuple(seq.logprobs) if r.params.logprobs is not None else None,
            prompt_logprobs=tuple(seq.prompt_logprobs) if r.score_prompt else None,
            text_offset=tuple(self.offsets),
            ruled_out=seq.ruled_out,
            error=seq.error,
            n=r.params.n,
        )

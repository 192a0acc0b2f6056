"""OutputText: the text of one running sequence, token by token, with stop strings found across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence as Seq

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

        With `may_stop` false (the minimum length is not reached) a stop string is treated as ordinary text.
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

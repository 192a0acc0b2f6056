"""OutputText: the text of one running sequence, token by token, with stop strings found across token boundaries."""

from __future__ import annotations

from sameseed.tokenizer import Tokenizer


class OutputText:
    """Collects text; `push` says whether a stop string is complete, `delta` gives out what is certain to stay."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], skip_special_tokens: bool = True) -> None:
        self.text = ""
        self._decoder = tokenizer.stream(skip_special_tokens)
        self._stop = stop
        self._longest = max((len(s) for s in stop), default=0)
        self.num_sent = 0  # characters given out
        self._stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token; True if it completes a stop string, before which the text then ends.

        With `may_stop` false (the minimum length is not reached) a stop string is text like any other.
        """
        known = len(self.text)
        self.text += self._decoder.push(token_id)
        # Only occurrences that end in the new piece: older ones were allowed to stand.
        found = [at for s in self._stop if (at := self.text.find(s, max(0, known - len(s) + 1))) >= 0]
        if found and may_stop:
            self.text = self.text[: min(found)]
            self._stopped = True
        return self._stopped

    def finish(self) -> None:
        """No token follows: what the decoder still holds (an incomplete character) becomes text."""
        if not self._stopped:
            self.text += self._decoder.flush()
        self._stopped = True

    def delta(self) -> str:
        """Text not given out before. A tail that may become a stop string is held back until it is decided."""
        end = len(self.text)
        for length in range(0 if self._stopped else min(self._longest - 1, end), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                end -= length  # the longest end of the text that begins a stop string
                break
        new = self.text[self.num_sent : end]
        self.num_sent = max(self.num_sent, end)
        return new

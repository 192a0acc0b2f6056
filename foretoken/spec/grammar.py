"""Grammars: which tokens may come next, asked at every node of a draft. `Choice`: the text is one of a few."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray


class Vocabulary:
    """What tokens spell, for grammars over bytes: `pieces[t]` of token t; empty for tokens that spell nothing."""

    def __init__(self, pieces: Seq[bytes], eos_token_ids: Seq[int]) -> None:
        self.pieces = tuple(pieces)
        self.eos_token_ids = tuple(eos_token_ids)
        self.writable = np.array([bool(piece) for piece in self.pieces], np.bool_)  # [V]: tokens that a text may have
        self.writable[list(self.eos_token_ids)] = True
        self._tokens: dict[bytes, list[int]] = {}
        for token, piece in enumerate(self.pieces):
            if piece and token not in self.eos_token_ids:
                self._tokens.setdefault(piece, []).append(token)

    def beginning(self, text: bytes) -> list[int]:
        """The tokens with which this text may begin."""
        return [token for end in range(1, len(text) + 1) for token in self._tokens.get(text[:end], ())]

    def spell(self, token_ids: Seq[int]) -> bytes:
        """The bytes of some tokens, up to the first that ends the text."""
        parts = []
        for token in token_ids:
            if token in self.eos_token_ids:
                break
            parts.append(self.pieces[token])
        return b"".join(parts)


class Choice:
    """The text is one of `choices`, then an end token. What it has computed for a beginning it remembers."""

    def __init__(self, choices: Seq[str], vocabulary: Vocabulary) -> None:
        self._choices = sorted({c.encode("utf-8") for c in choices})
        self._vocabulary = vocabulary
        self._masks: dict[bytes, NDArray[np.bool_]] = {}

    def allowed(self, output: Seq[int], path: Seq[int]) -> NDArray[np.bool_]:
        """bool [V]: the tokens that may come after the output's tokens and then those of `path`."""
        written = self._vocabulary.spell([*output, *path])
        mask = self._masks.get(written)
        if mask is None:
            mask = self._masks[written] = self._mask(written)
        return mask

    def another(self) -> Choice:
        """Itself: what it remembers may be found by two threads, and is the same."""
        return self

    def _mask(self, written: bytes) -> NDArray[np.bool_]:
        mask = np.zeros(len(self._vocabulary.pieces), np.bool_)
        for choice in self._choices:
            if choice == written:
                mask[list(self._vocabulary.eos_token_ids)] = True
            elif choice.startswith(written):
                mask[self._vocabulary.beginning(choice[len(written) :])] = True
        return mask

"""Does a server with OpenAI's API return the same texts, whatever else it serves? Needs no engine and no PyTorch."""

from __future__ import annotations


class VerifyError(ValueError):
    """A setting out of range, or a server that cannot be asked; the text says what to do instead."""

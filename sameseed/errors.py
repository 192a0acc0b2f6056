"""The errors that sameseed raises on purpose. Each message names the remedy."""

from __future__ import annotations


class SameseedError(ValueError):
    """Base class: something the user asked for cannot be done; the text says what to do instead."""


class RequestError(SameseedError):
    """A request that cannot be served as asked: an empty prompt, a parameter out of range, too long a prompt."""


class ConfigError(SameseedError):
    """Settings that contradict each other or lie out of range."""


class ModelLoadError(SameseedError):
    """A checkpoint that cannot be read; the text names the file and the tensor."""


class ModelSaveError(SameseedError):
    """A checkpoint that cannot be written where it was asked for; nothing is left under its name."""


class VocabularyError(SameseedError):
    """A draft model that does not share the target's vocabulary."""


class RegistryError(SameseedError):
    """A name that is on no shelf; the text names the nearest one that is."""

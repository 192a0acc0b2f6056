"""The errors that foretoken raises on purpose. Each message names the remedy."""

from __future__ import annotations


class ForetokenError(ValueError):
    """Base class: something the user asked for cannot be done; the text says what to do instead."""


class RequestError(ForetokenError):
    """A request that cannot be served as asked: an empty prompt, a parameter out of range, too long a prompt."""


class ConfigError(ForetokenError):
    """Settings that contradict each other or lie out of range."""


class ModelLoadError(ForetokenError):
    """A checkpoint that cannot be read; the text names the file and the tensor."""


class ModelSaveError(ForetokenError):
    """A checkpoint that cannot be written where it was asked for; nothing is left under its name."""


class VocabularyError(ForetokenError):
    """A draft model that does not share the target's vocabulary."""


class RegistryError(ForetokenError):
    """A name that is on no shelf; the text names the nearest one that is."""

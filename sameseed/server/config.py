"""Settings of the server: its address, API keys and limits."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from sameseed.config import MAX_DRAFT_TOKENS
from sameseed.errors import ConfigError
from sameseed.server.reasoning import PARSERS

KEY_VARIABLE = "SAMESEED_API_KEY"
PREFIXES = ("vllm:", "sameseed:")
_SHORTEST_KEY = 8


@dataclass(frozen=True)
class ServerFlags:
    """Server settings that are also flags of `sameseed serve`. The comment at a field is the flag's help text."""

    host: str = "127.0.0.1"  # address to listen on; needs a key if other machines can reach it
    port: int = 8000  # port to listen on; 0 takes a free one
    # web origins that may call from a browser; '*': any
    cors: Annotated[tuple[str, ...], arg(metavar="ORIGIN", help_behavior_hint="")] = ()
    reasoning_parser: Literal["deepseek_r1", "qwen3", "seed_oss"] | None = None  # how the model marks its reasoning
    # most draft tokens per round that a request may ask for
    max_draft_tokens: Annotated[int, arg(metavar="N")] = MAX_DRAFT_TOKENS
    max_queue: int = 256  # sequences that may wait; further requests are refused with 429
    request_timeout: float = 600.0  # seconds for one request
    drain_timeout: float = 30.0  # seconds that running requests get after SIGTERM
    load_timeout: float = 1800.0  # vllm: seconds to get ready; after that it counts as dead
    metrics_prefix: Literal["vllm:", "sameseed:"] = "vllm:"  # prefix of the names in /metrics


@dataclass(frozen=True)
class ServerConfig(ServerFlags):
    """All settings of the server. `keys` holds only digests, not the keys themselves."""

    model_name: str = "embedded"  # the model's name for clients
    aliases: tuple[str, ...] = ()  # other names of the model
    keys: Keys = field(default_factory=lambda: Keys(()))
    allowed_hosts: tuple[str, ...] = ()
    detailed: bool = False  # does each answer list every round's drafted and accepted tokens?

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must lie in 0..65535, got {self.port}; 8000 is usual")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be at least 0, got {self.max_queue}")
        if not (self.request_timeout > 0 and self.load_timeout > 0) or not self.drain_timeout >= 0:
            raise ConfigError("request_timeout and load_timeout must be above 0, drain_timeout at least 0 seconds")
        if self.metrics_prefix not in PREFIXES:
            raise ConfigError(f"metrics_prefix must be one of {', '.join(PREFIXES)}, got {self.metrics_prefix!r}")
        if self.reasoning_parser not in (None, *PARSERS):
            known = ", ".join(PARSERS)
            raise ConfigError(f"reasoning_parser must be one of {known}, got {self.reasoning_parser!r}")
        if not 0 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"max_draft_tokens must lie in 0..{MAX_DRAFT_TOKENS}, got {self.max_draft_tokens}")
        if not self.loopback and not self.keys:
            raise ConfigError(
                f"{self.host} can be reached from other machines, and there is no API key: put one into a file and "
                f"give --api-key-file, or set {KEY_VARIABLE}; or listen on 127.0.0.1"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return (self.model_name, *self.aliases)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class Keys:
    """API keys, as SHA-256 digests. Every key is compared, each in constant time."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        """Raises ConfigError for a key that is too short, or not printable ASCII."""
        if any(len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() for key in keys):
            raise ConfigError(f"an API key must have at least {_SHORTEST_KEY} printable ASCII characters")
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(keys))

    def __len__(self) -> int:
        return len(self._digests)

    def tenant(self, key: bytes) -> str | None:
        """The key's tenant, a name that does not reveal the key; None for an unknown key."""
        digest = hashlib.sha256(key).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:16] if any(found) else None

    @classmethod
    def read(cls, path: Path | None) -> Keys:
        """Keys of a file (one per line; # comments) and of SAMESEED_API_KEY (comma-separated). Raises ConfigError."""
        keys = [k.strip() for k in os.environ.get(KEY_VARIABLE, "").split(",")]
        if path is not None:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot read API keys from {path} ({error}); give a text file") from None
            keys += [line.strip() for line in lines if not line.lstrip().startswith("#")]
            if not any(keys):
                raise ConfigError(f"{path} holds no API key; write one a line")
        return cls(tuple(dict.fromkeys(k for k in keys if k)))

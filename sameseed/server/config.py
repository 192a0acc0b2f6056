"""Settings of the server: its address, API keys and limits."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from sameseed.config import MAX_DRAFT_TOKENS
from sameseed.errors import ConfigError
from sameseed.fields import check_ranges, within
from sameseed.server.reasoning import NO_PARSER, PARSERS

log = logging.getLogger("sameseed.server")
KEY_VARIABLE = "SAMESEED_API_KEY"
ReasoningParser = Literal["deepseek_r1", "qwen3", "seed_oss", "openai_gptoss", "gemma4", "mistral", "none"]
_SHORTEST_KEY = 8


@dataclass(frozen=True)
class ServerFlags:
    """Server settings that are also flags of `sameseed serve`. The comment at a field is the flag's help text."""

    host: str = "127.0.0.1"  # address to listen on; needs a key if other machines can reach it
    port: int = within(8000, 0, 65535)  # port to listen on; 0 takes a free one
    uds: Annotated[Path | None, arg(metavar="PATH")] = None  # UNIX socket to listen on, instead of host and port
    ssl_certfile: Annotated[Path | None, arg(metavar="FILE")] = None  # certificate chain (PEM): https instead of http
    ssl_keyfile: Annotated[Path | None, arg(metavar="FILE")] = None  # its key; unset: in the same file
    # web origins that may call from a browser; '*': any
    cors: Annotated[tuple[str, ...], arg(metavar="ORIGIN", help_behavior_hint="")] = ()
    # how a thinking model marks its reasoning; unset: as its chat template says; none: reasoning stays in the text
    reasoning_parser: ReasoningParser | None = None
    # most draft tokens per round that a request may ask for
    max_draft_tokens: Annotated[int, arg(metavar="N")] = within(MAX_DRAFT_TOKENS, 0, MAX_DRAFT_TOKENS)
    max_queue: int = within(256, 0)  # sequences that may wait; further requests are refused with 429
    request_timeout: float = within(600.0, 0, above=True)  # seconds for one request
    drain_timeout: float = within(30.0, 0)  # seconds that running requests get after SIGTERM
    load_timeout: float = within(1800.0, 0, above=True)  # vllm: seconds to get ready; after that it counts as dead


@dataclass(frozen=True)
class ServerConfig(ServerFlags):
    """All settings of the server. `keys` holds only digests, not the keys themselves."""

    model_name: str = "embedded"  # the model's name for clients
    aliases: tuple[str, ...] = ()  # other names of the model
    keys: Keys = field(default_factory=lambda: Keys(()))
    allowed_hosts: tuple[str, ...] = ()
    detailed: bool = False  # does each answer list every round's drafted and accepted tokens?

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.reasoning_parser not in (None, NO_PARSER, *PARSERS):
            raise ConfigError(f"reasoning_parser must be one of {', '.join((*PARSERS, NO_PARSER))}")
        self.tls()
        if not self.loopback and not self.keys:
            raise ConfigError(
                f"{self.host} can be reached from other machines, and there is no API key: put one into a file and "
                f"give --api-key-file, or set {KEY_VARIABLE}; or listen on 127.0.0.1"
            )

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings, read from their files now; None for plain HTTP. Raises ConfigError for a bad pair."""
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate of that key")
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:  # the password keeps OpenSSL from asking for one in the terminal
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not PEM, or with a password"
            unread = [str(f) for f in (self.ssl_certfile, self.ssl_keyfile) if f and not os.access(f, os.R_OK)]
            raise ConfigError(
                f"{' and '.join(unread) or '--ssl-certfile and --ssl-keyfile'} cannot be used "
                f"({why.lower().replace('_', ' ')}); give a PEM certificate and its key, which has no password"
            ) from None
        return context

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return (self.model_name, *self.aliases)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class Keys:
    """API keys, as SHA-256 digests. Every key is compared, each in constant time."""

    def __init__(self, keys: Iterable[str], path: Path | None = None) -> None:
        """`path`: the file that `reload` reads again. Raises ConfigError for a key that is too short."""
        for number, key in enumerate(keys := list(keys), 1):
            if len(key) < _SHORTEST_KEY or not all("!" <= c <= "~" for c in key):
                raise ConfigError(f"API key {number} must have at least {_SHORTEST_KEY} ASCII characters and no spaces")
        self._digests = {hashlib.sha256(key.encode()).digest() for key in keys}
        self._path = path
        self._check: Callable[[Keys], None] = lambda keys: None

    def __len__(self) -> int:
        return len(self._digests)

    def tenant(self, key: bytes) -> str | None:
        """The key's tenant, a name that does not reveal the key; None for an unknown key."""
        digest = hashlib.sha256(key).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:16] if any(found) else None

    @classmethod
    def read(cls, path: Path | None) -> Keys:
        """The keys of a file and of SAMESEED_API_KEY. Raises ConfigError."""
        return cls(read_keys(path, KEY_VARIABLE), path)

    def restrict(self, check: Callable[[Keys], None]) -> None:
        """Apply a check, which raises ConfigError, now and to what `reload` reads."""
        check(self)
        self._check = check

    def reload(self) -> None:
        """Read the file again, if there is one. Raises ConfigError; then the keys stay as they are."""
        if self._path is not None:
            fresh = Keys.read(self._path)
            self._check(fresh)
            self._digests = fresh._digests


def read_keys(path: Path | None, variable: str) -> list[str]:
    """Keys of an environment variable (with commas) and of a file (one per line; # comments). Raises ConfigError."""
    lines = os.environ.get(variable, "").split(",")
    if path is not None:
        try:
            lines += path.read_text(encoding="utf-8-sig").splitlines()
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"cannot read API keys from {path} ({why}); give a text file") from None
        if mode & 0o006:
            log.warning("every user of this machine can read or change %s; chmod 600 it", path)
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if path is not None and not keys:
        raise ConfigError(f"{path} holds no API key; write one a line")
    return keys

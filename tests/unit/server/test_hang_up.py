"""SIGHUP reads the file of keys again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from sameseed.errors import ConfigError
from sameseed.server.config import Keys, ServerConfig
from sameseed.server.gate import Gate
from sameseed.server.run import Runner, Served


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Never called."""


async def test_keys_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is no good changes nothing, and neither does one that the engine in use does not allow."""
    caplog.set_level(logging.INFO, "sameseed.server")
    file = tmp_path / "keys"
    file.write_text("first-key\n")
    file.chmod(0o600)
    keys = Keys.read(file)
    client: Any = None
    made = Runner(lambda failed: Served(client, app, Gate(1)), ServerConfig(host="0.0.0.0", keys=keys))

    def two(keys: Keys) -> None:
        if len(keys) > 2:
            raise ConfigError("two at most")

    keys.restrict(two)
    for text in ("", "short", "a-good-key\nother key", "key-1111\nkey-2222\nkey-3333"):
        file.write_text(text)
        made.reload()
        assert len(keys) == 1 and keys.tenant(b"first-key")
        assert "stay" in caplog.messages.pop()
    file.write_text("second-key\nthird-key")
    made.reload()
    assert keys.tenant(b"first-key") is None and keys.tenant(b"second-key") and len(keys) == 2
    assert "reloaded" in caplog.messages and "-key" not in caplog.text
    file.chmod(0o644)
    made.reload()
    assert "chmod 600" in caplog.text

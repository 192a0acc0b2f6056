"""SIGHUP starts a rolling restart, unless it means that the terminal was closed."""

from __future__ import annotations

import os
from typing import Any

import pytest
from fixtures_server import until

from sameseed.server.config import ServerConfig
from sameseed.server.gate import Gate
from sameseed.server.run import Runner, Served


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Never called."""


def runner(renewed: list[str]) -> Runner:
    client: Any = None
    return Runner(lambda failed: Served(client, app, Gate(1), lambda: renewed.append("now")), ServerConfig())


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_rolling_restart(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda number: terminal)
    renewed: list[str] = []
    made = runner(renewed)
    made._hang_up()
    assert renewed == ["now"] and not made._server.should_exit
    made._stop()
    await until(lambda: made._server.should_exit)
    made._hang_up()
    assert renewed == ["now"], "not while it drains"


async def test_a_terminal_that_was_closed_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda number: True)
    renewed: list[str] = []
    made = runner(renewed)
    monkeypatch.setattr(os, "isatty", lambda number: False)
    made._hang_up()
    made._hang_up()  # a second SIGHUP does not act like a second SIGTERM
    await until(lambda: made._server.should_exit)
    assert not renewed and made._gate.closed

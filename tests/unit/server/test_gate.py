"""The gate, the keys and the settings: how much is admitted, from which tenant, and where the server may listen."""

import hmac
import json
import logging
import random
import shlex
import time

import pytest
from fixtures_server import visiting

from sameseed.errors import ConfigError
from sameseed.server import config as configs, gate as gates
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient
from sameseed.server.config import Keys, ServerConfig
from sameseed.server.errors import ApiError
from sameseed.server.gate import Gate
from sameseed.server.run import Runner, greeting

KEYS = ("alpha-key-1", "beta-key-22")


async def test_a_full_gate_says_when_to_return():
    gate = Gate(max_queue=3)
    gate.max_running = 2
    inside = [gate.enter("", 2, 10), gate.enter("", 3, 10)]
    with pytest.raises(ApiError) as caught:
        gate.enter("", 1, 10)
    assert caught.value.status == 429
    assert int(caught.value.headers()["retry-after"]) >= 1
    assert gate.num_refused == 1
    with inside[0]:
        pass
    inside[0].close()
    gate.enter("", 2, 10).close()
    with pytest.raises(ApiError) as caught:
        gate.enter("", 6, 10)
    assert caught.value.status == 400, "it would never fit"


async def test_large_prompts_count(monkeypatch):
    monkeypatch.setattr(gates, "MAX_TEXT", 100)
    gate = Gate(max_queue=100)
    with gate.enter("", 1, 90), pytest.raises(ApiError, match="too much text"):
        gate.enter("", 1, 20)
    with gate.enter("", 0, 90):  # a request for tokens only counts no sequence
        assert gate.num_inside == 0
        gate.enter("", 1, 10).close()
        with pytest.raises(ApiError, match="too much text"):
            gate.enter("", 0, 20)
        assert not gate.empty.is_set(), "but draining waits for it"
    assert gate.empty.is_set()
    gate.enter("", 1, 1000).close()


async def test_a_full_queue_has_room_for_who_has_nothing_inside(monkeypatch):
    monkeypatch.setattr(gates, "MAX_TEXT", 80)
    gate = Gate(max_queue=14, num_tenants=3)
    gate.max_running = 2
    flood = [gate.enter("flood", 1, 5) for _ in range(14)]  # two of 14 places and ten of 80 bytes are reserved
    with pytest.raises(ApiError, match="queue is full"):
        gate.enter("flood", 1, 0)
    with pytest.raises(ApiError, match="too much text"):
        gate.enter("flood", 0, 1)
    other = gate.enter("other", 1, 0)
    with pytest.raises(ApiError, match="queue is full"):
        gate.enter("other", 1, 0)
    third = gate.enter("third", 1, 10)
    with pytest.raises(ApiError, match="queue is full"):
        gate.enter("fourth", 1, 0)
    for ticket in (*flood, other, third, third):
        ticket.close()
    assert not gate._requests and gate.num_inside == gate.size_inside == 0, "nobody is remembered"
    gate.enter("flood", 16, 1000).close()
    alone = Gate(max_queue=14)
    alone.max_running = 2
    for ticket in [alone.enter("", 1, 5) for _ in range(16)]:
        ticket.close()


async def test_a_closed_gate():
    gate = Gate(max_queue=3)
    ticket, gate.closed = gate.enter("", 1, 1), "good night"
    with pytest.raises(ApiError, match="good night") as caught:
        gate.enter("", 1, 1)
    assert caught.value.status == 503 and "retry-after" in caught.value.headers() and not gate.empty.is_set()
    ticket.close()
    assert gate.empty.is_set() and gate.num_inside == gate.size_inside == 0


def test_keys(monkeypatch):
    """Every key is compared, whatever matches, by digests of one length."""
    compared, real = [], hmac.compare_digest
    monkeypatch.setattr(configs.hmac, "compare_digest", lambda a, b: (compared.append((a, b)), real(a, b))[1])
    keys = Keys(KEYS)
    assert len({keys.tenant(k.encode()) for k in KEYS} - {None}) == len(Keys((*KEYS, *KEYS))) == 2
    for given in (b"", b"alpha-key-", b"alpha-key-11", b"beta-key-2", b"\xff" * 11, KEYS[0].encode()):
        compared.clear()
        assert (keys.tenant(given) is None) == (given.decode("latin-1") not in KEYS)
        assert len(compared) == 2 and all(len(a) == len(b) == 32 for a, b in compared)
    for key in KEYS:
        assert key not in repr(vars(keys)) and key not in str(keys.tenant(key.encode()))
    for bad in ("short", "ümlaut-key", "alpha-key requests=4"):
        with pytest.raises(ConfigError, match="at least 8"):
            Keys((bad,))


async def test_keys_from_a_file_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESEED_API_KEY", "from-the-env, another-one")
    path = tmp_path / "keys"
    path.write_text("# ours\nfrom-the-file\n\n  padded-key  \n")
    keys = Keys.read(path)
    assert len(keys) == 4
    assert all(keys.tenant(k) for k in (b"from-the-env", b"another-one", b"from-the-file", b"padded-key"))
    monkeypatch.delenv("SAMESEED_API_KEY")
    assert len(Keys.read(None)) == 0
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        Keys.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Keys.read(tmp_path / "missing")


def test_other_machines_need_a_key():
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="no API key"):
            ServerConfig(host=host)
        assert not ServerConfig(host=host, keys=Keys(KEYS)).loopback
    assert all(ServerConfig(host=host).loopback for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))


async def test_bad_settings():
    for settings in ({"port": 70000}, {"max_queue": -1}, {"request_timeout": 0.0}, {"reasoning_parser": "x"}):
        with pytest.raises(ConfigError):
            ServerConfig(**settings)


@pytest.mark.parametrize("locked", [False, True])
def test_the_curl_line_is_one_that_a_shell_takes(locked):
    said = greeting("http://127.0.0.1:8000", "it's mine", "suffix", locked)
    line = next(line for line in said.splitlines() if "curl" in line)
    words = shlex.split(line.partition("try")[2])
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's mine"
    assert ("Authorization: Bearer $SAMESEED_API_KEY" in words) is locked
    assert "drafter: suffix" in said and "http://127.0.0.1:8000/\n" in said


async def app(scope, receive, send):
    """Never called."""


async def test_keys_are_read_again(tmp_path, caplog):
    """A file that is no good changes nothing, and neither does one that the engine in use does not allow."""
    caplog.set_level(logging.INFO, "sameseed.server")
    file = tmp_path / "keys"
    file.write_text("first-key\n")
    file.chmod(0o600)
    keys = Keys.read(file)
    made = Runner(EngineClient("x", {}), app, Gate(1), ServerConfig(host="0.0.0.0", keys=keys))

    def two(keys):
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


async def test_a_clock_that_jumps_ends_nothing(monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.choice([0.0, 4e9, 1.7e9]))
    app, service = create_app(EngineClient("x", {}), ServerConfig())
    async with visiting(app) as http:
        for _ in range(20):
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
    assert service.gate.num_inside == 0

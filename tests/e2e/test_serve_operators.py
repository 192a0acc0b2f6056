"""What operators do: keys with limits on a UNIX socket, read again by SIGHUP; TLS; signals that end nothing."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from fixtures_server import serving, wait_until

from sameseed.errors import ConfigError
from sameseed.server.config import ServerConfig
from sameseed.server.process import SERVERS_OWN
from sameseed.server.run import bind_unix

FIELDS = {"prompt": "the sum of", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def test_a_socket_its_keys_and_signals(pair_folders, tmp_path):
    """Neither a hang-up nor a log rotation ends a stream; keys that were removed are refused."""
    path, keys = tmp_path / "socket", tmp_path / "keys"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    keys.write_text("first-key\n")
    flags = ("--model", str(pair_folders[0]), "--draft", "none", "--uds", str(path), "--api-key-file", str(keys))
    with (
        serving(*flags) as server,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60) as http,
    ):
        first, second = ({"authorization": f"Bearer {name}-key"} for name in ("first", "second"))
        assert server.url == f"unix:{path}" and path.stat().st_mode & 0o777 == 0o600
        assert http.get("/version", headers=first | {"host": "backend"}).status_code == 200, "as a proxy asks"
        with pytest.raises(ConfigError, match="another server"):
            bind_unix(path)
        with http.stream("POST", "/v1/completions", json={**FIELDS, "stream": True}, headers=first) as stream:
            lines = stream.iter_lines()
            next(lines)
            keys.write_text("second-key\n")
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                server.process.send_signal(number)
            for number in SERVERS_OWN:
                os.kill(server.engine_pid, number)
            assert server.wait_log("reloaded")["keys"] == 1
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert http.get("/version", headers=first).status_code == 401
        used = http.post("/v1/completions", json=FIELDS, headers=second)
        assert used.json()["usage"]["completion_tokens"] == 200
    assert not path.exists()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two certificates for localhost, with their keys."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes certificates, is not installed")
    folder, found = tmp_path_factory.mktemp("tls"), []
    for name in ("a", "b"):
        found.append((folder / f"{name}.pem", folder / f"{name}.key"))
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        command += ["-out", str(found[-1][0]), "-keyout", str(found[-1][1])]
        subprocess.run(command, check=True, capture_output=True)
    yield found


def test_certificates(pairs, pair_folders, tmp_path):
    """A renewed certificate is used after SIGHUP; one without its key changes nothing."""
    cert, key = (Path(shutil.copy(file, tmp_path)) for file in pairs[0])
    flags = ("--model", str(pair_folders[0]), "--draft", "none", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    with serving(*flags) as server:
        assert server.url.startswith("https://127.0.0.1")

        def version(trusted):
            context = ssl.create_default_context(cafile=str(pairs[trusted][0]))
            return httpx.get(f"{server.url}/version", verify=context, headers={"host": "localhost"}).status_code

        assert version(0) == 200
        refused = httpx.get(f"{server.url}/version", verify=False, headers={"host": "evil.example"})
        assert refused.status_code == 403
        cert.write_bytes(pairs[1][0].read_bytes())
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: any("stay" in entry["message"] for entry in server.log))
        assert version(0) == 200
        key.write_bytes(pairs[1][1].read_bytes())
        server.process.send_signal(signal.SIGHUP)
        server.wait_log("reloaded")
        assert version(1) == 200


def test_certificates_that_cannot_be_used(pairs, tmp_path):
    (cert, key), (_, other) = pairs
    text = tmp_path / "text"
    text.write_text("no certificate")
    for files in ((cert, other), (key, key), (None, key), (text, key), (cert, text), (tmp_path / "none", key)):
        with pytest.raises(ConfigError, match=r"PEM|certificate"):
            ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1])


def test_paths_that_are_no_socket(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, tmp_path, tmp_path / "none" / "socket", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match="uds"):
            bind_unix(path)
    assert file.read_text() == "precious"

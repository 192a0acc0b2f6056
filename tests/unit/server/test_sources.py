"""What the server's sources must not use: other programs, connections outwards and torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE, VLLM = ROOT / "sameseed", ROOT / "packages" / "vllm" / "sameseed_vllm"
DOOR = [VLLM / f"{n}.py" for n in ("client", "link", "passable", "proxy", "relay")]
SERVER = [*sorted((PACKAGE / "server").rglob("*.py")), *DOOR]
LINK = "link.py"  # makes the only connection: to the Unix socket of the vLLM that the server started
PROGRAMS = {"subprocess", "multiprocessing", "pty", "ctypes", "code", "codeop", "runpy"}
OUTWARDS = {"urllib", "http", "httpx", "requests", "aiohttp", "ftplib", "smtplib", "telnetlib", "socketserver"}
STARTS = {"system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile"}


def imports(tree):
    """Top-level names of the modules that a file imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def calls(tree):
    """What a file calls: `name` or `owner.name`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found.append(node.func.id)
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                found.append(f"{node.func.value.id}.{node.func.attr}")
    return found


@pytest.mark.parametrize("path", SERVER, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_server_starts_no_program_and_calls_nobody(path):
    tree = ast.parse(path.read_text())
    allowed = {LINK: {"aiohttp"}, "aside.py": {"multiprocessing"}}.get(path.name, set())
    assert not imports(tree) & (PROGRAMS | OUTWARDS) - allowed
    called = calls(tree)
    starts = [c for c in called if c.startswith("os.") and (c[3:] in STARTS or c[3:].startswith(("exec", "spawn")))]
    # Exceptions: processes of ours, started by a fixed command without a shell; vLLM likewise. The helper forks itself
    # for each grammar that a client wants compiled; only bytes go through the pipe, never objects.
    may = {PACKAGE / "server" / "process.py": ["os.posix_spawn"], VLLM / "client.py": ["os.posix_spawn"]}
    assert path.name != "aside.py" or not any(c.endswith((".recv", ".send")) for c in called)
    assert starts == may.get(path, [])
    assert not any(c.endswith((".connect", ".create_connection")) for c in called)


def test_the_server_loads_no_model_library():
    """Weights are in the engine's process. The server process stays small, and a request can reach less."""
    code = (
        "import sys, sameseed.server.run, sameseed_vllm.proxy, sameseed_vllm.engine; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'safetensors', 'pickle5') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

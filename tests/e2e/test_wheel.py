"""The wheel as a user gets it: installed into an environment of its own, without a compiler."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from sameseed import LLM, SamplingParams, ops
from sameseed.devices import native_isa

pytestmark = pytest.mark.slow
DIST = Path(__file__).resolve().parents[2] / "dist"
PROMPT = "A plant needs light because"


def matching_wheel():
    """The wheel in dist/ for the running Python; 3.12 and later use the stable-ABI wheel."""
    tag = "cp312-abi3" if sys.version_info >= (3, 12) else f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheels = sorted(DIST.glob(f"sameseed-*-{tag}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel for {tag} in dist/; `make wheel` builds it")
    return wheels[-1]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with an environment in venv/ that holds only the wheel and its dependencies."""
    home, wheel = tmp_path_factory.mktemp("elsewhere"), matching_wheel()
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    pip = [str(home / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    start = time.monotonic()
    subprocess.run([*pip, *shlex.split(os.environ.get("WHEEL_TORCH_ARGS", "")), str(wheel)], check=True)
    print(f"pip install: {time.monotonic() - start:.1f} s")
    return home


@pytest.fixture(scope="module")
def run(home):
    """Runs a command of the environment with no other programs on the path; returns what it printed."""

    def command(*words):
        ran = subprocess.run(words, cwd=home, env=environment(home), capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return command


def environment(home):
    """Environment variables without any of this process's, so without paths to a compiler or to the checkout."""
    return {"PATH": str(home / "venv" / "bin"), "HOME": str(home), "LANG": "C.UTF-8", "COLUMNS": "80"}


def test_the_wheel_brings_the_kernels_of_every_processor(home, run):
    code = "import sameseed._native as n; from sameseed.devices import native_isa; print(n.__file__, native_isa())"
    file, isa = run("python", "-c", code).split()
    assert file.startswith(str(home))
    assert isa == native_isa()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_wheel_writes_the_bytes_that_this_build_writes(run, temperature):
    flags = ["--max-tokens", "48", "--temperature", str(temperature), "--seed", "7", "--threads", "1"]
    said = json.loads(run("sameseed", "generate", PROMPT, "--json", *flags))
    ops.set_num_threads(1)
    llm = LLM("embedded", draft="embedded-draft")
    (own,) = llm.generate(PROMPT, SamplingParams(max_tokens=48, temperature=temperature, seed=7))
    assert said["text"] == own.text


def test_the_demo_runs_without_extras(run):
    run("sameseed", "demo", "--seconds", "1", "--fetch-seconds", "0")  # exits with 1 if a text differs


@pytest.fixture(scope="module")
def url(home, run):
    """A server from the environment, after installing the extra that it needs."""
    run("python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "sameseed[server]")
    command = [str(home / "venv" / "bin" / "sameseed"), "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, cwd=home, env=environment(home), stderr=subprocess.PIPE, text=True) as process:
        entries = (json.loads(line) for line in process.stderr)
        listening = next(entry for entry in entries if entry["message"] == "listening")
        next(entry for entry in entries if entry["message"] == "ready")
        yield str(listening["url"])
        process.terminate()
        process.stderr.read()
    assert process.returncode == 0


def test_a_client_gets_an_answer_from_the_wheels_server(url):
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    made = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=8, temperature=0)
    assert made.usage is not None and made.usage.completion_tokens == 8
    assert "sameseed" in httpx.get(url).text.lower()  # the page is in the wheel too

"""Finds out which vLLM is installed, by asking the interpreter that has it. vLLM itself is not loaded."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

from sameseed.errors import ConfigError
from sameseed_vllm.flags import Installed

LOOK = Path(__file__).with_name("look.py")
PATIENCE = 120.0  # seconds for an interpreter to start, on a busy machine
_GET = "install it: pip install vllm, or name the python of an environment that has it with --vllm-python"


def interpreter(python: str | None) -> str:
    """The interpreter that has vLLM: `python`, or this one. Raises ConfigError if it is no program, or has no vLLM."""
    if python is None and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"--engine vllm needs vLLM; {_GET}")
    program = sys.executable if python is None else shutil.which(python)
    if program is None:
        raise ConfigError(f"--vllm-python {python} is no program; give the python of an environment that has vLLM")
    return program


def look(python: str | None) -> Installed:
    """The vLLM that an interpreter has. Raises ConfigError if it has none."""
    program = interpreter(python)
    command = [program, str(LOOK), "arctic_inference", "ray"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise ConfigError(f"{program} does not run Python programs ({said[-1][:200]}); {_GET}") from None
    if told is None:
        raise ConfigError(f"{program} has no vLLM; {_GET}")
    return Installed(told["version"], told["cpu"], frozenset(told["flags"]), frozenset(told["modules"]))

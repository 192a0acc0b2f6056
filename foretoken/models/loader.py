"""Load a Hugging Face folder (config.json, safetensors, sharded or not) into a Llama, checking everything."""

from __future__ import annotations

import os
from pathlib import Path

from foretoken.errors import ModelLoadError
from foretoken.formats.scheme import QuantScheme
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.config import read_config
from foretoken.models.llama import Llama
from foretoken.models.weights import Progress, read_weights
from foretoken.ops import Ops

EMBEDDED = {"embedded": "target", "embedded-target": "target", "embedded-draft": "draft"}
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other layouts of the same weights: a second download of gigabytes


def resolve_model(name: str) -> Path:
    """Folder of a model: "embedded", "embedded-draft", a local folder, or a hub id (then it is downloaded).

    Raises ModelLoadError where there is none.
    """
    if name in EMBEDDED:
        return Path(__file__).parent.parent / "assets" / EMBEDDED[name]
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, it leaves an unknown user as it is
    if name and path.is_dir():  # "" would be the working directory
        return path
    if name and path.exists():
        raise ModelLoadError(f"{name} is a file; give the folder that holds config.json and *.safetensors")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelLoadError(f"no model at {name!r}: give a folder, a hub id like 'org/name', or 'embedded'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
    except Exception as error:  # besides its own errors, those of the HTTP library that this version is built on
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"no folder {name!r} here, and the hub did not give it: {first}") from None


def load_model(
    folder: Path,
    ops: Ops,
    quant: QuantScheme | None = None,
    max_model_len: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Llama:
    """The model in `folder`, its weights stored by `quant` (default: as the checkpoint has them).

    Raises ModelLoadError naming the tensor that is missing, extra, of the wrong shape or not finite.
    `progress(done, total)` counts values.
    """
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        weights = read_weights(config, checkpoint, quant or QuantScheme(), ops, device, progress)
    return Llama(config, weights, ops, max_model_len)

"""Adapt a draft head to a target rotated by `rotate`: fold the rotation into the weights that read the target's states.

Method `rotate` multiplies the residual stream h by an orthogonal matrix Q. A head that was trained to read h then gets
h Q. An EAGLE-3 head makes its own features from the target's states, so only its input weights change. Its fc becomes
fc Q. Norms before fc see vectors of the same length; their weights are folded into fc. An embedding that the head
shares with the target enters through q, k and v, so the embedding norm's weights and Q are folded into these alike.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import read_json
from sameseed.models.eagle_loader import open_head
from sameseed.models.head_config import ROTATED_FOR, TARGET_SIGNS, HeadConfig, is_head, rotation_of
from sameseed.models.loader import open_checkpoint, read_config
from sameseed.models.safetensors_file import write_file, write_safetensors
from sameseed.models.save import check_destination, copy_files, new_folder
from sameseed.quantize._run import EMBEDDING, FILE, HEAD
from sameseed.quantize.rotate import rotate_rows

Tensors = dict[str, Tensor]


def turn_head(head: Path, target: Path, out: Path, original: Path | None = None, overwrite: bool = False) -> Path:
    """Write the EAGLE-3 head in `head`, trained for a model, for `target`: that model after method `rotate`.

    `original`: the model before the rotation, required where the head shares the target's LM head. The rotation folded
    a norm into that LM head, so the written head gets the original one as its own. Tensor types are kept; folded
    weights are rounded to them.

    Raises ConfigError for a head or a target that this does not work for, ModelLoadError and ModelSaveError.
    """
    out = Path(os.path.abspath(out))
    check_destination(out, overwrite, head)
    if not is_head(head):
        raise ConfigError(f"{head} is no draft head; --head-for turns one, e.g. sameseed quantize HEAD --head-for DIR")
    raw, seed = read_json(head / "config.json"), rotation_of(target)
    if seed is None:
        raise ConfigError(
            f"{target} is no checkpoint of method rotate (its {FILE} would say so); its target's other forms take a "
            "head as it is"
        )
    if ROTATED_FOR in raw:
        raise ConfigError(f"{head} was turned before, for the seed {raw[ROTATED_FOR]}; give the head as it was")
    with open_head(head, read_config(target)) as (config, files, shapes, layer):
        _check(head, config, files, shapes)
        tensors = {name: files.tensor(name) for name in shapes}
        if "d2t" in files:
            tensors["d2t"] = files.raw("d2t")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = _lm_head(head, config, original)
    _fold(tensors, config, layer, seed)
    with new_folder(out, overwrite, head) as folder:
        copy_files(head, folder)
        write_safetensors(folder / "model.safetensors", tensors)
        card = f"# {head.name}, for {target.name}\n\nWritten by sameseed from {head.name}: turned with its target.\n"
        config_text = json.dumps({**raw, ROTATED_FOR: seed, TARGET_SIGNS: None}, indent=2)
        for name, text in {"config.json": config_text, "README.md": card}.items():
            write_file(folder / name, [text.encode()])
    return out


def _check(head: Path, config: HeadConfig, files: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    if config.kind == "block":
        raise ConfigError(f"{head} is a block head, and only EAGLE-3 heads are turned; train one for that target")
    if config.kind != "eagle3":
        raise ConfigError(
            f"{head} is an EAGLE-1 or 2 head: its features are the target's own, whose last norm the rotation folded "
            "away; train one for the rotated target (sameseed train head)"
        )
    if config.norm_before_fc and config.fc_norm:
        raise ConfigError(
            f"{head} norms all states and then each: the weights between cannot be turned; train one for the rotated "
            "target (sameseed train head)"
        )
    if any(files.scheme(name) is not None for name in shapes):
        raise ConfigError(f"{head} is quantized; give the head in 16 or 32 bits, and choose --draft-format at load")


def _lm_head(head: Path, config: HeadConfig, original: Path | None) -> Tensor:
    """The LM head [V, C] that the draft head shares, from the model before the rotation."""
    if original is None:
        raise ConfigError(f"{head} shares its target's LM head; name the target before its rotation: --original MODEL")
    model = read_config(original)
    config.check_target(model)
    with open_checkpoint(original) as source:
        source.check(model)
        return source.tensor(f"{EMBEDDING if model.tied_embeddings else HEAD}.weight")


def _fold(tensors: Tensors, config: HeadConfig, layer: str, seed: int) -> None:
    """Fold Q and the weights of preceding norms into fc, and into q, k and v where the embedding is the target's."""
    norms = ["input_norm.weight"] if config.norm_before_fc else []
    norms += [f"fc_norm.{i}.weight" for i in range(config.num_captures)] if config.fc_norm else []
    gain = torch.cat([tensors[n].float() for n in norms]) if norms else torch.ones(())
    fc = tensors["fc.weight"]
    parts = (fc.float() * gain).view(len(fc), config.num_captures, -1)
    tensors["fc.weight"] = rotate_rows(parts, seed).flatten(1).to(fc.dtype)
    if "embed_tokens.weight" not in tensors:
        norms.append(f"{layer}.input_layernorm.weight")
        gain, width = tensors[norms[-1]].float(), config.layer.hidden_size
        for name in (f"{layer}.self_attn.{n}_proj.weight" for n in "qkv"):
            weight = tensors[name]
            turned = rotate_rows(weight[:, :width].float() * gain, seed).to(weight.dtype)
            tensors[name] = torch.cat([turned, weight[:, width:]], dim=1)
    for norm in norms:
        tensors[norm] = torch.ones_like(tensors[norm])

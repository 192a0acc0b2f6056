"""Load a Hugging Face folder (config.json, safetensors, sharded or not) into a Llama, checking everything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import ModelLoadError
from foretoken.formats import scheme
from foretoken.formats.scheme import QuantScheme, QuantTensor
from foretoken.models.config import ModelConfig, read_config
from foretoken.models.layers import LayerWeights, ModelWeights
from foretoken.models.llama import Llama
from foretoken.ops import Ops

EMBEDDED = {"embedded": "target", "embedded-target": "target", "embedded-draft": "draft"}
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other layouts of the same weights: a second download of gigabytes
# Tensors of older checkpoints that can be computed from the config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias")

Progress = Callable[[int, int], None]


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
    `progress(done, total)` is called after every tensor.
    """
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        weights = _read_weights(config, checkpoint, quant or QuantScheme(), device, progress)
    return Llama(config, weights, ops, max_model_len)


class Checkpoint:
    """The tensors of a folder's safetensors files, by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._where: dict[str, str] = {}

    def __enter__(self) -> Checkpoint:
        try:
            for file in self._file_names():
                path = self.folder / file
                if not path.exists():
                    raise ModelLoadError(f"{path} is missing, though the index names it; download it again")
                opened = self._stack.enter_context(_open(path))
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    self._files[name] = opened
                    self._where[name] = file
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _file_names(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                names = sorted(set(weight_map.values()))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ModelLoadError(f"{index} is no valid index ({error!r}); download it again") from None
            if any(not isinstance(n, str) or Path(n).name != n for n in names):
                raise ModelLoadError(f"{index} names files outside its folder; that is not a sound checkpoint")
            return names
        if (self.folder / "model.safetensors").exists():  # others beside it are other forms of the same weights
            return ["model.safetensors"]
        names = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if not names:
            other = [p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
            hint = f"; {other[0]} is a pickle, which is never opened: convert it with safetensors" if other else ""
            raise ModelLoadError(f"{self.folder} holds no *.safetensors file{hint}")
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """One tensor, checked to be finite."""
        try:
            value: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise ModelLoadError(f"tensor {name} in {self._where[name]} cannot be read ({error})") from None
        if not torch.isfinite(value.sum()) and not torch.isfinite(value).all():  # the sum is the fast check
            raise ModelLoadError(f"tensor {name} in {self._where[name]} holds NaN or infinity; the file is damaged")
        return value

    def check(self, config: ModelConfig) -> None:
        """Names, shapes and types against the config, before any weight is read."""
        expected = expected_shapes(config)
        missing = [n for n in expected if n not in self._files]
        if missing:
            raise ModelLoadError(
                f"{self.folder}: tensor {missing[0]} is missing ({len(missing)} in all); is it the model that "
                "config.json describes?"
            )
        tied_head = {"lm_head.weight"} if config.tied_embeddings else set()
        extra = [
            n for n in self._files if n not in expected and n not in tied_head and not n.endswith(IGNORED_SUFFIXES)
        ]
        if extra:
            raise ModelLoadError(
                f"{self.folder}: unexpected tensor {sorted(extra)[0]} ({len(extra)} in all); a {config.architecture} "
                "with this config.json has none of that name"
            )
        for name, shape in expected.items():
            view = self._files[name].get_slice(name)
            found = tuple(view.get_shape())
            if found != shape:
                raise ModelLoadError(
                    f"{self.folder}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}"
                )
            if view.get_dtype() not in ("F32", "BF16", "F16"):
                raise ModelLoadError(
                    f"{self.folder}: tensor {name} is {view.get_dtype()}; only F32, BF16 and F16 can be read"
                )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a sound safetensors file ({error}); download it again") from None


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must hold, by Hugging Face name, with its shape."""
    hidden, dim, inter = config.hidden_size, config.head_dim, config.intermediate_size
    q_width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        linears = {
            f"{attn}.q_proj": (q_width, hidden, config.qkv_bias),
            f"{attn}.k_proj": (kv_width, hidden, config.qkv_bias),
            f"{attn}.v_proj": (kv_width, hidden, config.qkv_bias),
            f"{attn}.o_proj": (hidden, q_width, config.o_bias),
            f"{mlp}.gate_proj": (inter, hidden, config.mlp_bias),
            f"{mlp}.up_proj": (inter, hidden, config.mlp_bias),
            f"{mlp}.down_proj": (hidden, inter, config.mlp_bias),
        }
        for name, (out, width, bias) in linears.items():
            shapes[f"{name}.weight"] = (out, width)
            if bias:
                shapes[f"{name}.bias"] = (out,)
        if config.qk_norm:
            shapes[f"{attn}.q_norm.weight"] = shapes[f"{attn}.k_norm.weight"] = (dim,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{norm}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _read_weights(
    config: ModelConfig, checkpoint: Checkpoint, quant: QuantScheme, device: str, progress: Progress | None
) -> ModelWeights:
    total = len(expected_shapes(config))
    done = 0

    def read(name: str) -> Tensor:
        nonlocal done
        value = checkpoint.tensor(name)
        done += 1
        if progress is not None:
            progress(done, total)
        return value.to(device)

    def vector(name: str, present: bool = True) -> Tensor | None:
        return read(name).float() if present else None

    def stacked(names: list[str]) -> QuantTensor:
        parts = [quant.encode(read(f"{n}.weight")) for n in names]
        return parts[0] if len(parts) == 1 else scheme.get(parts[0].format).concat(parts)

    def biases(names: list[str], present: bool) -> Tensor | None:
        return torch.cat([read(f"{n}.bias").float() for n in names]) if present else None

    def layer(i: int) -> LayerWeights:
        at = f"model.layers.{i}"
        qkv = [f"{at}.self_attn.{n}_proj" for n in "qkv"]
        gate_up = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]
        return LayerWeights(
            input_norm=read(f"{at}.input_layernorm.weight").float(),
            qkv=stacked(qkv),
            qkv_bias=biases(qkv, config.qkv_bias),
            q_norm=vector(f"{at}.self_attn.q_norm.weight", config.qk_norm),
            k_norm=vector(f"{at}.self_attn.k_norm.weight", config.qk_norm),
            o=stacked([f"{at}.self_attn.o_proj"]),
            o_bias=biases([f"{at}.self_attn.o_proj"], config.o_bias),
            post_norm=read(f"{at}.post_attention_layernorm.weight").float(),
            gate_up=stacked(gate_up),
            gate_up_bias=biases(gate_up, config.mlp_bias),
            down=stacked([f"{at}.mlp.down_proj"]),
            down_bias=biases([f"{at}.mlp.down_proj"], config.mlp_bias),
        )

    embedding = stacked(["model.embed_tokens"])
    layers = tuple(layer(i) for i in range(config.num_layers))
    norm = read("model.norm.weight").float()
    head = embedding if config.tied_embeddings else stacked(["lm_head"])
    return ModelWeights(embedding, layers, norm, head)

"""Write a checkpoint: a folder that appears under its name only once it is complete and on the disk.

The layout of quantized matrices is that of compressed-tensors where it can describe every scheme (`config_groups`),
that of bitsandbytes where all matrices are nf4, and otherwise sameseed's own (`models/layouts/sameseed.py`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ConfigError, ModelSaveError
from sameseed.models.config import DEFAULTS, OUTER, parse_config, read_json
from sameseed.models.layouts import sameseed as own
from sameseed.models.safetensors_file import name_files, sync_folder, write_file, write_safetensors
from sameseed.models.weights import expected_shapes
from sameseed.scheme import QuantScheme, QuantTensor, get
from sameseed.special import TEMPLATES

SHARD = 1 << 30  # bytes of tensors that are gathered in memory before a file is written
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt",
    "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md",
)  # fmt: skip


def save_quantized(
    out: Path,
    source: Path,
    tensors: Iterable[tuple[str, Tensor | QuantTensor]],
    schemes: Mapping[str, QuantScheme],
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    card: str = "",
    overwrite: bool = False,
    shard_bytes: int = SHARD,
) -> Path:
    """Write the model of `source` (a folder or a GGUF file) with other weights to the folder `out`, all or nothing.

    `tensors`: every tensor of the model with its dense name (`model.norm.weight`), read one at a time. The modules in
    `schemes` come stored in their scheme (plain layout), all others dense. `config`: changes to config.json; `files`:
    more text files by name; `card`: a line for the model card. At most `shard_bytes` (or one tensor, if that is larger)
    are held at a time. An existing `out` is replaced only with `overwrite`, and only once the new one is complete.

    Raises ModelSaveError where `out` is taken or cannot be written, ConfigError for tensors that contradict `schemes`.
    """
    out = Path(os.path.abspath(out))  # absolute: `out` may be the working directory
    raw = {**source_config(source), **(config or {})}
    for name in ("quantization_config", "compression_config", "quantization"):  # the last is MLX's
        raw.pop(name, None)
    suppressed = raw.pop("suppress_tokens", None) if source.is_file() else None  # transformers wants it elsewhere
    if any(scheme.weights == "mxfp4" for scheme in schemes.values()):
        raw["dtype"] = raw["torch_dtype"] = "bfloat16"  # transformers decodes mxfp4 to nothing else
    with new_folder(out, overwrite, source) as partial:
        copy_files(source, partial)
        writer = _Writer(partial, schemes, raw, shard_bytes)
        for name, value in tensors:
            writer.add(name, value)
        writer.finish()
        raw["quantization_config"] = writer.quantization_config()
        title = source.stem if source.is_file() else source.name
        formats = ", ".join(sorted({str(s) for s in schemes.values()}))
        about = f"Written by sameseed from {source.name}: {len(schemes)} matrices in {formats}.\n"
        readme = f"# {title}, quantized\n\n{about}" + (f"\n{card}\n" if card else "")
        texts = {"config.json": json.dumps(raw, indent=2), "README.md": readme, **(files or {})}
        if suppressed:
            generation = {"eos_token_id": raw["eos_token_id"], "suppress_tokens": suppressed}
            texts["generation_config.json"] = json.dumps(generation, indent=2)
        for name, text in texts.items():
            write_file(partial / name, [text.encode()])
    return out


@contextmanager
def new_folder(out: Path, overwrite: bool, source: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` when the block succeeds, and removed otherwise.

    An existing checkpoint `out` is replaced only with `overwrite`, at the end, and never if it holds `source`.
    Raises ModelSaveError where `out` is taken, and for any OSError inside the block.
    """
    out = Path(os.path.abspath(out))
    check_destination(out, overwrite, source)
    mark = secrets.token_hex(4)
    partial, old = (out.parent / f".{out.name}.{kind}-{mark}" for kind in ("unfinished", "old"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        sync_folder(partial)
        if replaced := out.is_dir() and any(out.iterdir()):
            out.rename(old)
        try:
            partial.rename(out)
        except BaseException:
            if replaced:
                old.rename(out)
            raise
        sync_folder(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ModelSaveError(
            f"{out} cannot be written ({error.strerror or error}); make room, or choose another place"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # already renamed after success


OURS = (".safetensors", ".json", ".jinja", ".md", ".model", ".txt")  # files that a replaced folder may hold


def check_destination(out: Path, overwrite: bool, source: Path) -> None:
    """Raises ModelSaveError unless writing to `out` can destroy nothing except an older checkpoint."""
    if out.is_symlink():
        raise ModelSaveError(f"{out} is a link; name the place itself")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ModelSaveError(f"{out} exists already; choose another place, or overwrite it (--overwrite)")
    if source.resolve().is_relative_to(out.resolve()):
        raise ModelSaveError(f"{out} holds the model itself, and would be lost; choose another place")
    if not out.is_dir() or not (out / "config.json").exists():
        raise ModelSaveError(f"{out} is no checkpoint, and is not overwritten; choose another place")
    files = [*out.glob(f"{TEMPLATES}/*"), *(p for p in sorted(out.iterdir()) if p.name != TEMPLATES)]
    strange = next((p.name for p in files if not p.is_file() or (p.suffix not in OURS and p.name not in COPIED)), None)
    if strange is not None:
        raise ModelSaveError(f"{out} holds {strange}, which is not of a checkpoint; move it, or choose another place")


def source_config(source: Path) -> dict[str, Any]:
    """The config.json of a folder, or an equivalent one for a GGUF file. Raises ConfigError if there is none.

    Of a Mistral 3, which also sees, it is that of the language model alone, which is all that is written.
    """
    if not source.is_file():
        raw = read_json(source / "config.json")
        if not isinstance(text := raw.get("text_config"), dict):
            return raw
        text = {"model_type": "mistral", **DEFAULTS["Mistral3"], **text}
        name = "Ministral3ForCausalLM" if text["model_type"] == "ministral3" else "MistralForCausalLM"
        outer = {key: raw[key] for key in (*OUTER, "dtype", "torch_dtype") if raw.get(key) is not None}
        return {**text, **outer, "architectures": [name]}
    from sameseed.models.gguf.config import raw_config
    from sameseed.models.gguf.header import GGUFFile

    with closing(GGUFFile(source)) as file:
        raw = raw_config(file)
    if raw["rope_parameters"]["rope_type"] == "factors":
        raise ConfigError(f"{source}: config.json cannot name its rope factors; start from the original")
    return raw


def copy_files(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template, generation settings and licence from a model to `folder`."""
    if source.is_file():
        from sameseed.models.gguf.tokenizer import read_gguf_tokenizer

        for name, text in read_gguf_tokenizer(source).as_files().items():
            write_file(folder / name, [text.encode()])
    for name in COPIED if not source.is_file() else ():
        if (source / name).is_file():
            write_file(folder / name, [(source / name).read_bytes()])
    for file in sorted((source / TEMPLATES).glob("*.jinja")):
        (folder / TEMPLATES).mkdir(exist_ok=True)
        write_file(folder / TEMPLATES / file.name, [file.read_bytes()])


class _Writer:
    """Writes tensors to safetensors files, and builds the quantization_config of their schemes."""

    def __init__(self, folder: Path, schemes: Mapping[str, QuantScheme], raw: Mapping[str, Any], shard: int) -> None:
        self.folder = folder
        self.schemes = schemes
        self.expected = expected_shapes(parse_config(raw))
        self.method = method_for(schemes.values())
        self.shard = shard
        self.config: dict[str, Any] = {}  # of the first matrix
        self.groups: dict[str, tuple[dict[str, Any], list[str]]] = {}  # by content: the group, its modules
        self.files: list[tuple[Path, list[str]]] = []
        self._waiting: dict[str, Tensor] = {}
        self._size = self._total = 0

    def add(self, name: str, value: Tensor | QuantTensor) -> None:
        module = name.removesuffix(".weight")
        if tuple(value.shape) != self.expected.get(name) or isinstance(value, QuantTensor) != (module in self.schemes):
            wanted = self.schemes.get(module, "floats")
            raise ConfigError(f"the model has no tensor {name} {list(value.shape)} in {wanted}")
        found = {name: value} if isinstance(value, Tensor) else self._stored(module, value)
        for key, tensor in found.items():
            size = tensor.numel() * tensor.element_size()
            if self._waiting and self._size + size > self.shard:
                self._flush()
            self._waiting[key] = tensor
            self._size += size

    def _stored(self, module: str, q: QuantTensor) -> dict[str, Tensor]:
        scheme = self.schemes[module]
        if q.format != scheme.weights or q.activations != scheme.activations or q.order is not None:
            raise ConfigError(f"module {module} comes in {q.format}, or in another order of columns, not in {scheme}")
        if self.method == "sameseed":
            return own.tensors_of(module, q)
        config: dict[str, Any] = get(q.format).config(q)
        self.config = self.config or config
        if self.method == "compressed-tensors":
            group = config["config_groups"]["group_0"]
            self.groups.setdefault(json.dumps(group, sort_keys=True), (group, []))[1].append(module)
        return get(q.format).checkpoint(module, q)

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self.files)}"
        write_safetensors(path, self._waiting)
        self.files.append((path, list(self._waiting)))
        self._total += self._size
        self._waiting, self._size = {}, 0

    def finish(self) -> None:
        """Write the remaining tensors, the final file names and the index."""
        self._flush()
        name_files(self.folder, self.files, self._total)

    def quantization_config(self) -> dict[str, Any]:
        if self.method == "sameseed":
            return own.config_of(self.schemes)
        dense = [n.removesuffix(".weight") for n, shape in self.expected.items() if len(shape) == 2]
        apart = {*self.schemes, "model.embed_tokens"}
        dense = list(dict.fromkeys(m for m in [*dense, "lm_head"] if m not in apart))
        if self.method == "bitsandbytes":
            return {**self.config, "llm_int8_skip_modules": dense}
        groups = list(self.groups.values())
        layouts = {g["format"] for g, _ in groups}
        made = {}
        for i, (group, modules) in enumerate(groups):
            # A single group targets all linear layers except `ignore`, and names what vLLM does not count as linear;
            # several groups name their modules.
            ends = [m for m in ("model.embed_tokens", "lm_head") if m in modules]
            targets = ["Linear", *ends] if len(groups) == 1 else modules
            made[f"group_{i}"] = {**group, "targets": targets}
        layout = layouts.pop() if len(layouts) == 1 else "mixed-precision"
        return {**self.config, "format": layout, "config_groups": made, "ignore": dense}


def method_for(schemes: Iterable[QuantScheme]) -> str:
    """The quant_method that can describe all these schemes: "compressed-tensors", "bitsandbytes" or "sameseed"."""
    said = (get(scheme.weights).config(scheme.encode(torch.zeros(128, 128))) for scheme in set(schemes))
    methods = {str(config.get("quant_method", "sameseed")) for config in said}
    return methods.pop() if len(methods) == 1 else "sameseed"

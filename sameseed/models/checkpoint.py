"""Checkpoint: the tensors of a folder's safetensors files, read in rows to keep large ones out of memory.

It reads dense tensors, and quantized matrices in the layouts of `models/layouts`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence as Seq
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ModelLoadError, say_once
from sameseed.models.config import ModelConfig, View, family, one_of
from sameseed.models.layouts import PACKED, layout_of
from sameseed.models.layouts.base import Layout, StoredMatrix, cache_scale, finite, round_scheme, rounded
from sameseed.models.layouts.patterns import TEXT_PARTS
from sameseed.models.safetensors_file import DTYPES, RAW, Entry, SafetensorsFile
from sameseed.models.weights import Shapes, TensorSource, expected_shapes
from sameseed.scheme import QuantScheme, QuantTensor, get

# Tensors of older checkpoints that can be computed from the config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias")
MTP_FILES = "*[mM][tT][pP]*.safetensors"  # files that may hold an MTP block although no index names them
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WHOLE = "model.safetensors"
SOME = 4096  # rows of an embedding that are compared at a time
# The experts of Gemma 4 are not in `mlp`, and in some files in `moe`.
EXPERTS = re.compile(r"(?<!\.mlp)(?:\.moe|\.feed_forward)?\.experts\.")
LFM2_EXPERT = re.compile(r"\.feed_forward\.experts\.(\d+)\.w([123])\.")
LFM2_PARTS = {"1": "gate", "2": "down", "3": "up"}
OTHER_PARTS = tuple(  # of a model that also sees or hears
    f"{outer}{part}"
    for outer in ("", "model.")
    for part in ("vision_", "visual.", "multi_modal_projector.", "embed_vision.", "audio_", "embed_audio.")
)


class Checkpoint(TensorSource):
    """The tensors of a folder by name: a context manager that holds the files open, and a `TensorSource` of weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, SafetensorsFile] = {}  # by tensor name
        # Quantized matrices by the name of their dense tensor; filled by `check`.
        self._stored: dict[str, StoredMatrix] = {}
        self._views: dict[str, View] = {}  # tensors inside stacked ones
        self._recent: tuple[str, QuantTensor | Tensor] | None = None  # the quantized matrix that was read last
        self._layout: Layout | None = None

    def __enter__(self) -> Checkpoint:
        try:
            names, places = self._file_names()
            beside = sorted(p.name for p in self.folder.glob(MTP_FILES) if p.name not in names)
            for file in names + beside:
                path = self.folder / file
                if not path.exists():
                    raise ModelLoadError(f"{path} is missing, though the index names it; download it again")
                opened = SafetensorsFile(path)
                self._stack.callback(opened.close)
                for name in opened.entries:
                    if places.get(name, file) != file:
                        continue  # the index names another file for this tensor
                    if file in beside and (name in self._files or not name.startswith("mtp.")):
                        continue
                    if name in self._files:
                        both = f"{self._files[name].path} and in {file}"
                        raise ModelLoadError(f"tensor {name[:80]} is in {both}; take one file away")
                    self._files[name] = opened
            astray = next((n for n in places if n not in self._files and not n.endswith(IGNORED_SUFFIXES)), None)
            if astray is not None:
                place = self.folder / places[astray]
                raise ModelLoadError(f"tensor {astray[:80]} is not in {place}; download it and the index again")
            self.rename(_short_name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _file_names(self) -> tuple[list[str], dict[str, str]]:
        """The files to open, and the file that the index (if there is one) names for each tensor."""
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                names = sorted(set(weight_map.values()))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ModelLoadError(f"{index} is no valid index ({error!r}); download it again") from None
            if any(not isinstance(n, str) or Path(n).name != n for n in names):
                raise ModelLoadError(f"{index} names files outside its folder; that is not a sound checkpoint")
            if WHOLE in names or not (self.folder / WHOLE).exists():
                return names, weight_map
            say_once(f"{self.folder}: {WHOLE} is read, as in transformers, not the files of {index.name}")
        if (self.folder / WHOLE).exists():  # other files hold the same weights in other forms
            return [WHOLE], {}
        names = sorted(p.name for p in self.folder.glob("*.safetensors") if not p.name.startswith("adapter_"))
        if not names:
            other = [p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
            hint = f"; {other[0]} is a pickle, which is never opened: convert it with safetensors" if other else ""
            raise ModelLoadError(f"{self.folder} holds no *.safetensors file{hint}")
        return names, {}

    def __contains__(self, name: object) -> bool:
        return name in self._files

    # --- TensorSource; only after `check` ---

    def dtype(self, name: str) -> torch.dtype:
        if name in self._stored:
            return torch.float32
        name = self._views[name].tensor if name in self._views else name
        return DTYPES[self._entry(name).dtype]

    def scheme(self, name: str) -> QuantScheme | None:
        stored = self._stored.get(name)
        return None if stored is None else stored.scheme

    def bits(self, name: str) -> float:
        stored = self.scheme(name)
        return super().bits(name) if stored is None else float(get(stored.weights).bits)

    def in_parts(self, name: str) -> bool:
        return name not in self._stored

    def stored(self, name: str, start: int = 0, stop: int | None = None) -> QuantTensor:
        value = self._read(name)
        self._recent = None  # the caller holds the matrix now; do not keep a second reference
        if isinstance(value, QuantTensor):
            return value
        return rounded(self._stored[name].scheme, value.shape[0], lambda start, stop: value[start:stop])

    def tensor(self, name: str) -> Tensor:
        if name in self._stored:
            value = self._read(name)
            return get(value.format).decode(value) if isinstance(value, QuantTensor) else value
        if name in self._views:
            return self._viewed(name).clone()
        entry = self._entry(name)
        return self._finite(name, entry.begin, entry.end).view(entry.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._stored:
            value = self._read(name)
            if stop == value.shape[0]:
                self._recent = None
            if isinstance(value, QuantTensor):
                return get(value.format).decode_rows(value, torch.arange(start, stop))
            return value[start:stop].clone()
        if name in self._views:
            return self._viewed(name)[start:stop].clone()
        entry = self._entry(name)
        width = (entry.end - entry.begin) // entry.shape[0]  # bytes of a row
        begin = entry.begin + start * width
        return self._finite(name, begin, begin + (stop - start) * width).view(stop - start, entry.shape[1])

    def _viewed(self, name: str) -> Tensor:
        """A tensor inside a stacked one."""
        view = self._views[name]
        entry = self._entry(view.tensor, view.entry)
        value = self._finite(view.tensor, entry.begin, entry.end).view(entry.shape)
        return (value.T if view.transposed else value)[view.rows]

    def _entry(self, name: str, index: int | None = None) -> Entry:
        """Where a tensor lies in its file, or entry `index` of its first axis."""
        entry = self._files[name].entries[name]
        if index is None:
            return entry
        size = (entry.end - entry.begin) // entry.shape[0]
        begin = entry.begin + index * size
        return replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size)

    def _read(self, name: str) -> QuantTensor | Tensor:
        if self._recent is None or self._recent[0] != name:
            self._recent = None  # free the last matrix before reading the next one
            value = self._stored[name].read()
            if not finite(value):
                raise ModelLoadError(f"tensor {name} in {self.folder} holds NaN or infinity; the file is damaged")
            self._recent = name, value
        return self._recent[1]

    def _finite(self, name: str, begin: int, end: int, dtype: torch.dtype | None = None) -> Tensor:
        file = self._files[name]
        value = file.read(begin, end).view(dtype or self.dtype(name))
        if not finite(value):
            raise ModelLoadError(f"tensor {name} in {file.path.name} holds NaN or infinity; the file is damaged")
        return value

    # --- what layouts read (`Files`) ---

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def raw(self, name: str, index: int | None = None) -> Tensor:
        entry = self._entry(name, index)
        dtype = RAW.get(entry.dtype)
        if dtype is None:
            raise ModelLoadError(f"{self.folder}: tensor {name} is {entry.dtype}, which no layout has")
        if entry.dtype in DTYPES:
            return self._finite(name, entry.begin, entry.end, dtype).view(entry.shape)
        return self._files[name].read(entry.begin, entry.end).view(dtype).view(entry.shape)

    def octets(self, name: str) -> Tensor:
        entry = self._entry(name)
        return self._files[name].read(entry.begin, entry.end)

    def expect(self, name: str, dtypes: Seq[str], *shapes: tuple[int, ...]) -> str:
        if name not in self._files:
            raise ModelLoadError(f"{self.folder}: tensor {name} is missing; download the folder again")
        dtype, shape = self.kind(name)
        if dtype not in dtypes or shape not in shapes:
            raise ModelLoadError(
                f"{self.folder}: tensor {name} is {dtype} {list(shape)}; quantization_config and config.json ask for "
                f"{' or '.join(dtypes)} {' or '.join(str(list(s)) for s in shapes)}"
            )
        return name

    def names(self) -> Iterator[str]:
        return iter(self._files)

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Replace each tensor's name by `renamed(name)`. Raises ModelLoadError where two would get the same name."""
        files: dict[str, SafetensorsFile] = {}
        for name, file in self._files.items():
            short = renamed(name)
            if short in files:
                both = sorted((n[:80] for n in self._files if renamed(n) == short), reverse=True)
                raise ModelLoadError(f"{self.folder} has {' and '.join(both)}; take one of them out")
            files[short] = file
        for file in set(self._files.values()):
            file.entries = {renamed(n): entry for n, entry in file.entries.items()}
        self._files = files

    def check(self, config: ModelConfig, shapes: Shapes | None = None, spare: Seq[str] = ()) -> None:
        """Check names, shapes and types against the config, before any weight is read. Raises ModelLoadError.

        `shapes`: of all tensors, if they are not those of a whole model (but of a draft head); `spare`: optional ones.
        """
        expected = dict(shapes or expected_shapes(config))
        taken, model = self._find_stored(expected), family(config.architecture)
        free = expected.keys() - self._files.keys() - self._stored.keys()
        self._views = {n: v for n, v in model.views(config).items() if n in free and v.tensor in self._files}
        missing = [n for n in expected if n in free and n not in self._views]
        packed = next((n for n in self._files if n not in taken and n.endswith(PACKED)), None)
        if packed is not None and self._layout is None:
            text = f"{self.folder}: tensor {packed[:80]} is quantized"
            raise ModelLoadError(f"{text}, and config.json has no quantization_config: download the folder again")
        if missing:
            like = next((n for n in self._files if n.endswith(missing[0].removeprefix("model."))), "")
            why = f"{like[:80]} is there: rename the tensors" if like else "does config.json fit?"
            raise ModelLoadError(f"{self.folder}: tensor {missing[0]} is missing ({len(missing)} in all); {why}")
        known = {*expected, *taken, *(v.tensor for v in self._views.values())}
        # A spare matrix may be quantized, so all tensors of its module are spare.
        unread = tuple(n.removesuffix("weight") for n in (*spare, *model.spare(config)))
        extra = [n for n in self._files.keys() - known if not n.endswith(IGNORED_SUFFIXES) and not n.startswith(unread)]
        extra = [n for n in extra if not cache_scale(n, str(self.folder))]
        if config.tied_embeddings:  # ignore a stored copy of the tied LM head (`head_apart`), or a quantized one
            if heads := {n for n in extra if n.startswith("lm_head.") and n != HEAD}:
                say_once(f"{self.folder}: {sorted(heads)[0]} is left out: config.json ties the head to the embedding")
            extra = [n for n in extra if not n.startswith("lm_head.")]
        if self._layout is not None:
            extra = [n for n in extra if not self._layout.spare(n, self)]
        check_extra(self.folder, extra, OTHER_PARTS, config)
        own = {n: shape for n, shape in expected.items() if n not in self._stored and n not in self._views}
        for name, shape in {**own, **{v.tensor: v.shape for v in self._views.values()}}.items():
            entry, tensor = self._entry(name), f"{self.folder}: tensor {name}"
            if entry.shape != shape:
                raise ModelLoadError(f"{tensor} is {list(entry.shape)}, config.json asks for {list(shape)}")
            one_of(entry.dtype, DTYPES, f"{tensor} in")

    def _find_stored(self, expected: dict[str, tuple[int, ...]]) -> set[str]:
        """Fill `_stored`, and return the names of all tensors that make up its matrices."""
        self._layout = layout_of(self.folder)
        self._stored = {}
        if self._layout is None:
            return set()
        for name, shape in expected.items():
            if len(shape) == 2:
                found = self._layout.find(name.removesuffix(".weight"), (shape[0], shape[1]), self)
                if found is not None:
                    self._stored[name] = found
        notice_rounded(self.folder, {n: s.why for n, s in self._stored.items() if s.why}, expected)
        return {t for s in self._stored.values() for t in s.tensors}


@lru_cache(4)  # a start asks several times
def head_apart(folder: Path, times: tuple[int, ...]) -> bool:
    """Whether a folder has an LM head in floats that is no copy of its embedding, as transformers looks.

    `times`: when its files were changed. False where they cannot be read, which loading them says.
    """
    with suppress(ModelLoadError), Checkpoint(folder) as files:
        if HEAD not in files or files.kind(HEAD)[0] not in DTYPES:
            return False
        shape = files.kind(HEAD)[1]
        quantized = EMBEDDING not in files or files.kind(EMBEDDING)[0] not in DTYPES
        if quantized or files.kind(EMBEDDING)[1] != shape or len(shape) != 2:
            return True
        parts = ((i, min(i + SOME, shape[0])) for i in range(0, shape[0], SOME))
        return not all(files.rows(HEAD, *p).to(files.dtype(EMBEDDING)).equal(files.rows(EMBEDDING, *p)) for p in parts)
    return False


def _short_name(name: str) -> str:
    """The name by which a family asks for a tensor of a checkpoint."""
    for prefix, short in TEXT_PARTS.items():
        if name.startswith(prefix):
            name = short + name.removeprefix(prefix)
    name = LFM2_EXPERT.sub(lambda m: f".mlp.experts.{m[1]}.{LFM2_PARTS[m[2]]}_proj.", name)
    return EXPERTS.sub(".mlp.experts.", name)


def check_extra(path: Path, names: Collection[str], other_parts: tuple[str, ...], config: ModelConfig) -> None:
    """Log once how many tensors belong to parts for vision and audio. Raises ModelLoadError where others are left."""
    extra = sorted(n for n in names if not n.startswith(other_parts))
    if left_out := len(names) - len(extra):
        say_once(f"{path.name}: {left_out} tensors beside the language model (vision, audio) are left out")
    if extra:
        raise ModelLoadError(
            f"{path}: unexpected tensor {extra[0][:80]} ({len(extra)} in all); no {config.architecture} has it"
        )


def notice_rounded(path: Path, kinds: dict[str, str], shapes: Shapes) -> None:
    """Log once which matrices (name -> its type of storage) no format can hold, and the schemes they are rounded to."""
    if kinds:
        size = sum(math.prod(shapes[n]) * round_scheme(shapes[n][1]).bits_per_weight(shapes[n][1]) for n in kinds)
        types, schemes = sorted(set(kinds.values())), sorted({str(round_scheme(shapes[n][1])) for n in kinds})
        say_once(
            f"{path.name}: no kernel reads {', '.join(types)}: such matrices ({len(kinds)}) are rounded to "
            f"{', '.join(schemes)} ({size / 2**33:.2f} GiB), by about 0.5 % (--format fp32: exact, four times as large)"
        )

"""The weights of a GGUF file as a `TensorSource` with Hugging Face names; codes are kept where one of our formats fits.

Q4_0 and Q8_0 become int4 and int8 in groups of 32 with fp16 scales, with unchanged codes. Most other types have formats
of the same names; Q3_K becomes q6_k and IQ4_XS iq4_nl. Rows are multiplied in int8, as in llama.cpp. All other types
are decoded exactly by the gguf package, some rows at a time, and rounded to 8 bits in groups of 32.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sameseed.errors import ModelLoadError
from sameseed.models.checkpoint import check_extra, notice_rounded
from sameseed.models.config import GGUF_ARCHITECTURES, ModelConfig, family, one_of
from sameseed.models.decoder import Decoder
from sameseed.models.gguf import kquants
from sameseed.models.gguf.config import FACTORS
from sameseed.models.gguf.header import GGUFFile, TensorInfo
from sameseed.models.layouts.base import e8m0, finite, round_scheme, rounded
from sameseed.models.weights import Shapes, expected_shapes
from sameseed.scheme import BLOCKS, FileRows, QuantScheme, QuantTensor, get

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KEPT = {
    "Q4_0": QuantScheme("int4", 32, activations="int8"),
    "Q8_0": QuantScheme("int8", 32, activations="int8"),
    **{name.upper(): QuantScheme(name, activations="int8") for name in BLOCKS},
    "MXFP4": QuantScheme("mxfp4", activations="int8"),
    **kquants.TYPES,
}
DECODED = frozenset({"IQ3_S", "IQ3_XXS", "IQ2_S"} | {"IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "NVFP4"})
PAIRS_BESIDE = ("llama", "smollm3", "granite", "mistral3")  # architectures that store rotary pairs side by side
EXPERT = re.compile(r"\.experts\.(\d+)\.")  # all experts of a layer are one tensor, with one more axis
HALVES = re.compile(r"ffn_(?:gate|up)_exps")  # both may be one tensor, an expert's rows of the gate before those of up
SCALES = ("scale", "input_scale")  # of a weight in NVFP4, and of its input, which stays in floats here
OTHER_PARTS = ("v.", "mm.", "a.")  # tensors of vision and audio towers begin so


def gguf_name(name: str, names: Mapping[str, str] = Decoder.gguf_names) -> str:
    """GGUF's name of a tensor that Hugging Face calls `name`; `names`: its family's (`Decoder.gguf_names`)."""
    stem, _, kind = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, rest = EXPERT.sub(".experts.", name).split(".", 3)
    if rest in names:
        return f"blk.{layer}.{names[rest]}"
    return f"blk.{layer}.{names[rest.removesuffix(f'.{kind}')]}.{kind}"


class GGUFCheckpoint:
    """The tensors of a GGUF file: a context that holds the file open, and a `TensorSource` once `check` has passed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._heads: dict[str, int] = {}  # heads of q and k matrices whose rotary pairs are stored side by side

    def __enter__(self) -> GGUFCheckpoint:
        self._file = GGUFFile(self.path)
        arch = GGUF_ARCHITECTURES.get(str(self._file.metadata.get("general.architecture")))
        self._names = family(arch[0]).gguf_names if arch else {}
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._name(name) in self._file.tensors

    def _name(self, name: str) -> str:
        stored = gguf_name(name, self._names)
        joined = HALVES.sub("ffn_gate_up_exps", stored)
        return joined if joined in self._file.tensors else stored

    def check(self, config: ModelConfig, shapes: Shapes | None = None, spare: Seq[str] = ()) -> None:
        """As `Checkpoint.check`."""
        expected, tensors = dict(shapes or expected_shapes(config)), self._file.tensors
        wanted = Counter(map(self._name, expected))
        missing = [n for n in wanted if n not in tensors]
        if missing:
            raise ModelLoadError(f"{self.path}: tensor {missing[0]} is missing ({len(missing)} in all)")
        unread = {self._name(n) for n in (*spare, *family(config.architecture).spare(config))}
        nvfp4 = [n for n in (wanted.keys() | unread) & tensors.keys() if tensors[n].type == "NVFP4"]
        scales = {f"{n.removesuffix('weight')}{kind}" for n in nvfp4 for kind in SCALES}
        check_extra(self.path, tensors.keys() - wanted.keys() - unread - scales - {FACTORS}, OTHER_PARTS, config)
        decoded = {}
        for name, shape in expected.items():
            stored = self._name(name)
            tensor, whole, count = f"{self.path}: tensor {stored}", tensors[stored], wanted[stored] // self._parts(name)
            if EXPERT.search(name) and (len(whole.shape) < 2 or whole.shape[0] != count):
                raise ModelLoadError(f"{tensor} is {list(whole.shape)}, its keys say {count} experts")
            info = self._info(name)
            if [n for n in info.shape if n > 1] != [n for n in shape if n > 1]:
                raise ModelLoadError(f"{tensor} is {list(info.shape)}, its keys say {list(shape)}")
            one_of(info.type, sorted({*DENSE, *KEPT, *DECODED} if len(shape) == 2 else DENSE), f"{tensor} in")
            if (scale := self._scale(name)) is not None and (scale.type, scale.shape) != ("F32", (count,)):
                raise ModelLoadError(f"{tensor} has a scale that is not {count} values in F32")
            if info.type in DECODED:
                decoded[name] = info.type
        if self._file.metadata.get("general.architecture") in PAIRS_BESIDE:
            heads = {".self_attn.q_proj.": config.num_heads, ".self_attn.k_proj.": config.num_kv_heads}
            self._heads = {name: count for name in expected for part, count in heads.items() if part in name}
        notice_rounded(self.path, decoded, expected)

    # --- Source ---

    def _parts(self, name: str) -> int:
        """Matrices of an expert in the tensor that holds this one."""
        return 2 if ".ffn_gate_up_exps." in self._name(name) else 1

    def _scale(self, name: str) -> TensorInfo | None:
        """The scale of each matrix of a tensor in NVFP4, beside its blocks' own; None: 1, or the router applies it."""
        stored = self._name(name)
        scale = f"{stored.removesuffix('weight')}{SCALES[0]}"
        if self._file.tensors[stored].type != "NVFP4" or scale.split(".", 2)[-1] in self._names.values():
            return None
        return self._file.tensors.get(scale)

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors[self._name(name)]
        if (expert := EXPERT.search(name)) is None:
            return info
        parts, (count, rows, *width) = self._parts(name), info.shape
        size = (info.end - info.begin) // (count * parts)
        begin = info.begin + size * (int(expert[1]) * parts + (parts == 2 and ".up_proj." in name))
        return replace(info, shape=(rows // parts, *width), begin=begin, end=begin + size)

    def dtype(self, name: str) -> torch.dtype:
        return DENSE.get(self._info(name).type, torch.float32)

    def scheme(self, name: str) -> QuantScheme | None:
        info = self._info(name)
        if info.type in DECODED:
            return round_scheme(info.shape[1])
        return KEPT.get(info.type)

    def bits(self, name: str) -> float:
        values, size = self._info(name).block
        return 8.0 * size / values

    def in_parts(self, name: str) -> bool:
        return True

    def file_rows(self, name: str) -> FileRows | None:
        info = self._info(name)
        if info.type not in KEPT or len(info.shape) != 2:
            return None
        (height, width), (_, _, order) = info.shape, self._order(name, 0, info.shape[0])
        return FileRows(
            f"{self._name(name)} in {self.path}", self._file.descriptor, info.begin, info.type, (height, width), order
        )

    def stored(self, name: str, start: int = 0, stop: int | None = None) -> QuantTensor:
        info = self._info(name)
        stop, width = info.shape[0] if stop is None else stop, info.shape[1]
        if info.type in DECODED:
            return rounded(round_scheme(width), stop - start, lambda a, b: self.rows(name, start + a, start + b))
        scheme, (first, last, order) = KEPT[info.type], self._order(name, start, stop)
        if info.type in kquants.TYPES:
            parts = kquants.parts(info.type, self._bytes(info, first, last), last - first)
        else:
            parts = self._block32(info, first, last)
        if not all(parts[p].isfinite().all() for p in get(scheme.weights).scale_parts):
            raise ModelLoadError(f"tensor {self._name(name)} in {self.path} holds NaN or infinity; the file is damaged")
        if order is not None:
            parts = {p: t.index_select(0, order) for p, t in parts.items()}
        return QuantTensor(scheme.weights, (stop - start, width), parts, scheme.activations)

    def _order(self, name: str, start: int, stop: int) -> tuple[int, int, Tensor | None]:
        """Rows of the file, first..last-1, that hold rows start..stop-1 of a matrix, and their order among them."""
        heads = self._heads.get(name)
        if heads is None:
            return start, stop, None
        dim = self._info(name).shape[0] // heads
        first, last = start // dim, -(-stop // dim)  # whole heads, because rows are reordered within a head
        order = rotated(torch.arange((last - first) * dim), last - first)
        return first * dim, last * dim, order[start - first * dim : stop - first * dim]

    def _block32(self, info: TensorInfo, start: int, stop: int) -> dict[str, Tensor]:
        """Codes and scales of rows of a matrix in blocks of 32."""
        height, width = stop - start, info.shape[1]
        data = self._bytes(info, start, stop)
        if info.type == "MXFP4":
            scales = e8m0(data[:, 0].view(height, -1))
        else:
            scales = data[:, :2].contiguous().view(torch.float16).view(height, -1)
        if info.type == "Q8_0":
            codes = data[:, 2:].contiguous().view(torch.int8)
        else:  # the first 16 codes of a block are in the low nibbles
            low = data[:, -16:]
            codes = torch.cat([low & 15, low >> 4], dim=1)
            if info.type in ("Q5_0", "Q5_1"):  # the four bytes before hold the fifth bits of all 32 codes
                bits = (data[:, -20:-16, None] >> torch.arange(8, dtype=torch.uint8)) & 1
                codes = codes | bits.flatten(1) << 4
        parts = {"codes": codes.reshape(height, width), "scales": scales}
        if info.type in ("Q4_1", "Q5_1"):  # the smallest value, of which our formats hold the negative
            parts["least"] = -data[:, 2:4].contiguous().view(torch.float16).view(height, -1)
        return parts

    def tensor(self, name: str) -> Tensor:
        info = self._info(name)
        flat = len(info.shape) == 2
        height = info.shape[0] if flat else math.prod(info.shape[:-1])
        value = self.rows(name, 0, height) if flat else self._values(name, 0, height).view(info.shape)
        return rotated(value, self._heads[name]) if name in self._heads and len(info.shape) == 1 else value

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        first, last, order = self._order(name, start, stop)
        value = self._values(name, first, last)
        return value if order is None else value.index_select(0, order)

    def _bytes(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Rows of a tensor as blocks, uint8 [rows * K / values, bytes]; a one-dimensional tensor is one row."""
        width = info.shape[-1] // info.block[0] * info.block[1]
        return self._file.read(info.begin + start * width, info.begin + stop * width).view(-1, info.block[1])

    def _values(self, name: str, start: int, stop: int) -> Tensor:
        info = self._info(name)
        data = self._bytes(info, start, stop)
        if info.type in DENSE:
            value = data.view(-1).view(DENSE[info.type])
        else:
            from gguf import GGMLQuantizationType, quants

            # As one row: gguf goes by 16 rows, and rows of one block take ten times as long.
            with np.errstate(all="ignore"):  # NaN and infinity are checked below
                value = torch.from_numpy(quants.dequantize(data.view(1, -1).numpy(), GGMLQuantizationType[info.type]))
            if (scale := self._scale(name)) is not None:
                expert = EXPERT.search(name)
                of_each = self._file.read(scale.begin, scale.end).view(torch.float32)
                value = value * of_each[int(expert[1]) if expert else 0]
        if not finite(value):
            raise ModelLoadError(f"tensor {self._name(name)} in {self.path} holds NaN or infinity; the file is damaged")
        return value.reshape(stop - start, info.shape[-1])


def rotated(x: Tensor, heads: int) -> Tensor:
    """Reorder rows of q or k [H D, ...] from GGUF's order (rotary pairs side by side) to halves."""
    return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

"""How numbers are stored: QuantTensor (a weight), KVLayer (a layer of the cache), QuantScheme (a model's formats)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sameseed import registry
from sameseed.errors import ConfigError, RegistryError, nearest

DENSE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
KQUANTS = {"q2_k": 2, "q4_k": 4, "q5_k": 5, "q6_k": 6}  # bits of a code, in super-blocks of 256 (llama.cpp)
BLOCKS = {"q4_1": 4, "q5_0": 5, "q5_1": 5, "iq4_nl": 4}  # bits of a code, in blocks of 32 (llama.cpp)
GROUPS = (32, 64, 128)  # group sizes: numbers of values along a row that share a scale
CHANNEL = -1  # stands for a group of the whole row: one scale per output channel
OUTLIER = 6.0  # activations of larger magnitude are outliers, for weights that keep these as floats (LLM.int8)
FIRST, RECENT = 32, 128  # tokens that piecewise caches read as stored: a text's first ones, and a query's last ones
TOKENS = 32  # tokens that share a scale per channel in piecewise caches; FIRST is a multiple
SMALLEST = 2.0**-100  # rows with a smaller absmax count as zeros: 127 / absmax would come near the limit of float32


@dataclass(frozen=True)
class QuantArgs:
    """How a format stores a weight."""

    group: int | None = None  # values along K that share a scale; None: one scale per row
    symmetric: bool = True  # no zero points
    variant: str | None = None  # of the format, by the suffix of its name (nf4-dq, fp8-b128); None: the plain format


@dataclass(frozen=True)
class QuantTensor:
    """A weight [O, K] stored in one format; `parts` are its tensors by name (dense formats: one, "weight").

    `activations` says how rows of x are rounded before the product. "int8": in the weight's groups (`quantize_rows`).
    "fp8": to e4m3 (`round_rows`). "bf16": to bfloat16. "outliers": as "int8", but numbers beyond `OUTLIER` stay floats
    (`split_outliers`). None: x stays float32. `order`: column i of codes and scales is column order[i] of the weight
    (GPTQ's act-order). Products gather x by it; `decode` restores the columns.
    """

    format: str
    shape: tuple[int, int]
    parts: Mapping[str, Tensor]
    activations: str | None = None
    layout: str = "plain"  # the format's own; any other is a backend's (`ops.pack`, `ops.unpack`)
    order: Tensor | None = None  # int64 [K]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.parts.values())

    @cached_property
    def group(self) -> int:
        """Values of a row that share a scale: K over the number of scales (K for dense formats)."""
        scales = self.parts.get("scales")
        return self.shape[1] if scales is None else self.shape[1] // scales.shape[1]


class FileRows(NamedTuple):
    """A matrix in ggml's blocks of one type, `begin` bytes into an open file.

    `name`: for messages. `order`: int64 [O], which row of the file is row o of the matrix; None: row o.
    """

    name: str
    file: int
    begin: int
    kind: str
    shape: tuple[int, int]
    order: Tensor | None


@dataclass(frozen=True)
class KVLayer:
    """Keys and values of one layer in the format's storage type; W is D, or the bytes of a row that is packed."""

    format: str  # of keys and values, or one for each (`kv_formats`)
    k: Tensor  # [num_blocks, block_size, Hk, W]
    v: Tensor  # [num_blocks, block_size, Hk, W]
    k_scale: Tensor | None  # float32 [num_blocks, block_size, Hk]; None for formats without scales
    v_scale: Tensor | None


class Format:
    """A number format, for weights and for the cache: one `FORMAT` in each module of the registry `formats`.

    The first axis of weight parts is O. Methods for what a format does not support raise ConfigError. uint8 codes of 1,
    2 or 4 bits are packed in files.
    """

    name: str
    bits: int  # of a code, without scales: the precision to expect
    weights: bool = True  # does it serve weights?
    kv_dtype: torch.dtype | None = None  # storage type of cached rows; None: it does not serve the cache
    query_dtype: torch.dtype = torch.float32  # to which scaled queries are rounded
    options: frozenset[str] = frozenset()  # what a scheme may ask for: some of OPTIONS, and names of variants
    groups: tuple[int, ...] = ()  # tried in turn if a scheme asks for none; if none divides K, a row has one scale
    nests: str | None = None  # activations for which a backend keeps weights of fewer bits separately inside these
    scale_parts: tuple[str, ...] = ("scales",)  # the parts that multiply integers, in the order of a product

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        """Bits per weight in rows of `width`, scales and zero points included; a kernel's packing may add padding."""
        raise self._no_weights()

    def rows_together(self, args: QuantArgs) -> int:
        """Rows of a weight that must be encoded together: chunks must begin at multiples of this; 0: all rows."""
        return 1

    def lower(self, q: QuantTensor) -> QuantTensor | None:
        """The weight of fewer bits inside `q`, on the same memory; None if none is kept separately."""
        return None

    def encode(self, weight: Tensor, args: QuantArgs | None = None) -> QuantTensor:
        """Store weight [O, K], rounded to nearest; args None: `own_args`. Raises ConfigError if that is impossible."""
        raise self._no_weights()

    def decode(self, q: QuantTensor) -> Tensor:
        """The stored values, float32 [O, K]."""
        raise self._no_weights()

    def decode_rows(self, q: QuantTensor, index: Tensor) -> Tensor:
        """Rows `index` [n] of the stored values, float32 [n, K]."""
        parts = {name: t.index_select(0, index) for name, t in plain(q).parts.items()}
        return self.decode(replace(q, shape=(index.shape[0], q.shape[1]), parts=parts))

    def concat(self, parts: list[QuantTensor]) -> QuantTensor:
        """Concatenate weights along O; each row keeps its values."""
        stacked = {name: torch.cat([plain(q).parts[name] for q in parts]) for name in parts[0].parts}
        return replace(parts[0], shape=(sum(q.shape[0] for q in parts), parts[0].shape[1]), parts=stacked)

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes [T, Hk, W] and scales float32 [T, Hk] (or None) of cache rows x [T, Hk, D]."""
        raise self._no_cache()

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """The inverse of encode_kv, float32."""
        raise self._no_cache()

    def reread(self, x: Tensor, by_channel: bool) -> Tensor:
        """Decoded rows x [n * 32, Hk, D], rounded to this format per channel and 32 tokens, or per row; float32."""
        if not by_channel:
            return self.decode_kv(*self.encode_kv(x))
        rows = x.reshape(-1, TOKENS, *x.shape[1:]).permute(0, 2, 3, 1)  # [n, Hk, D, 32]
        return self.by_channel(rows.flatten(0, 1)).view_as(rows).permute(0, 3, 1, 2).reshape(x.shape)

    def by_channel(self, rows: Tensor) -> Tensor:
        """Rows [n, D, 32] with 32 tokens' values of a channel each, rounded to this format; float32."""
        return self.decode_kv(*self.encode_kv(rows))

    def seen(self, x: Tensor, first: int, length: int) -> Tensor:
        """Decoded rows x [S, Hk, D] of tokens `first`.. (a multiple of 32), as read by the last of `length` tokens."""
        return x

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """The tensors of layer `name` in the layout of the engines for which `config` is written."""
        raise NotImplementedError(f"{self.name} has a config for other engines, and no tensors")

    def config(self, q: QuantTensor) -> dict[str, object]:
        """The `quantization_config` for vLLM of a model with weights like `q`; empty if no engine can read them."""
        return {}

    def _no_weights(self) -> ConfigError:
        return ConfigError(
            f"format {self.name!r} serves the KV cache only; store weights as e.g. 'w4a16' (see sameseed info)"
        )

    def _no_cache(self) -> ConfigError:
        return ConfigError(f"format {self.name!r} does not serve the KV cache; use e.g. 'bf16' or 'int8'")


class Cached(Format):
    """A format for the cache only: rows are stored as in `stored`; scaled queries may be rounded to another type."""

    weights = False

    def __init__(self, name: str, stored: Format, query_dtype: torch.dtype | None = None) -> None:
        self.name, self.bits, self.stored = name, stored.bits, stored
        self.kv_dtype, self.query_dtype = stored.kv_dtype, query_dtype or stored.query_dtype

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.stored.encode_kv(x)

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return self.stored.decode_kv(codes, scales)


class Piecewise(Cached):
    """Keys or values that are stored in format `near`; far tokens are read as if they were stored in format `far`.

    A token is far if it is neither among the first 32 tokens nor in a group of 32 that holds one of a query's last 128
    tokens: by the two positions only (law 1). Keys are rounded by channel and group, values by token (Liu et al., 2024,
    "KIVI"; the first tokens: Xiao et al., 2024). Memory use is that of `near`.
    """

    def __init__(self, near: Format, far: Format, keys: bool) -> None:
        super().__init__(f"{near.name}+{far.name}", near)
        self.far, self.keys = far, keys

    def seen(self, x: Tensor, first: int, length: int) -> Tensor:
        start, end = max(first, FIRST) - first, (length - RECENT) // TOKENS * TOKENS - first
        if start >= end:
            return x
        return torch.cat([x[:start], self.far.reread(x[start:end], self.keys), x[end:]])


def plain(q: QuantTensor) -> QuantTensor:
    """`q` itself, if it is in the format's own layout. Raises ValueError if a backend has packed it."""
    if q.layout != "plain":
        raise ValueError(f"a weight in {q.format} is packed for the backend {q.layout!r}; ops.unpack gives the codes")
    return q


def get(name: str) -> Format:
    """The format of that name. Raises RegistryError with the nearest name."""
    return cast(Format, registry.load("formats", name).FORMAT)


def own_args(groups: tuple[int, ...], width: int) -> QuantArgs:
    """The default QuantArgs of a format with these `groups` for rows of `width` values."""
    return QuantArgs(next((g for g in groups if width % g == 0), None))


def kv_format(name: str) -> Format:
    """The format of that name if it supports the cache. Raises ConfigError otherwise."""
    found = get(name)
    if found.kv_dtype is None:
        raise found._no_cache()
    return found


def kv_formats(name: str) -> tuple[Format, Format]:
    """The formats of keys and of values: one name for both, or two as in "int8/bf16". Raises as `kv_format`.

    Each may be piecewise: "bf16+int4" for near and far tokens.
    """

    def half(name: str, keys: bool) -> Format:
        near, _, far = name.partition("+")
        return Piecewise(kv_format(near), kv_format(far), keys) if "+" in name else kv_format(near)

    keys, _, values = name.partition("/")
    return half(keys, True), half(values if "/" in name else keys, False)


def kv_row_bytes(name: str, head_dim: int) -> int:
    """Bytes of one head's key and value of one token, scales included. Raises as `kv_format`."""
    rows = (fmt.encode_kv(torch.zeros(1, 1, head_dim)) for fmt in kv_formats(name))
    return sum(codes.nbytes + (0 if scales is None else scales.nbytes) for codes, scales in rows)


def cache_format(asked: str, dense: str) -> str:
    """Storage format of a cache: as asked; for "auto" the dense weights' format if that is bf16 or fp16, else fp32."""
    keys, _, values = asked.partition("/")
    asked = keys if keys == values else asked  # "int8/int8": kernels know it by one name
    return asked if asked != "auto" else dense if dense in ("bf16", "fp16") else "fp32"


def over(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once on every device. (PyTorch on a GPU multiplies by 1 / number, which rounds twice.)"""
    return x / torch.full_like(x, number)


def quantize_rows(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., K] and scales float32 [..., K / G] of rows x [..., K]: the int8 rule for activations and cache.

    For each row and group (None: the whole row): a = max |x|, scale = a / 127, code = x * (127 / a) rounded to nearest
    even. An a below 2^-100 counts as 0 (scale 0, codes 0). NaN or infinity make the scale NaN and the codes 0.
    """
    x = _in_groups(x, group)
    values, scales = scaled(x, x.abs().amax(-1, keepdim=True), 127.0)
    return values.round_().clamp_(-127, 127).to(torch.int8).flatten(-2), scales.squeeze(-1)


def _in_groups(x: Tensor, group: int | None) -> Tensor:
    """Rows [..., K] as float32 [..., K / G, G]."""
    size = group or x.shape[-1]
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // size, size)


def scaled(x: Tensor, a: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """x over the scale a / largest, and that scale; `a`: max |x| of what shares it.

    An a below 2^-100 counts as 0 (scale and values 0). NaN or infinity make the scale NaN and the values 0.
    """
    usable = a.isfinite() & (a >= SMALLEST)
    # Not `largest / a`: PyTorch computes that as largest * (1 / a), which rounds twice.
    values = torch.where(usable, x * (torch.full_like(a, largest) / a), 0.0)
    return values, torch.where(usable, over(a, largest), torch.where(a.isfinite(), 0.0, torch.nan))


def round_queries(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Scaled queries q [..., D] rounded to `dtype`, the `query_dtype` of the cache's format; returned as float32."""
    if dtype is not torch.int8:
        return q.to(dtype).float()
    codes, scales = quantize_rows(q)
    return codes.float() * scales


def round_rows(x: Tensor, group: int | None = None) -> Tensor:
    """Rows x [..., K] rounded to e4m3 by row and group (None: the whole row), float32: the fp8 rule for activations.

    As `quantize_rows`, with 448 for 127 and e4m3 values for codes. NaN or infinity make the whole group NaN.
    """
    groups = _in_groups(x, group)
    values, scales = scaled(groups, groups.abs().amax(-1, keepdim=True), 448.0)
    return (values.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scales).reshape(x.shape)


def split_outliers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [..., K] without outliers (magnitudes above 6), to be quantized, and the outliers alone; 0 elsewhere.

    After Dettmers et al. (2022), "LLM.int8()", but there a row's outlier keeps a whole column of all rows of a pass.
    """
    beyond = x.abs() > OUTLIER
    return x.masked_fill(beyond, 0.0), x.masked_fill(~beyond, 0.0)


def float_rows(x: Tensor, q: QuantTensor) -> Tensor:
    """Rows x [..., K] as a product with `q` reads them, float32, if its activations are floats (see `QuantTensor`)."""
    if q.activations == "bf16":
        return x.bfloat16().float()
    return x if q.activations is None else round_rows(x, q.group)


# Names of common schemes, by bits of weights and activations (16: activations stay float32).
PRESETS: dict[str, tuple[str, str | None]] = {
    "w8a8": ("int8", "int8"),
    "w8a16": ("int8", None),
    "w8a8-outliers": ("int8", "outliers"),
    "w8a8n": ("int8n", "int8"),
    "w4a8": ("int4", "int8"),
    "w4a16": ("int4", None),
    "w4a8-qoq": ("qoq", "int8"),
    "fp8": ("fp8_e4m3", None),
    "fp8-a8": ("fp8_e4m3", "fp8"),
    "fp8_e5m2-a8": ("fp8_e5m2", "fp8"),
    "bf16-a16": ("bf16", "bf16"),
    "auto-a8": ("auto", "int8"),
}
# Entries of `Format.options` that are not names of variants.
OPTIONS = {"group", "asymmetric", "activations", "activations-fp8", "activations-bf16", "activations-outliers"}
_SUFFIXES = re.compile(
    r"(?P<a8>-a8)?(-(?P<variant>(?!g\d|asym|a8|channel)[a-z]\w*))?(-(g(?P<group>\d+)|(?P<channel>channel)))?(?P<asymmetric>-asym)?"
)


@dataclass(frozen=True)
class QuantScheme:
    """How a model's matrices are stored and multiplied; norms and biases stay float32. Raises as `parse`."""

    weights: str = "auto"  # a format's name, or "auto": what the checkpoint stores
    group: int | None = None  # see QuantArgs; None: the format's choice for each K; CHANNEL: all of a row
    symmetric: bool = True
    activations: str | None = None  # see QuantTensor; with weights "auto", only for weights that can take them
    rules: tuple[tuple[str, QuantScheme], ...] = ()  # for modules whose names match a glob; the first match counts
    variant: str | None = None  # of "auto": what weights become that no format quantizes ("auto-bf16")

    def __post_init__(self) -> None:
        own = None if self.weights == "auto" else get(self.weights)
        if own is not None and not own.weights:
            raise own._no_weights()
        options = frozenset({"activations", *DENSE.values()}) if own is None else own.options
        if self.group is not None and ("group" not in options or self.group not in (CHANNEL, *GROUPS)):
            asked = "scales per output alone (-channel)" if self.group == CHANNEL else f"groups of {self.group}"
            asked += f", only of {', '.join(map(str, GROUPS))}" if "group" in options and self.group != CHANNEL else ""
            raise ConfigError(f"format {self.weights!r} has no {asked}; leave that out")
        if not self.symmetric and "asymmetric" not in options:
            raise ConfigError(f"format {self.weights!r} has no zero points; leave out -asym, or take w4a8 or w4a16")
        if self.variant is not None and self.variant not in options:
            known = ", ".join(f"-{v}" for v in sorted(options - OPTIONS)) or "none"
            raise ConfigError(f"format {self.weights!r} has no variant -{self.variant}; it has {known}")
        needed = {None: None, "int8": "activations"}.get(self.activations, f"activations-{self.activations}")
        if needed is not None and needed not in options:
            able = ", ".join(name for name, (_, kind) in PRESETS.items() if kind == self.activations)
            raise ConfigError(f"{self.weights!r} takes no activations in {self.activations!r}; take {able or 'w8a8'}")

    @classmethod
    def parse(cls, text: str) -> QuantScheme:
        """The scheme of that name: a format or one of PRESETS, then -a8, a variant, -gN|-channel and -asym.

        Rules follow after commas: `w4a8,lm_head=bf16,model.layers.0.*=w8a8`. Raises RegistryError with the nearest
        name, ConfigError for what the format does not support.
        """
        text, *rest = text.split(",")
        own = cls._parse_one(text)
        rules = []
        for rule in rest:
            glob, equals, name = (x.strip() for x in rule.partition("="))
            if not glob or not equals:
                raise ConfigError(
                    f"no rule {rule!r}; write MODULES=FORMAT, e.g. 'w4a8,lm_head=bf16'; spaces part several formats"
                )
            rules.append((glob, cls._parse_one(name)))
        return replace(own, rules=tuple(rules))

    @classmethod
    def _parse_one(cls, text: str) -> QuantScheme:
        text = text.strip().lower()
        known = [*PRESETS, *registry.names("formats"), "auto"]
        base = max((n for n in known if f"{text}-".startswith(f"{n}-")), key=len, default="")
        found = _SUFFIXES.fullmatch(text[len(base) :])
        if not base or found is None:
            own = [f"{n}-{v}" for n in registry.loaded("formats") for v in sorted(get(n).options - OPTIONS)]
            raise RegistryError(
                f"no format {text!r}{nearest(text.split('-g')[0], known)} (there are: {', '.join(known)}; some of them "
                "with int8 activations: -a8, in groups: -g32, -g64, -g128, or -channel, with zero points: -asym, and "
                f"with variants of their own: {', '.join(own)})"
            )
        weights, activations = PRESETS.get(base, (base, None))
        if found["a8"]:
            activations = "fp8" if "activations-fp8" in get(weights).options else "int8"
        group = CHANNEL if found["channel"] else None if found["group"] is None else int(found["group"])
        return cls(weights, group, found["asymmetric"] is None, activations, variant=found["variant"])

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{glob}={scheme}" for glob, scheme in self.rules)])

    @property
    def name(self) -> str:
        """The name of the scheme itself, without its rules."""
        names = {value: name for name, value in PRESETS.items() if name != "fp8"}
        base = names.get((self.weights, self.activations), self.weights + ("-a8" if self.activations else ""))
        own = [f"-{self.variant}"] if self.variant else []
        own += [] if self.group is None else ["-channel"] if self.group == CHANNEL else [f"-g{self.group}"]
        return "".join([base, *own, *([] if self.symmetric else ["-asym"])])

    def with_head(self) -> QuantScheme:
        """The scheme with a rule for the head (and an embedding tied to it) of 8 bits, if it has fewer and no rule.

        A head in 4 bits by rounding may cost more quality than all other matrices (docs/guides/quality.md).
        """
        few = self.weights != "auto" and get(self.weights).bits < 8
        if not few or any(fnmatchcase("lm_head", glob) for glob, _ in self.rules):
            return self
        head = QuantScheme("int8", activations="int8" if self.activations == "int8" else None)
        return replace(self, rules=(*self.rules, ("lm_head", head)))

    def at(self, *names: str) -> QuantScheme:
        """The scheme of a module with these names (several for tied weights), by the rules."""
        for glob, scheme in self.rules:
            if any(fnmatchcase(name, glob) for name in names):
                return scheme
        return replace(self, rules=()) if self.rules else self

    def format_for(self, dtype: torch.dtype) -> str:
        """Name of the format of a matrix that the checkpoint stores as `dtype`."""
        return self.variant or DENSE.get(dtype, "fp32") if self.weights == "auto" else self.weights

    def dense_for(self, dtype: torch.dtype) -> str:
        """The dense format for `dtype`: the scheme's own if that is dense, else the one of the stored type."""
        name = self.format_for(dtype)
        return name if name in DENSE.values() else DENSE.get(dtype, "fp32")

    def args(self, width: int) -> QuantArgs:
        """How rows of `width` values are stored. Raises ConfigError if the group size does not divide `width`."""
        if self.weights == "auto":
            return QuantArgs()
        if self.group == CHANNEL:
            return QuantArgs(None, self.symmetric, self.variant)
        if self.group is not None and width % self.group:
            fitting = [str(g) for g in GROUPS if width % g == 0]
            other = f"take -g{fitting[-1]}, or leave the group out" if fitting else "leave the group out"
            raise ConfigError(f"groups of {self.group} do not divide its rows of {width} values; {other}")
        return QuantArgs(self.group or own_args(get(self.weights).groups, width).group, self.symmetric, self.variant)

    def bits_per_weight(self, width: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits per weight of a matrix with rows of `width` values that the checkpoint stores as `dtype`."""
        return get(self.format_for(dtype)).bits_per_weight(width, self.args(width))

    def encode(self, weight: Tensor) -> QuantTensor:
        """Store a dense weight [O, K] by this scheme; with "auto" it stays dense. Raises ConfigError as `args` does."""
        q = get(self.format_for(weight.dtype)).encode(weight, self.args(weight.shape[1]))
        return q if self.weights == "auto" else replace(q, activations=self.activations)

    def settled(self, weight: Tensor) -> QuantScheme:
        """The scheme with the variant "auto" resolved for weight [O, K]: fp8-auto becomes fp8_e4m3 or fp8_e5m2."""
        return replace(self, weights=self.encode(weight).format, variant=None) if self.variant == "auto" else self

    @property
    def rows_together(self) -> int:
        """Rows of a weight that must be encoded together (`Format.rows_together`): 1 for most schemes; 0: all rows."""
        return 1 if self.weights == "auto" else get(self.weights).rows_together(QuantArgs(variant=self.variant))

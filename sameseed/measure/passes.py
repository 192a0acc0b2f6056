"""Timed passes of a model in a number format: verifying a chain, prefilling, decoding a batch; grids of such passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

import torch

from sameseed import scheme
from sameseed.batch import MAX_NODES
from sameseed.config import CacheConfig
from sameseed.engine.calibrate import timed_pass
from sameseed.engine.memory import block_bytes
from sameseed.errors import ConfigError
from sameseed.fields import check_ranges, within
from sameseed.kvcache.cache import KVCache
from sameseed.kvcache.state import RecurrentStates
from sameseed.measure.limits import Limits
from sameseed.models.config import ModelConfig
from sameseed.models.decoder import Decoder
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.scheme import QuantScheme
from sameseed.spec.draft import Draft

MAX_CHAIN = MAX_NODES + 1  # rows of the longest chain: the pending token and its draft
BLOCK_SIZE = CacheConfig().block_size
SHORT = 5e-3  # seconds: a shorter pass is run twice, and only the second run is timed


@dataclass(frozen=True)
class Pass:
    """One kind of forward pass, with `context` cached tokens per sequence.

    "chain": `rows` new tokens of one sequence, a pending one and drafted ones, with logits of all. "prefill": a prompt
    of `rows` tokens, with logits of the last. "batch": one pending token for each of `rows` sequences.
    """

    kind: str
    context: int
    rows: int

    @property
    def num_seqs(self) -> int:
        return self.rows if self.kind == "batch" else 1

    @property
    def new_tokens(self) -> int:
        """New tokens of each sequence."""
        return 1 if self.kind == "batch" else self.rows

    @property
    def num_blocks(self) -> int:
        """KV cache blocks that the pass needs."""
        return self.num_seqs * -(-(self.context + self.new_tokens) // BLOCK_SIZE)


@dataclass(frozen=True)
class ProfileGrid:
    """What a profile measures. Raises ConfigError or RegistryError for a value out of range."""

    formats: tuple[str, ...] = ("bf16",)  # names of schemes
    rows: tuple[int, ...] = within((1, 2, 4, 8, 16), 1, MAX_CHAIN)  # and always 1, because c is relative to it
    contexts: tuple[int, ...] = within((256,), 1)
    kv_format: str = "auto"
    prefill_tokens: int = within(512, 0)
    batch_sizes: tuple[int, ...] = (4, 16)
    threads: int | None = within(None, 1)
    backend: str = "auto"
    device: str = "cpu"
    repeats: int = within(30, 1)  # most runs of one pass; the least is normally three
    seconds: float = within(60.0, 0, above=True)  # time budget of all passes together
    draft: str | None = None  # a second shape or model, measured interleaved with the first
    draft_formats: tuple[str, ...] = ("auto",)
    layers: int | None = within(None, 1)  # of the shape only its first so many

    def __post_init__(self) -> None:
        check_ranges(self)
        if any(size < 1 for size in self.batch_sizes):
            raise ConfigError(f"batch_sizes must be at least 1, got {self.batch_sizes}")
        for name in ("formats", "draft_formats"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigError(f"{name} must name at least one format, each once, got {','.join(given) or 'none'}")
            for text in given:
                QuantScheme.parse(text)
        if self.kv_format != "auto":
            scheme.kv_formats(self.kv_format)

    def passes(self, config: ModelConfig, role: str = "model") -> tuple[list[Pass], list[Pass]]:
        """(chain passes, prefill and batch passes). Raises ConfigError if the model's context is too short."""
        rows, contexts = sorted({1, *self.rows}), sorted({*self.contexts})
        if contexts[-1] + rows[-1] > config.max_model_len:
            raise ConfigError(
                f"a context of {contexts[-1]} and {rows[-1]} rows are beyond the {role}'s "
                f"{config.max_model_len} tokens; lower the context to {config.max_model_len - rows[-1]} or less"
            )
        chains = [Pass("chain", context, m) for context in contexts for m in rows]
        prompt = min(self.prefill_tokens, config.max_model_len)
        others = [Pass("prefill", 0, prompt)] if prompt else []
        return chains, [*others, *(Pass("batch", contexts[0], size) for size in sorted({*self.batch_sizes}))]


@dataclass(frozen=True)
class PassWork:
    """The least work of a pass: bytes to read, operations of matrix products, float operations of attention."""

    num_bytes: float
    matrix_ops: float
    attention_ops: float

    def memory_s(self, limits: Limits) -> float:
        """Seconds to read the bytes at the machine's limit."""
        return self.num_bytes / limits.read

    def compute_s(self, limits: Limits, peak: str) -> float:
        """Seconds of the arithmetic at the machine's limit; `peak` is the kind of the matrix products."""
        return self.matrix_ops / limits.peak(peak) + self.attention_ops / limits.peak("fp32")


@dataclass(frozen=True)
class ModelWork:
    """What passes of a model read and compute."""

    config: ModelConfig
    read: float  # bytes of the weights that a pass reads
    row: int  # bytes of a cached token
    peak: str  # of its matrix products, as in `Limits.peak`

    def work(self, batch: int, new_tokens: int, context: int, prompt: bool = False) -> PassWork:
        """The least work of a pass of `batch` sequences; in one over a `prompt`, only the last token has logits."""
        c, rows = self.config, batch * new_tokens
        matrix_ops = 2.0 * (
            c.row_parameters * rows + c.vocab_size * c.hidden_size * batch * (1 if prompt else new_tokens)
        )
        keys = read = 0
        for window in c.windows[len(c.state_shapes) :]:  # recurrent layers read and write a state instead
            reach = context + new_tokens if window is None else window
            # Row i of a sequence attends to the context and to the new rows up to its own, at most `reach` of them.
            keys += sum(min(context + i + 1, reach) for i in range(new_tokens))
            read += min(context, reach)
        cached = self.row / len(c.kv_shapes) * read + 8.0 * sum(torch.Size(s).numel() for s, _ in c.state_shapes)
        num_bytes = self.read * c.read_share(rows, batch) + cached * batch
        return PassWork(num_bytes, matrix_ops, 4.0 * c.num_heads * c.head_dim * keys * batch)


class TimedModel:
    """A loaded model with a KV cache full of noise: timings depend on reading the cache, not on its values."""

    def __init__(self, model: Decoder, kv_format: str, passes: Iterable[Pass]) -> None:
        """`kv_format` "auto": the format that the engine would choose. The cache fits the largest of `passes`."""
        c = self.config = model.config
        self.kv_format = scheme.cache_format(kv_format, model.weights.dense)
        num_blocks, num_seqs = (max(sizes) for sizes in zip(*((p.num_blocks, p.num_seqs) for p in passes), strict=True))
        states = RecurrentStates(c.state_shapes, num_seqs) if c.state_shapes else None
        cache = KVCache(c.kv_shapes, num_blocks, BLOCK_SIZE, self.kv_format, str(model.device), states)
        fill(cache)
        self.runner = ModelRunner(model, cache)
        self.weight_bytes = sum(m.nbytes for m in model.weights.matrices)
        largest = model.weights.layers[0].matrices[-1]
        self.peak = "int8" if largest.activations == "int8" else "bf16" if largest.format == "bf16" else "fp32"
        self.sizes = ModelWork(c, model.weights.read_bytes, cache.nbytes // (num_blocks * BLOCK_SIZE), self.peak)

    def seconds(self, job: Pass) -> float:
        """Run a pass as the engine would, and return its seconds. Nothing is committed to the cache."""
        seqs = [self._sequence(i, job) for i in range(job.num_seqs)]
        drafted = job.rows - 1 if job.kind == "chain" else 0
        draft = Draft.chains([_tokens(7 + i, drafted, self.config.vocab_size) for i in range(len(seqs))])
        try:
            seconds, _ = timed_pass(self.runner, seqs, draft)
            # The previous pass may be another model's. In an engine, a small model's weights stay in CPU caches.
            return timed_pass(self.runner, seqs, draft)[0] if seconds < SHORT else seconds
        finally:
            for seq in seqs:
                self.runner.blocks.release(seq)

    def _sequence(self, i: int, job: Pass) -> Sequence:
        known = job.context + (job.new_tokens if job.kind == "prefill" else 1)
        seq = Sequence(i, _tokens(i, known, self.config.vocab_size), SamplingParams(), 0)
        assert self.runner.blocks.reserve(seq, job.context + job.new_tokens)
        seq.num_cached = seq.num_settled = job.context
        return seq

    def work(self, job: Pass) -> PassWork:
        """The least work of a pass of this model."""
        return self.sizes.work(job.num_seqs, job.new_tokens, job.context, job.kind == "prefill")


def _tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def fill(cache: KVCache) -> None:
    """Write noise into every cache row: memory never written maps to one zero page, whose reading costs nothing."""
    formats = scheme.kv_formats(cache.format)
    generator = torch.Generator().manual_seed(0)
    for layer, (_, head_dim) in zip(cache.layers, cache.shapes, strict=True):
        for fmt, stored, scale in zip(formats, (layer.k, layer.v), (layer.k_scale, layer.v_scale)):
            codes, scales = fmt.encode_kv(torch.randn(*stored.shape[1:3], head_dim, generator=generator))
            stored.copy_(codes.to(stored.device).expand(stored.shape))  # expand on the device: not whole on the host
            if scale is not None and scales is not None:
                scale.copy_(scales.to(scale.device).expand(scale.shape))


def cache_bytes(config: ModelConfig, kv_format: str, passes: Seq[Pass]) -> int:
    """Bytes of a KV cache that fits the largest of `passes`."""
    return block_bytes(config, kv_format, BLOCK_SIZE) * max(p.num_blocks for p in passes)

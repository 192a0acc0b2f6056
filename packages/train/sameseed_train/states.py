"""Texts that a target generates, and its hidden states on them: the training data of draft heads.

sameseed's own ModelRunner generates and reads them. So a head can be trained for any model and number format that the
engine runs, on the same states that the head will read in use. (EAGLE: Li et al., 2024; EAGLE-3: Li et al., 2025.)
Only tokens are stored for good. A prompt pass computes a text's states again, bit for bit; a cache of bounded size
keeps them for the next time.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.decoder import Decoder
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft
from sameseed_train.checkpoint import read_tensors, save_tensors

PART = 128  # texts per file, and so the most that an interruption loses
BLOCK = 16  # tokens in a block of the KV cache
MAX_ROWS = 1024  # rows of one pass
READ = 4  # texts that are read together for their states: enough for a pass of MAX_ROWS, little cache memory
LEAST_FREE = 2e9  # bytes of the disk that the cache of states leaves to others


@dataclass(frozen=True)
class Seed:
    """A text's beginning: the target adds `num_new` tokens at `temperature`; with 0, the text is `ids` itself."""

    ids: tuple[int, ...]
    num_new: int
    temperature: float = 0.0


@dataclass(frozen=True)
class TextStates:
    """ids int32 [T], `num_given` of them not written by the target; states [T - 1, L * C] of all but the last token."""

    ids: Tensor
    num_given: int  # 0: all tokens are trained on
    states: Tensor


def captured_layers(captures: Seq[int], num_layers: int) -> tuple[int, ...]:
    """Layers whose outputs are stored: those the head reads, and the last, which gives the target's distribution."""
    return tuple(sorted({*captures, num_layers - 1}))


def new_runner(target: Decoder, captures: tuple[int, ...], kv_format: str, batch: int, longest: int) -> ModelRunner:
    """A runner for `batch` texts of at most `longest` tokens."""
    blocks = batch * -(-longest // BLOCK)
    cache = KVCache(target.config.kv_shapes, blocks, BLOCK, kv_format, str(target.device))
    return ModelRunner(target, cache, captures)


@torch.inference_mode()
def write_texts(runner: ModelRunner, seeds: Seq[Seed], batch: int, seed: int) -> list[TextStates]:
    """Write every seed's text with the states of its tokens; a new text starts as soon as one in the batch ends.

    The noise of sampled texts comes from `seed`, so the same call writes the same texts. A pass has at most MAX_ROWS
    rows (or one per text, if these are more).
    """
    generator = torch.Generator().manual_seed(seed)
    queue, running = list(range(len(seeds)))[::-1], list[Sequence]()
    kept: dict[int, list[Tensor]] = {i: [] for i in queue}
    done: dict[int, TextStates] = {}
    ends = frozenset(runner.model.config.eos_token_ids)
    while queue or running:
        while queue and len(running) < batch:
            begins = seeds[queue[-1]]
            running.append(Sequence(queue.pop(), begins.ids, SamplingParams(), 0))
            runner.blocks.reserve(running[-1], len(begins.ids) + begins.num_new)
        pending, left = list[int](), max(MAX_ROWS, len(running))
        for place, seq in enumerate(running):
            pending.append(min(len(seq) - seq.num_cached, left - (len(running) - place - 1)))
            left -= pending[-1]
        now = list(running)
        out = runner.forward(now, Draft.empty(len(now)), pending)
        states = runner.commit(now, pending, [[]] * len(now), out)
        assert states is not None
        for seq, rows in zip(now, states.cpu().to(torch.bfloat16).split_with_sizes(pending), strict=True):
            kept[seq.seq_id].append(rows)
        whole = [seq for seq, wanted in zip(now, out.wants_logits, strict=True) if wanted]
        chosen = choose([seeds[s.seq_id].temperature for s in whole], out.logits.cpu(), generator) if whole else []
        for seq, token in zip(whole, chosen, strict=True):
            begins = seeds[seq.seq_id]
            written = len(seq) - len(begins.ids) + 1
            if begins.num_new:
                seq.token_ids.append(token)
            if written >= begins.num_new or token in ends:
                running.remove(seq)
                runner.blocks.release(seq)
                ids, rows = torch.tensor(seq.token_ids, dtype=torch.int32), torch.cat(kept.pop(seq.seq_id))
                done[seq.seq_id] = TextStates(ids, len(begins.ids) if begins.num_new else 0, rows[: len(ids) - 1])
    return [done[i] for i in range(len(seeds))]


def choose(temperatures: Seq[float], logits: Tensor, generator: torch.Generator) -> list[int]:
    """One token per row of logits [R, V]: the most likely one, or sampled at the row's temperature if above 0."""
    best: list[int] = logits.argmax(-1).tolist()
    for row, heat in enumerate(temperatures):
        if heat > 0:
            noise = -torch.empty(logits.shape[1]).exponential_(generator=generator).log()  # Gumbel
            best[row] = int((logits[row] / heat + noise).argmax())
    return best


def collect(states: States, seeds: Seq[Seed], folder: Path, batch: int, seed: int) -> Iterator[tuple[int, Path]]:
    """Write the texts of all seeds that are missing, PART a file. Yields (texts done, file). Raises ConfigError."""
    runner = states.runner(batch, max(len(s.ids) + s.num_new for s in seeds))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # users' texts
    done = number = 0
    while done < len(seeds):
        path = folder / f"{number:04}.safetensors"
        if path.exists():
            said = read_tensors(path, ())[1]
            own = list(seeds[done : done + int(said["texts"])])
            if said["seeds"] != digest_of(own):
                raise ConfigError(f"{path} holds texts of other prompts; take another --out, or delete the folder")
        else:
            own = list(seeds[done : done + PART])
            texts = write_texts(runner, own, batch, seed + number)
            tensors = {
                "ids": torch.cat([t.ids for t in texts]),
                "lengths": torch.tensor([len(t.ids) for t in texts], dtype=torch.int32),
                "given": torch.tensor([t.num_given for t in texts], dtype=torch.int32),
            }
            save_tensors(tensors, path, {"texts": len(own), "seeds": digest_of(own)})
            for text in texts:
                states.keep(text)
        done, number = done + len(own), number + 1
        yield done, path


def digest_of(settings: object) -> str:
    """A short digest of settings or seeds."""
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


class States:
    """Reads the target's states on texts: from the cache in `folder`, else in a prompt pass.

    `captures`: the layers whose outputs are read, the last one included. The cache grows to `most` bytes, and leaves
    LEAST_FREE on the disk. It may be deleted at any time.
    """

    def __init__(
        self, target: Decoder, captures: Seq[int], kv_format: str, longest: int, folder: Path, most: float
    ) -> None:
        self.captures = tuple(captures)
        self.runner = partial(new_runner, target, self.captures, kv_format)
        self._runner = self.runner(READ, longest)
        self._folder, self._left = folder, most
        if folder.is_dir():
            self._left -= sum(path.stat().st_size for path in folder.rglob("*.safetensors"))

    def of(self, texts: Seq[tuple[Tensor, int]]) -> list[TextStates]:
        """Texts, given as ids and number of given tokens, with the states of all but their last tokens."""
        paths = [self._path(ids) for ids, _ in texts]
        new = [i for i, path in enumerate(paths) if not path.exists()]
        read = write_texts(self._runner, [Seed(tuple(texts[i][0].tolist()), 0) for i in new], READ, 0)
        for text in read:
            self.keep(text)
        found = {i: text.states for i, text in zip(new, read, strict=True)}
        found |= {i: read_tensors(path)[0]["states"] for i, path in enumerate(paths) if i not in found}
        return [TextStates(*text, found[i]) for i, text in enumerate(texts)]

    def keep(self, text: TextStates) -> None:
        """Put a text's states into the cache, if they have room."""
        size = text.states.numel() * text.states.element_size()
        self._folder.mkdir(parents=True, exist_ok=True)
        if size <= self._left and shutil.disk_usage(self._folder).free > LEAST_FREE + size:
            save_tensors({"states": text.states.contiguous()}, self._path(text.ids), {})
            self._left -= size

    def _path(self, ids: Tensor) -> Path:
        name = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:20]
        return self._folder / name[:2] / f"{name}.safetensors"


class StoredTexts:
    """The texts in files that `collect` wrote: ids int32 and the number of given tokens of each."""

    def __init__(self, paths: Seq[Path]) -> None:
        """Raises ConfigError for a file that cannot be read, or for an empty list of files."""
        if not paths:
            raise ConfigError("no texts to learn from; give --prompts FILE, or a recipe with sources and --data DIR")
        self._order: tuple[tuple[int, int], list[list[int]]] | None = None  # batches of the last requested epoch
        self.ids: list[Tensor] = []
        self.num_given: list[int] = []
        for path in paths:
            tensors = read_tensors(path)[0]
            self.ids += tensors["ids"].split_with_sizes(tensors["lengths"].tolist())
            self.num_given += tensors["given"].tolist()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are trained on: written by the target, or of given texts."""
        return sum(len(ids) - given for ids, given in zip(self.ids, self.num_given, strict=True))

    def counts(self, vocab_size: int, first: int | None = None) -> Tensor:
        """How often each token is written, int64 [vocab_size], in all texts or in the `first` ones."""
        written = [ids[given:].long() for ids, given in zip(self.ids[:first], self.num_given[:first], strict=True)]
        return torch.bincount(torch.cat(written), minlength=vocab_size)

    def batch(self, step: int, rows: int, seed: int, longest: int) -> list[tuple[Tensor, int]]:
        """A training step's texts, cut to `longest` tokens, of similar lengths. Each epoch has its own seeded order."""
        epoch, place = divmod(step, -(-len(self) // rows))
        if self._order is None or self._order[0] != (seed + epoch, rows):
            rng = random.Random(seed + epoch)
            order = list(range(len(self)))
            rng.shuffle(order)
            batches: list[list[int]] = []
            for start in range(0, len(order), 32 * rows):  # a random pool, sorted so that batches have similar lengths
                pool = sorted(order[start : start + 32 * rows], key=lambda i: len(self.ids[i]))
                batches += [pool[i : i + rows] for i in range(0, len(pool), rows)]
            rng.shuffle(batches)
            self._order = (seed + epoch, rows), batches
        return [(self.ids[i][:longest], self.num_given[i]) for i in self._order[1][place]]

"""Texts that a target writes, with its hidden states: the training data of draft heads.

sameseed's own ModelRunner writes them. So a head can be trained for any model and number format that the engine runs,
on the same states that the head will read in use. (EAGLE: Li et al., 2024; EAGLE-3: Li et al., 2025.)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.llama import Llama
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.train.checkpoint import save_tensors

PART = 256  # texts per file, and so the most that an interruption loses
BLOCK = 16  # tokens in a block of the KV cache
MAX_ROWS = 1024  # rows of one pass


@dataclass(frozen=True)
class Seed:
    """The beginning of a text: the target writes `num_new` tokens after `ids`, at `temperature` (0: greedy).

    With `num_new` 0 the text is `ids` itself, and all of its tokens are trained on.
    """

    ids: tuple[int, ...]
    num_new: int
    temperature: float = 0.0


@dataclass(frozen=True)
class TextStates:
    """ids int32 [T], the first `num_given` not written by the target; states [T - 1, L * C] of all but the last token.

    With `num_given` 0 all tokens are trained on.
    """

    ids: Tensor
    num_given: int
    states: Tensor


class _NoNodes:
    """An empty draft for ModelRunner.forward."""

    def nodes(self, b: int) -> tuple[list[int], list[int]]:
        return [], []


def captured_layers(captures: Seq[int], num_layers: int) -> tuple[int, ...]:
    """Layers whose outputs are stored: those the head reads, and the last, which gives the target's distribution."""
    return tuple(sorted({*captures, num_layers - 1}))


def new_runner(target: Llama, captures: tuple[int, ...], batch: int, longest: int, kv_format: str) -> ModelRunner:
    """A runner for `batch` texts of at most `longest` tokens."""
    c = target.config
    blocks = batch * -(-longest // BLOCK)
    device = str(target.device)
    cache = KVCache(c.num_layers, blocks, BLOCK, c.num_kv_heads, c.head_dim, kv_format, device)
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
        out = runner.forward(now, _NoNodes(), pending)
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


def collect(
    target: Llama, captures: Seq[int], seeds: Seq[Seed], folder: Path, *, batch: int, kv_format: str, seed: int
) -> Iterator[tuple[int, int]]:
    """Write the texts of all seeds into files of `folder`, skipping existing files. Yields (texts done, tokens).

    A file holds PART texts: ids and states, one text after another.
    """
    layers = captured_layers(captures, target.config.num_layers)
    longest = max(len(s.ids) + s.num_new for s in seeds)
    runner = new_runner(target, layers, batch, longest, kv_format)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # users' texts
    for number, start in enumerate(range(0, len(seeds), PART)):
        path = folder / f"{number:04}.safetensors"
        own = list(seeds[start : start + PART])
        if not path.exists():
            texts = write_texts(runner, own, batch, seed + number)
            tensors = {
                "ids": torch.cat([t.ids for t in texts]),
                "lengths": torch.tensor([len(t.ids) for t in texts], dtype=torch.int32),
                "given": torch.tensor([t.num_given for t in texts], dtype=torch.int32),
                "states": torch.cat([t.states for t in texts]),
            }
            save_tensors(tensors, path, {"texts": len(texts)})
        yield start + len(own), StoredTexts([path]).num_tokens


class StoredTexts:
    """Stored texts: ids and lengths are in memory; states stay on the disk and are read on demand."""

    def __init__(self, paths: Seq[Path]) -> None:
        """Raises ConfigError for a file that cannot be read, or for an empty list of files."""
        if not paths:
            raise ConfigError(
                "no texts to learn from; name prompts with --prompts or a recipe with --recipe and --data"
            )
        self._files: list[Any] = []
        self._places: list[tuple[int, int]] = []  # per text: its file, and its first state in the file
        self._order: tuple[tuple[int, int], list[list[int]]] | None = None  # batches of the last requested epoch
        self.ids: list[Tensor] = []
        self.num_given: list[int] = []
        for path in paths:
            try:
                file: Any = safe_open(str(path), framework="pt")
                lengths = file.get_tensor("lengths").tolist()
                self.ids += file.get_tensor("ids").split_with_sizes(lengths)
                self.num_given += file.get_tensor("given").tolist()
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read ({error}); delete it and run again") from None
            first = 0
            for length in lengths:
                self._places.append((len(self._files), first))
                first += length - 1
            self._files.append(file.get_slice("states"))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are trained on: written by the target, or of given texts."""
        return sum(len(ids) - given for ids, given in zip(self.ids, self.num_given, strict=True))

    def __getitem__(self, i: int) -> TextStates:
        file, first = self._places[i]
        states = self._files[file][first : first + len(self.ids[i]) - 1]
        return TextStates(self.ids[i], self.num_given[i], states)

    def batch(self, step: int, rows: int, seed: int) -> list[TextStates]:
        """The texts of a training step, of similar lengths. Every epoch has its own seeded order."""
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
        return [self[i] for i in self._order[1][place]]

"""L2 and C1: logits and cached keys and values have the same bits, whichever way a position was computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from sameseed import ops as backends
from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.kernels import differing, threads_kept
from sameseed.laws.subject import Subject, Tokens, shadows
from sameseed.models.decoder import Decoder
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft

Way = Callable[["_Paths", random.Random], Tensor]


def _fresh_runner(model: Decoder, kv: str, num_blocks: int, block_size: int) -> ModelRunner:
    c = model.config
    cache = KVCache(c.kv_shapes, num_blocks, block_size, kv, str(model.device))
    return ModelRunner(model, cache)


class _Paths:
    """Ways to compute the logits [n, V] after each of the last n of `tokens`."""

    def __init__(self, subject: Subject, tokens: Tokens, num_rows: int) -> None:
        self.subject, self.tokens, self.first = subject, tokens, len(tokens) - num_rows

    def runner(self, block: int = 16, seqs: int = 1) -> tuple[ModelRunner, Sequence]:
        """A runner whose fresh cache has room for `seqs` such sequences, and the sequence with nothing cached."""
        count = -(-(len(self.tokens) + 66) // block) * seqs + 1
        runner = _fresh_runner(self.subject.target, self.subject.kv_format, count, block)
        return runner, Sequence(0, self.tokens, SamplingParams(), 0)

    def chunks(self, sizes: Seq[int], runner: ModelRunner, seq: Sequence, mates: Seq[Tokens] = ()) -> Tensor:
        """Logits of the pending tokens, run in chunks of `sizes`, the last one repeated; `mates` share the passes."""
        kept: list[Tensor] = []
        known = seq.num_cached
        runner.blocks.reserve(seq, len(seq))
        others = [Sequence(i + 1, mate, SamplingParams(), 0) for i, mate in enumerate(mates)]
        for other in others:
            runner.blocks.reserve(other, len(other))
        turn = 0
        while seq.num_pending:
            size = min(sizes[min(turn, len(sizes) - 1)], seq.num_pending)
            parts = [(seq, size), *((o, min(o.num_pending, 1 + turn % 3)) for o in others if o.num_pending)]
            if turn % 2:
                parts.reverse()
            rows = [
                Rows(s.token_ids[s.num_cached : s.num_cached + n], s.num_cached, [], [], s.blocks, True)
                for s, n in parts
            ]
            batch = build_batch(rows, runner.cache.block_size, runner.model.device)
            every = torch.arange(batch.num_rows, dtype=torch.int32, device=runner.model.device)
            logits, *_ = runner.model.run(replace(batch, logit_rows=every), runner.cache)
            at = 0 if not turn % 2 else batch.num_rows - size
            kept.append(logits[at : at + size].clone())
            for s, n in parts:
                s.num_cached += n
            turn += 1
        return torch.cat(kept)[self.first - known :]

    def nodes(self, sizes: Seq[int], rng: random.Random, wrong: int) -> Tensor:
        """Logits from drafts of these sizes that hold the right tokens, each after up to `wrong` wrong nodes."""
        runner, seq = self.runner()
        runner.blocks.reserve(seq, len(seq) + 64)
        head, tail = self.tokens[: self.first + 1], list(self.tokens[self.first + 1 :])
        seq.token_ids = list(head)
        kept: list[Tensor] = []
        turn = 0
        while True:
            size = min(sizes[turn % len(sizes)], len(tail))
            tokens, parents, right = self._tree(tail[:size], rng, wrong)
            num_pending = [seq.num_pending]
            out = runner.forward([seq], Draft.trees([(tokens, parents)]), num_pending)
            rows = torch.tensor([0, *(r + 1 for r in right)], device=out.logits.device)
            kept.append(out.logits[rows])
            runner.commit([seq], num_pending, [right], out)
            seq.token_ids += tail[:size]
            if size == len(tail):
                return torch.cat(kept)
            seq.token_ids.append(tail[size])
            tail = tail[size + 1 :]
            turn += 1

    def _tree(self, path: Seq[int], rng: random.Random, wrong: int) -> tuple[list[int], list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        right: list[int] = []
        for token in path:
            parent = right[-1] if right else -1
            for _ in range(rng.randint(0, wrong)):
                parents.append(rng.choice([parent, -1, len(tokens) - 1]))
                tokens.append(rng.randrange(self.subject.vocab_size))
            right.append(len(tokens))
            parents.append(parent)
            tokens.append(token)
        return tokens, parents, right


def _batched(p: _Paths, rng: random.Random) -> Tensor:
    vocab = p.subject.vocab_size
    mates = [tuple(rng.randrange(vocab) for _ in range(rng.randint(1, len(p.tokens)))) for _ in range(16)]
    return p.chunks([3, 1, 2, 5], *p.runner(seqs=17), mates=mates)


def _recomputed(p: _Paths, rng: random.Random) -> Tensor:
    """Compute half, release its blocks, let another sequence take some, then compute everything again."""
    runner, seq = p.runner(seqs=2)
    half = Sequence(0, seq.token_ids[: len(seq) // 2 + 1], seq.params, 0)
    _Paths(p.subject, tuple(half.token_ids), 1).chunks([5], runner, half)
    other = Sequence(9, [rng.randrange(p.subject.vocab_size)], seq.params, 0)
    runner.blocks.release(half)
    runner.blocks.reserve(other, 1)
    return p.chunks([rng.randint(2, 20)], runner, seq)


def _shared(p: _Paths, rng: random.Random) -> Tensor:
    """The rows before the last ones come from another sequence, found by their tokens in the prefix cache."""
    runner, seq = p.runner(block=4, seqs=2)
    other = Sequence(9, p.tokens[: p.first], seq.params, 0)
    if len(other):
        _Paths(p.subject, p.tokens[: p.first], 1).chunks([rng.randint(2, 9)], runner, other)
    runner.blocks.enter(other, len(other))
    runner.blocks.release(other)
    runner.blocks.adopt(seq)
    return p.chunks([rng.randint(2, 20)], runner, seq)


def _threaded(p: _Paths, rng: random.Random) -> Tensor:
    backends.set_num_threads(rng.choice((2, 3, 4, 8)))
    try:
        return p.chunks([4], *p.runner())
    finally:
        backends.set_num_threads(1)


WAYS: dict[str, Way] = {
    "prefill at once": lambda p, rng: p.chunks([len(p.tokens)], *p.runner()),
    "chunks": lambda p, rng: p.chunks([rng.randint(2, 17)], *p.runner()),
    "chain of drafted tokens": lambda p, rng: p.nodes([rng.randint(1, 8)], rng, 0),
    "tree of drafted tokens": lambda p, rng: p.nodes([rng.randint(1, 9)], rng, 4),
    "tree of up to 64 nodes": lambda p, rng: p.nodes([12], rng, 4),
    "among 16 others": _batched,
    "after preemption": _recomputed,
    "after another's prefix": _shared,
    "other block size": lambda p, rng: p.chunks([6], *p.runner(block=rng.choice((4, 8, 32)))),
    "other threads": _threaded,
}


@check(
    "L2",
    "logits whichever way",
    "0 differing values",
    least={"prompts": 2, "positions": 20},
    prompts=200,
    positions=25_600,
)
def logits(subject: Subject, effort: Effort) -> Found:
    """The logits of a position are the same bits, whichever way they are computed.

    Ways: token by token, in one prefill, in chunks of 2 to 17, as drafted chains and trees, among 16 other sequences,
    after preemption, after another sequence's prefix, with other block sizes, and on more threads.
    """
    count, length = effort.of(200, 2), min(128, effort.of(128 * 20, 24))
    found = Found({"prompts": 0, "positions": 0, "ways": len(WAYS)}, {"differing_values": 0, "compared_rows": 0})
    rng = random.Random(subject.seed)
    params = replace(subject.params, max_tokens=subject.max_tokens, ignore_eos=True, stop=(), stop_token_ids=())
    jobs = subject.jobs(count, params)
    with threads_kept():
        backends.set_num_threads(1)
        texts = [c.token_ids for c in subject.run(subject.plain(), jobs)]
        for i, (job, text) in enumerate(zip(jobs, texts, strict=True)):
            tokens = (job.prompt_token_ids + text)[-(subject.max_len - 70) :]
            num_rows = min(length, len(tokens))
            paths = _Paths(subject, tokens, num_rows)
            truth = paths.chunks([1], *paths.runner())
            found.sizes["prompts"] += 1
            found.sizes["positions"] += num_rows
            for name, way in WAYS.items():
                got = way(paths, rng)
                bad = differing(got, truth) if got.shape == truth.shape else truth.numel()
                found.statistic["compared_rows"] += num_rows
                right = "the logits of token by token, bit for bit"
                found.wrong("differing_values", f"prompt {i}: {name}", right, f"{bad} differ", bad)
    found.notes.append(f"ways: {', '.join(WAYS)}")
    return found


@check(
    "C1",
    "commit equals a fresh prefill",
    "0 differing bytes",
    least={"sequences": 3, "rows": 20, "drafted": 10, "rejections": 2},
    jobs=100,
)
def cache_rows(subject: Subject, effort: Effort) -> Found:
    """After accepted and rejected draft tokens, the cache holds the bytes of a fresh prefill of the same tokens.

    A rejected draft token leaves no trace. The same holds for a draft model's own cache.
    """
    count = effort.of(100, 3)
    found = Found({"sequences": 0, "rows": 0, "draft_rows": 0}, {"differing_bytes": 0})
    params = replace(subject.params, max_tokens=min(24, subject.max_tokens), ignore_eos=True)
    jobs = subject.jobs(count, params)
    plain = subject.run(subject.plain(), jobs)
    for name in ("trees", "draft"):
        engine = subject.engine(drafter=subject.trees(jobs, plain, seed=3) if name == "trees" else None, seqs=4)
        for job in jobs:
            engine.add(job)
        steps = 0
        while engine.has_work and steps < 1000 * count:
            engine.step()
            steps += 1
            for seq in engine.scheduler.running if steps % 4 == 3 else ():
                if seq.num_output > 1 and seq.num_cached:
                    found.sizes["sequences"] += 1
                    found.sizes["rows"] += seq.num_cached
                    _same_rows(found, name, engine.runner, seq)
                for level, shadow in shadows(engine.drafter, seq):
                    found.sizes["draft_rows"] += shadow.num_cached
                    _same_rows(found, f"{name}, the cache of {type(level).__name__}", level.runner, shadow)
        if name == "draft":
            subject.metrics.add(engine.metrics)
    return found


def _same_rows(found: Found, name: str, runner: ModelRunner, seq: Sequence) -> None:
    """Count bytes of a sequence's cached rows that differ from those of a fresh prefill."""
    if not seq.num_cached:
        return
    mine, fresh = _rows(runner, seq), _prefilled(runner, seq)
    rows, bad = (mine != fresh).any(dim=0).nonzero().flatten().tolist(), int((mine != fresh).sum())
    where = f"{name}: {seq.num_cached} rows"
    found.wrong("differing_bytes", where, "a fresh prefill's bytes", f"row {next(iter(rows), 0)} differs", bad)


def _rows(runner: ModelRunner, seq: Sequence) -> Tensor:
    """All bytes of a sequence's cached rows, uint8 [bytes, rows]."""
    size = runner.cache.block_size
    slots = torch.tensor(
        [seq.blocks[i // size] * size + i % size for i in range(seq.num_cached)], device=runner.model.device
    )
    parts = []
    for layer in runner.cache.layers:
        for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            if tensor is not None:
                rows = tensor.reshape(-1, *tensor.shape[2:])[slots].contiguous()
                parts.append(rows.reshape(len(slots), -1).view(torch.uint8))
    return torch.cat(parts, dim=1).T


def _prefilled(like: ModelRunner, seq: Sequence) -> Tensor:
    size = like.cache.block_size
    runner = _fresh_runner(like.model, like.cache.format, -(-seq.num_cached // size), size)
    fresh = Sequence(0, seq.token_ids[: seq.num_cached], seq.params, 0)
    runner.blocks.reserve(fresh, len(fresh))
    out = runner.forward([fresh], Draft.empty(1), [len(fresh)])
    runner.commit([fresh], [len(fresh)], [[]], out)
    return _rows(runner, fresh)

"""Subject: the loaded models to certify; it builds engines of them. Laws 1 and 3 as functions of what engines did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sameseed.config import EngineConfig, SpecConfig
from sameseed.drafters._followers import Followers
from sameseed.engine.build import Loaded, assemble
from sameseed.engine.engine import Engine
from sameseed.errors import SameseedError
from sameseed.laws.trees import Answers, FirstDrafts, TreeDrafter, Watched, knowing
from sameseed.lengths.fixed import FixedLength
from sameseed.models.decoder import Decoder
from sameseed.models.runner import ModelRunner
from sameseed.request import Completion, Delta, Request, SamplingParams, Sequence, SpecMetrics
from sameseed.spec.drafter import Drafter

Tokens = tuple[int, ...]
FRESH = 10_007  # jobs between two turns of a check, more than one turn takes at any small effort
PERIOD, TIMES = 4, 6  # tokens of a phrase that repeats, and how often: models go on with it, and n-grams match it
ROOM = 80  # rows of cache beyond prompt and answer: a tree of 64 nodes, and half a block


@dataclass
class Subject:
    """Models with settings, prompts and sampling parameters; `leaks` and `metrics` collect what engines left behind.

    `metrics` counts the configured draft alone; `scripted` counts the trees that the certificate builds itself.
    """

    loaded: Loaded
    prompts: list[Tokens]
    params: SamplingParams
    max_tokens: int = 48
    batch: int = 8
    seed: int = 1
    leaks: list[str] = field(default_factory=list)
    metrics: SpecMetrics = field(default_factory=SpecMetrics)
    scripted: SpecMetrics = field(default_factory=SpecMetrics)
    first: FirstDrafts = field(default_factory=FirstDrafts)
    num_emptied: int = 0  # how often all requests had left an engine
    digest: str = ""  # of the target's weights, before anything ran
    turn: int = 0  # how often the present check ran before: it takes other prompts and seeds each time

    @property
    def config(self) -> EngineConfig:
        return self.loaded.config

    @property
    def target(self) -> Decoder:
        return self.loaded.target

    @property
    def device(self) -> str:
        """The device of models and caches."""
        return str(self.target.device)

    @cached_property
    def vocab_size(self) -> int:
        """Size of the vocabulary for prompts and scripts: the tokenizer's, or the model's where that is smaller."""
        return min(self.target.config.vocab_size, len(self.loaded.tokenizer.vocabulary()))

    @property
    def max_len(self) -> int:
        """The longest text, in tokens."""
        return self.config.max_model_len or self.target.max_model_len

    @property
    def kv_format(self) -> str:
        """Format of the engines' KV cache."""
        return self.plain(seqs=1).runner.cache.format

    def jobs(self, count: int, params: SamplingParams, start: int = 0) -> list[Request]:
        """`count` requests with seeds of their own: the prompts in turn, cut shorter from the second time on.

        From the second turn of a check on, each prompt ends in a phrase that repeats: drafts by look-up find it again.
        """
        # The textbook knows the parameters alone, not what the checkpoint suppresses.
        params = replace(params, banned_token_ids=(*params.banned_token_ids, *self.target.config.suppress_tokens))
        made = []
        for i in range(start + self.turn * FRESH, start + self.turn * FRESH + count):
            time, which = divmod(i, len(self.prompts))
            prompt = self.prompts[which]
            prompt = prompt[: max(1, len(prompt) - time % len(prompt))]
            prompt += repeating(prompt) if self.turn else ()
            prompt = prompt[-max(1, self.max_len - params.max_tokens - 1) :]
            seed = self.seed * 1_000_003 + i
            made.append(Request(f"c{i}", prompt, replace(params, seed=seed), seed))
        return made

    def plain(self, seqs: int | None = None) -> Engine:
        """An engine without speculation and without a prefix cache."""
        made = self.engine(SpecConfig(), seqs=seqs)
        made.runner.blocks.shares = False
        return made

    def engine(
        self,
        spec: SpecConfig | None = None,
        *,
        drafter: Drafter | None = None,
        block: int | None = None,
        rows: int | None = None,
        seqs: int | None = None,
        tokens: int | None = None,
        nodes: int = 24,
    ) -> Engine:
        """An engine of the loaded models whose cache holds `tokens` tokens.

        `spec`: None for the configured speculation (without its store on disk, which is the user's). `drafter` replaces
        the configured drafter, with at most `nodes` nodes in a tree.
        """
        seqs = self.batch if seqs is None else seqs
        longest = max(map(len, self.prompts)) + PERIOD * TIMES + self.max_tokens + ROOM
        block = block or self.config.cache.block_size
        count = -(-(tokens or seqs * longest) // block) + 1
        config = replace(
            self.config,
            spec=SpecConfig() if drafter is not None else storeless(self.config.spec if spec is None else spec),
            cache=replace(self.config.cache, block_size=block, num_blocks=None),
            max_num_rows=max(seqs, rows or self.config.max_num_rows),
            max_num_seqs=seqs,
        )
        drafts = self.loaded.drafts if config.spec.method != "none" else ()
        engine = assemble(Loaded(config, self.loaded.tokenizer, count, self.loaded.target, drafts))
        return engine if drafter is None else draft_with(engine, drafter, nodes)

    def trees(self, jobs: Seq[Request], written: Seq[Completion], seed: int = 0) -> TreeDrafter:
        """A drafter of trees that contain the known texts."""
        return TreeDrafter(_answers(jobs, written), self.vocab_size, seed)

    def drafting(
        self, jobs: Seq[Request], written: Seq[Completion], seed: int, nodes: int = 24
    ) -> Iterator[tuple[str, Engine]]:
        """Yield an engine with the configured draft, then one with trees that contain the known texts."""
        yield "the draft", self.engine()
        yield "trees", self.engine(drafter=self.trees(jobs, written, seed), nodes=nodes)

    def run(
        self, engine: Engine, jobs: Seq[Request], alone: bool = False, deltas: list[Delta] | None = None
    ) -> list[Completion]:
        """Run jobs to their end, together or (`alone`) one after the other; see `over`."""
        return self.over(engine, run(engine, jobs, alone, deltas))

    def over(self, engine: Engine, done: list[Completion]) -> list[Completion]:
        """Record leaks and draft metrics of an engine that all requests have left; returns `done`."""
        self.leaks += leaks(engine)[: 3 - len(self.leaks)]
        self.num_emptied += 1
        (self.scripted if isinstance(engine.drafter, TreeDrafter) else self.metrics).add(engine.metrics)
        engine.metrics = SpecMetrics()
        return done

    def watch(self, engine: Engine, jobs: Seq[Request], written: Seq[Completion]) -> None:
        """Count the engine's first draft tokens, and how many are accepted, against the texts that it should write."""
        every = [t for c in written for t in c.token_ids]
        share = {t: every.count(t) / len(every) for t in set(every)}
        engine.runner = Watched(engine.runner, _answers(jobs, written), share, self.first)


def repeating(prompt: Tokens) -> Tokens:
    """The last few tokens of a prompt, again and again."""
    return prompt[-PERIOD:] * TIMES


def _answers(jobs: Seq[Request], written: Seq[Completion]) -> Answers:
    return knowing([j.prompt_token_ids for j in jobs], [c.token_ids for c in written], [j.seed for j in jobs])


def storeless(spec: SpecConfig) -> SpecConfig:
    """The same levels without `store` files, into which they would write what they see: these files are the user's."""
    return spec.with_each(
        lambda level: replace(level, options={k: v for k, v in level.options.items() if k != "store"})
    )


def run(
    engine: Engine, requests: Seq[Request], alone: bool = False, deltas: list[Delta] | None = None
) -> list[Completion]:
    """Completions of all requests, in their order, run together or (`alone`) one after the other.

    `deltas` collects what is streamed. Raises SameseedError for an engine whose requests do not end.
    """
    done: dict[tuple[str, int], Completion] = {}
    steps = sum(len(r.prompt_token_ids) + r.params.max_tokens for r in requests) * 8 + 50
    for i, request in enumerate(requests):
        engine.add(request)
        while engine.has_work and (alone or i == len(requests) - 1):
            steps -= 1
            if steps < 0:
                raise SameseedError("the engine does not get on: its requests do not end")
            for delta in engine.step():
                if deltas is not None:
                    deltas.append(delta)
                if delta.completion is not None:
                    done[delta.request_id, delta.index] = delta.completion
    return [done[r.request_id, r.index] for r in requests]


def outcome(completion: Completion) -> tuple[object, ...]:
    """What law 1 fixes: tokens, text, finish reason, seed, and the bits of log-probabilities."""
    c = completion
    return c.token_ids, c.text, c.finish_reason, c.seed, c.logprobs


def leaks(engine: Engine) -> list[str]:
    """Law 3, nothing leaks: what an idle engine holds of requests, in its cache, its drafts' caches and its lists."""
    found, runners = [], [("target", engine.runner)]
    levels: list[Any] = [engine.drafter]
    while levels:
        level = levels.pop()
        below = getattr(level, "below", ())
        levels += [below] if isinstance(below, Drafter) else below
        name = type(level).__name__
        if isinstance(getattr(level, "runner", None), ModelRunner):
            runners.append((name, level.runner))
        kept = (len(getattr(level, part, ())) for part in ("followers", "_own"))
        found += [f"{name} remembers {n} sequences" for n in kept if n]
    lists = {"live": engine._live, "running": engine.scheduler.running, "waiting": engine.scheduler.waiting}
    found += [f"{len(part)} requests are {name}" for name, part in lists.items() if part]
    for name, runner in runners:
        blocks, free = runner.blocks, sorted(runner.blocks.free_blocks)
        if free != list(range(blocks.num_blocks)):
            found.append(f"{blocks.num_blocks - len(set(free))} of {blocks.num_blocks} blocks of {name} stayed taken")
        if blocks.num_free_slots != blocks.num_slots:
            found.append(f"{blocks.num_slots - blocks.num_free_slots} recurrent states of {name} stayed taken")
    return found


def shadows(drafter: Any, seq: Sequence) -> list[tuple[Any, Sequence]]:
    """Draft levels with a cache of their own that follow `seq`, each with its sequence in that cache."""
    followers, levels = getattr(drafter, "followers", None), getattr(drafter, "below", ())
    mine: list[tuple[Any, Sequence]] = []
    if isinstance(followers, Followers):  # a head reads rows of the target: it has no sequence of its own
        mine = [(drafter, followers[seq])] if seq.seq_id in followers._shadows else []
        seq = mine[0][1] if mine else seq  # lower levels follow the shadow
    every = [levels] if isinstance(levels, Drafter) else levels
    return mine + [found for level in every for found in shadows(level, seq)]


def draft_with(engine: Engine, drafter: Drafter, num_draft_tokens: int) -> Engine:
    """The engine with another drafter, which drafts `num_draft_tokens` tokens every round where there is room."""
    engine.drafter, engine.policy = drafter, FixedLength(num_draft_tokens)
    return engine

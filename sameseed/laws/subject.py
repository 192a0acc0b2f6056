"""Subject: the loaded models to certify; it builds plain and speculative engines of them for the checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property

from sameseed.config import EngineConfig, SpecConfig
from sameseed.engine.build import Loaded, assemble
from sameseed.engine.engine import Engine
from sameseed.laws import trial
from sameseed.laws.trees import Answers, FirstDrafts, TreeDrafter, Watched, knowing
from sameseed.models.decoder import Decoder
from sameseed.request import Completion, Delta, Request, SamplingParams, SpecMetrics
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
        return engine if drafter is None else trial.draft_with(engine, drafter, nodes)

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
        return self.over(engine, trial.run(engine, jobs, alone, deltas))

    def over(self, engine: Engine, done: list[Completion]) -> list[Completion]:
        """Record leaks and draft metrics of an engine that all requests have left; returns `done`."""
        self.leaks += trial.leaks(engine)[: 3 - len(self.leaks)]
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

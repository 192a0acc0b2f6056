"""Replay: asks an engine's own drafter at every position of texts that the target wrote.

Texts advance by one token a time, several together, whatever was drafted. So there is an event at every position, and
any length policy can be simulated on them. A proposal is a function of the text so far (a drafter follows it by
`rewind` and `observe`), so asking the drafter one position before as well makes no difference. The exceptions:

* drafters that remember past requests: a text is replayed once, by a new drafter, and released at its end; unless their
  options ask for past requests, they look at none, as in every measurement;
* a store of past texts on disk is never read or written;
* a length policy that learns, below a cascade: it learns from more rounds than in a run.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sameseed.config import SpecConfig
from sameseed.engine.engine import Engine
from sameseed.engine.levels import resolve
from sameseed.errors import ConfigError
from sameseed.plan.acceptance import Event, Replay, confidence_of, judge, ranked, sizes_up_to
from sameseed.plan.texts import Text, Texts, Tick
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, Span

SPARE = 128  # cache tokens beyond a text, for drafts and for the trees that a head grows


@dataclass(eq=False)
class _Reading:
    """A text being replayed, and an event for the draft after each of its tokens."""

    text: Text
    seq: Sequence
    events: list[Event] = field(default_factory=list)

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens that the target wrote after those known so far."""
        return self.text.tokens[self.seq.num_output :]


class _Once:
    """Wraps a drafter below one that is asked for each size in turn, and asks it once at each position.

    It is asked for the largest draft, from which smaller ones are cut (`cuttable`). All other attributes are those of
    the wrapped drafter.
    """

    def __init__(self, drafter: Drafter, size: int) -> None:
        self.drafter = drafter
        self._size = size
        self._known: dict[int, tuple[int, Draft]] = {}  # by sequence: number of known tokens, and the draft after them

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """The likeliest num_draft[b] nodes of each sequence's largest draft."""
        new = [seq for seq in seqs if self._known.get(seq.seq_id, (-1,))[0] != len(seq)]
        if new:
            draft = self.drafter.propose(new, _asked(self.drafter, new, self._size)).read()
            for b, seq in enumerate(new):
                only = draft.kept([None if i == b else [] for i in range(len(new))])
                self._known[seq.seq_id] = len(seq), replace(only, offsets=np.array([0, draft.count(b)], np.int32))
        cut = []
        for seq, k in zip(seqs, num_draft, strict=True):
            whole = self._known[seq.seq_id][1]
            cut.append(whole.kept([sorted(ranked(whole.parents.tolist(), confidence_of(whole, 0))[:k])]))
        sure = [confidence_of(d, 0) or [] for d in cut] if all(d.confidence is not None for d in cut) else None
        return Draft.trees([d.nodes(0) for d in cut], sure, [d.node_levels(0) for d in cut])


class _Reader:
    """Replays texts with the drafter of one engine, which has no requests."""

    def __init__(self, engine: Engine, spec: SpecConfig, sizes: tuple[int, ...]) -> None:
        owned = [level.cls.owns for level in resolve(spec).every()]
        self.engine = engine
        self.drafter = engine.drafter
        self.sizes = sizes
        self.cuttable = self.drafter.cuttable
        self.num_levels = max(1, len(engine.level_names))
        below = getattr(self.drafter, "below", ())
        self.below = below if isinstance(below, tuple) and not self.cuttable else ()
        # All other drafters draft from the text alone: they need no pass of the target.
        self.with_target = bool(self.drafter.captures) or "target" in owned

    def read(self, readings: Seq[_Reading]) -> None:
        """Replay texts together; all blocks and drafter state held for them are released when this returns."""
        drafter: Any = self.drafter
        if self.below:
            drafter.below = tuple(_Once(d, self.sizes[-1]) if d.cuttable else d for d in self.below)
        try:
            self._read_prompts(readings)
            running = list(readings)
            while running := [r for r in running if r.rest]:
                self._ask(running)
                self._go_on(running, [1] * len(running))
        finally:
            for r in readings:
                self.drafter.release(r.seq)
                self.engine.runner.blocks.release(r.seq)
            if self.below:
                drafter.below = self.below

    def _read_prompts(self, readings: Seq[_Reading]) -> None:
        """Prefill the prompts, in passes of as many rows as the engine allows, and add the first token of each text."""
        while any(r.seq.num_cached < r.seq.num_prompt for r in readings):
            left = self.engine.scheduler.max_num_rows
            chunks: list[tuple[_Reading, int]] = []
            for r in readings:
                size = min(left, r.seq.num_prompt - r.seq.num_cached)
                if size > 0:
                    chunks.append((r, size))
                    left -= size
            self._go_on([r for r, _ in chunks], [size for _, size in chunks])

    def _ask(self, running: Seq[_Reading]) -> None:
        """Draft after the known tokens of each text: once, or once for each draft size."""
        parts: list[list[Event]] = [[] for _ in running]
        for sizes in [self.sizes] if self.cuttable else [(s,) for s in self.sizes]:
            draft = self._propose([r.seq for r in running], sizes[-1])
            for b, r in enumerate(running):
                sure = confidence_of(draft, b)
                parts[b].append(judge(draft.nodes(b), sure, draft.node_levels(b), self.num_levels, r.rest, sizes))
        for r, events in zip(running, parts, strict=True):
            r.events.append(Event.joined(events))

    def _propose(self, seqs: Seq[Sequence], size: int) -> Draft:
        """A draft of `size` tokens for each sequence, as a round of the engine would have it."""
        asked = _asked(self.drafter, seqs, size)
        if self.with_target:  # a drafter may write into the target's cache, after the known tokens
            for seq in seqs:
                self._reserve(seq, min(len(seq) + size, self.engine.runner.blocks.reservable(seq)))
        draft = self.drafter.propose(seqs, asked).read() if any(asked) else Draft.empty(len(seqs))
        eos = self.engine.runner.model.config.eos_token_ids
        return draft.shallow([s.draft_depth for s in seqs]).ended([s.params.ending(eos) for s in seqs])

    def _go_on(self, readings: Seq[_Reading], counts: Seq[int]) -> None:
        """Advance each text by `counts` cached tokens; where all known tokens are cached, add the text's next token."""
        seqs = [r.seq for r in readings]
        starts = [seq.num_cached for seq in seqs]
        hidden = None
        if self.with_target:
            for seq, n in zip(seqs, counts, strict=True):
                self._reserve(seq, seq.num_cached + n)
            out = self.engine.runner.forward(seqs, Draft.empty(len(seqs)), counts)
            hidden = self.engine.runner.commit(seqs, counts, [[] for _ in seqs], out)
        else:
            for seq, n in zip(seqs, counts, strict=True):
                seq.num_cached += n
        for r in readings:
            if not r.seq.num_pending:
                r.seq.token_ids.append(r.rest[0])
        self.drafter.observe(seqs, [Span(s, seq.num_cached) for s, seq in zip(starts, seqs, strict=True)], hidden)

    def _reserve(self, seq: Sequence, num_rows: int) -> None:
        if not self.engine.runner.blocks.reserve(seq, num_rows):
            raise ConfigError("the cache is too small to replay these texts together; lower the batch size")


def _asked(drafter: Drafter, seqs: Seq[Sequence], size: int) -> list[int]:
    """Draft tokens that a round asks for: nodes of a tree; of a chain no more than may still be written."""
    depths = [seq.draft_depth for seq in seqs]
    return [(size if drafter.branches else min(size, depth)) if depth else 0 for depth in depths]


def replay(
    engine: Engine,
    spec: SpecConfig,
    texts: Texts,
    num_draft_tokens: int,
    batch_size: int = 8,
    tick: Tick = lambda done, total: None,
) -> Replay:
    """What drafts of `engine`, built for `spec`, are worth at every position of texts of its target.

    `num_draft_tokens`: the largest draft; `batch_size`: texts that are replayed together, which changes no result.
    `tick(done, total)` is called as texts end. Raises ConfigError for plain decoding, an engine with requests, and
    texts that do not fit.
    """
    sizes = sizes_up_to(num_draft_tokens)
    if spec.method == "none":
        raise ConfigError("plain decoding has no drafts to replay; name a draft, e.g. --draft ngram")
    if engine.has_work:
        raise ConfigError("an engine that serves requests cannot replay texts; give one of its own")
    blocks = engine.runner.blocks
    most = blocks.num_free // blocks.blocks_for(min(texts.longest + SPARE, engine.max_model_len))
    if most < 1 or texts.longest > engine.max_model_len:
        raise ConfigError(
            f"a text of {texts.longest} tokens does not fit the engine's context of {engine.max_model_len}; raise "
            "max_model_len"
        )
    reader = _Reader(engine, spec, sizes)
    readings = [_Reading(text, _sequence(i, text, engine.max_model_len)) for i, text in enumerate(texts)]
    # Texts of similar length run together: otherwise the last ones of a batch would run alone.
    order = sorted(readings, key=lambda r: len(r.text.tokens), reverse=True)
    count = min(batch_size, most)
    for start in range(0, len(order), count):
        reader.read(order[start : start + count])
        tick(min(start + count, len(order)), len(order))
    return _collected(readings, sizes, reader.num_levels)


def _sequence(seq_id: int, text: Text, context: int) -> Sequence:
    seq = Sequence(seq_id, text.prompt, text.params, text.seed)
    seq.context = context
    return seq


def _collected(readings: Seq[_Reading], sizes: tuple[int, ...], num_levels: int) -> Replay:
    events, s = [event for r in readings for event in r.events], len(sizes)
    return Replay(
        sizes,
        np.array([0, *np.cumsum([len(r.events) for r in readings])], np.int64),
        np.array([e.accepted for e in events], np.int16).reshape(-1, s),
        np.array([e.nodes for e in events], np.int16).reshape(-1, s),
        np.array([e.steps for e in events], np.int16).reshape(-1, s, num_levels),
    )

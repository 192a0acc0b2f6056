"""Goodput: in each round as many draft tokens as pay, none included (TurboSpec: Liu et al., 2024; DSpark, 2026).

A round's worth is the tokens that it may be expected to decide over the time that it takes. How much to ask for is
decided from what earlier drafts brought (`acceptance.py`) and what passes cost (`cost.py`). Once a draft is there, its
nodes are kept as long as the next likeliest one brings more than the time for it would elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from operator import itemgetter

import numpy as np

from sameseed.lengths._acceptance import Acceptance, DraftNodes, Rates
from sameseed.lengths._cost import Curve, DraftCost, Prices
from sameseed.lengths._probing import PROBE_ROUNDS, PROBE_TOKENS, Probing
from sameseed.lengths._search import alone, shared, within
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Round

FIRST_DRAFTS, FIRST_ROUNDS = 12, 3  # of sequences, and rounds with some, before anything is decided
FIRST_REQUESTS = 8  # requests that are tried at their start, where that may pay: one text tells little of others
FIRST_TRIES = 4  # rounds in which they are tried
HOPE = 0.85  # of the tokens of a text that is drafted well are right: where not even that pays, none is tried
HOLD = 4  # rounds for which a decision stands while the same sequences run
FADE = 0.95  # a round later, of how promises were kept


class GoodputLength:
    """Decides lengths from costs and acceptance; `num_draft_tokens` is the most. One engine's own: it learns."""

    uses_confidence = True

    def __init__(self, num_draft_tokens: int, target: Curve | None = None) -> None:
        """`target`: seconds of the target's passes; None: learned from the first rounds and a guess of their shape."""
        self.num_draft_tokens = num_draft_tokens
        self.target = target
        self.draft = DraftCost()
        self.rest = 0.0  # seconds of a round outside both models
        self.acceptance = Acceptance(max(1, num_draft_tokens))
        self.probing = Probing()
        self._rate = 0.0  # tokens a second that the last decision promised
        self._promise = [10.0, 10.0]  # tokens that rounds brought, and that their time was to bring by the promise
        self._probe_cost = 0.0  # in rounds without a draft
        # How often a token is right after right ones; what its row, and a step of the drafter, must bring.
        self._next: tuple[float, float, float] | None = None
        self._held: tuple[tuple[int, ...], int, list[int]] | None = None  # sequences, rounds left, lengths
        self._starts: dict[int, int] = {}  # of the first requests: rounds in which they were drafted for
        self._num_started = 0
        self._num_drafts = 0  # of single sequences
        self._asked: set[int] = set()  # sequences that were drafted for in the last round
        self._nodes: dict[int, DraftNodes] = {}  # of the round that runs
        self._steps: int | None = None  # of its proposal

    @classmethod
    def build(
        cls, num_draft_tokens: int, confidence: float | None = None, measure: Callable[[], Curve] | None = None
    ) -> GoodputLength:
        """One for these settings."""
        return cls(num_draft_tokens, measure() if measure else None)

    def stop(self, confidence: float) -> bool:
        return False

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        """Will one step more of these chains bring less than its time is worth?"""
        if self._next is None:
            return False
        rate, row, step = self._next
        rates, gain = Rates(self.acceptance.all, None), 0.0
        for path in paths:
            likely = DraftNodes(range(-1, len(path) - 1), path, rates).likely[-1]
            gain += max(0.0, likely * rate - row)
        return gain < step

    def lengths(self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None) -> list[int]:
        """Lengths that promise the most tokens a second; at most `budget` draft tokens in all."""
        if self.num_draft_tokens == 0 or not seqs:
            return [0] * len(seqs)
        if self.target is None or self.draft.seen < FIRST_ROUNDS or self._num_drafts < FIRST_DRAFTS:
            # the first rounds tell what things cost
            self._rate, self._next = 0.0, None
            two_sizes = min(self.num_draft_tokens, 2 + self.draft.seen % 2)  # they tell what a step costs
            return within([two_sizes] * len(seqs), budget)
        fresh = [seq for seq in seqs if self._is_fresh(seq)]
        hoped = self._hoped(fresh, seqs, num_rows) if fresh else []
        if not any(hoped):
            return self._settled(seqs, num_rows, budget)
        others = [seq for seq in seqs if seq not in fresh]
        lengths = dict(zip(fresh, hoped, strict=True))
        lengths |= zip(others, self._settled(others, num_rows, budget), strict=True) if others else ()
        self._rate, self._next = 0.0, None  # this is to find out, not to pay
        return within([lengths[seq] for seq in seqs], budget)

    def _is_fresh(self, seq: Sequence) -> bool:
        """Is this one of the first requests, and still to be tried whatever others were like?"""
        if seq.seq_id not in self._starts:
            if self._num_started >= FIRST_REQUESTS:
                return False
            self._num_started += 1
            self._starts[seq.seq_id] = 0
        return self._starts[seq.seq_id] < FIRST_TRIES

    def _hoped(self, some: Seq[Sequence], seqs: Seq[Sequence], num_rows: int | None) -> list[int]:
        """Lengths for `some` of a pass that would promise the most if drafts were mostly right."""
        offers = [(HOPE**j, 1.0, float(j)) for j in range(1, min(self.num_draft_tokens, 4) + 1)]
        prices = self._prices(some, seqs, num_rows or len(seqs))
        return shared([offers] * len(some), None, len(seqs), prices)[0]

    def _settled(self, seqs: Seq[Sequence], num_rows: int | None, budget: int | None) -> list[int]:
        """Lengths by what is known."""
        rows = num_rows or len(seqs)
        found = self.probing.next(seqs, rows, self.num_draft_tokens)
        awake = [b for b, k in enumerate(found) if k is None]
        lengths = [k or 0 for k in found]
        if any(lengths) and not awake:
            self._next = None  # a probe is to find out, not to pay
        room = None if budget is None else max(0, budget - sum(lengths))
        for b, k in zip(awake, self._decided([seqs[b] for b in awake], seqs, rows, room), strict=True):
            lengths[b] = k
            self.probing.note(seqs[b], rows, k, self._probe_cost)
        return within(lengths, budget)

    def _decided(self, seqs: Seq[Sequence], everyone: Seq[Sequence], rows: int, budget: int | None) -> list[int]:
        """Lengths of some sequences of a pass; a decision stands for a few rounds. More is asked for than is needed."""
        if not seqs:
            return []
        ids = tuple(seq.seq_id for seq in seqs)
        if self._held is not None and self._held[0] == ids and self._held[1] > 0:
            lengths = self._held[2]
            if budget is None or sum(lengths) <= budget:
                self._held = ids, self._held[1] - 1, lengths
                return list(lengths)
        lengths = self._best(seqs, everyone, rows, budget)
        if self.acceptance.tells:  # `stop` and `trim` end drafts that turn out unlikely, so others may be longer
            left = sum(2 * k + 2 for k in lengths) if budget is None else budget - sum(lengths)
            for b, k in enumerate(lengths):
                more = min(k + 2, self.num_draft_tokens - k, left) if k else 0
                lengths[b], left = k + more, left - more
        self._held = (ids, HOLD - 1, lengths) if any(lengths) else None
        return list(lengths)

    def _best(self, seqs: Seq[Sequence], everyone: Seq[Sequence], rows: int, budget: int | None) -> list[int]:
        """Lengths that promise the most, or none where that is not clearly more than plain decoding promises."""
        offers = [self.acceptance.offers(seq.seq_id, self.num_draft_tokens) for seq in seqs]
        prices = self._prices(seqs, everyone, rows)
        if len(seqs) == 1:
            best, promised = alone(offers[0][:budget], len(everyone), prices)
        else:
            best, promised = shared(offers, budget, len(everyone), prices)
        self._rate = promised
        brought = sum(gain for gain, _, _ in max(offers)[:PROBE_TOKENS]) / len(everyone)
        probe = prices.seconds(PROBE_TOKENS, PROBE_TOKENS) / prices.plain - 1.0 - brought
        self._probe_cost = PROBE_ROUNDS * max(0.0, probe)
        self._set_next(rows + sum(best), prices)
        return best

    def _prices(self, seqs: Seq[Sequence], everyone: Seq[Sequence], rows: int) -> Prices:
        """Of a pass with `everyone`, of whom `seqs` may be drafted for."""
        assert self.target is not None
        fixed = self.target.extra([len(seq) for seq in everyone], [1] * len(everyone)) + self.rest
        step = self.draft.per_step(sum(map(len, seqs)) / len(seqs))
        return Prices(self.target, len(everyone), rows, fixed, self._slope(seqs), self.draft.start, step)

    def _slope(self, seqs: Seq[Sequence]) -> float:
        """Seconds that a row more takes because of what is cached."""
        assert self.target is not None
        if not self.target.per_row:
            return 0.0
        return self.target.per_row * sum(max(0, len(s) - self.target.context) for s in seqs) / len(seqs)

    @property
    def _worth_of_time(self) -> float:
        """Tokens a second: what was promised, by as much as such promises are kept."""
        return self._rate * min(self._promise[0] / self._promise[1], 1.25)

    def _set_next(self, rows: float, prices: Prices) -> None:
        """What one token more of each chain, and the step that writes them, must bring."""
        every, target, worth = self.acceptance.all, prices.target, self._worth_of_time
        rate = (sum(every.hits) + every.weight) / (sum(every.tries) + every.weight)
        row = target.at(rows + 1) - target.at(rows) + prices.slope
        self._next = rate, worth * row, worth * prices.step

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        """The draft without the nodes of `members` (None: all) that cost more time than their tokens are worth.

        `num_rows`: of known tokens. A node stays only with its parent, which is as likely at least and costs the same.
        """
        self._nodes, self._steps = {}, 0
        if not len(draft.tokens):
            return draft
        self.acceptance.tells = draft.confidence is not None
        counts = np.diff(draft.offsets).tolist()
        self._read(draft, seqs, counts)
        if self.target is None or draft.confidence is None or self._rate <= 0.0:
            return draft
        # A probe is to find out, not to pay.
        free = range(len(seqs)) if members is None else members
        able = {b: self._nodes[seqs[b].seq_id] for b in free if counts[b] and seqs[b] not in self.probing}
        if not able:
            return draft
        likely = [(p, b, i) for b, nodes in able.items() for i, p in enumerate(nodes.likely)]
        likely.sort(key=itemgetter(0), reverse=True)  # stable: parents come before children
        rows = num_rows + len(draft.tokens) - len(likely)
        count = self._worth([p for p, _, _ in likely], rows, self._slope([seqs[b] for b in able]))
        if count == len(likely):
            return draft
        keep: dict[int, list[int]] = {b: [] for b in able}
        for _, b, i in likely[:count]:
            keep[b].append(i)
        for b, nodes in able.items():
            keep[b].sort()
            self._nodes[seqs[b].seq_id] = nodes.kept(keep[b])
        return draft.kept([keep.get(b) for b in range(len(seqs))])

    def _read(self, draft: Draft, seqs: Seq[Sequence], counts: Seq[int]) -> None:
        """See what every node is held to be worth, and how many steps the longest path took."""
        parents = draft.parents.tolist()
        confidence = None if draft.confidence is None else draft.confidence.tolist()
        end, deepest = 0, 0
        for seq, count in zip(seqs, counts, strict=True):
            if count:
                part = slice(end, end + count)
                sure = None if confidence is None else confidence[part]
                nodes = DraftNodes(parents[part], sure, self.acceptance.rates(seq.seq_id))
                self._nodes[seq.seq_id] = nodes
                deepest = max(deepest, 1 + max(nodes.depths))
            end += count
        self._steps = deepest

    def _worth(self, likely: Seq[float], rows: int, slope: float) -> int:
        """How many of these nodes, the likeliest first, bring more tokens than their time is worth."""
        assert self.target is not None
        tokens, best, best_gain, rate = 0.0, 0, 0.0, self._worth_of_time
        before = self.target.at(rows)
        for n, p in enumerate(likely, 1):
            tokens += p
            gain = tokens - rate * (self.target.at(rows + n) - before + slope * n)
            if gain > best_gain:
                best, best_gain = n, gain
        return best

    def update(self, round_: Round) -> None:
        """Learn from a round: what was right, and what it took."""
        # A drafter that was not asked in the last round first has to catch up: that is no part of what a step costs.
        # (One that found nothing was asked all the same.)
        asked_now = {s.seq_id for s, k in zip(round_.seqs, round_.num_asked, strict=True) if k}
        catching_up = not asked_now <= self._asked
        self._asked = asked_now
        for b, (seq, asked) in enumerate(zip(round_.seqs, round_.num_asked, strict=True)):
            if asked:
                self._num_drafts += 1
                if self._is_fresh(seq):
                    self._starts[seq.seq_id] += 1
                accepted = range(round_.num_accepted[b]) if round_.nodes is None else round_.nodes[b]
                nodes = self._nodes.get(seq.seq_id)
                if nodes is None or len(nodes.parents) != round_.num_draft[b]:  # nobody trimmed: a chain
                    chain = range(-1, round_.num_draft[b] - 1)
                    nodes = DraftNodes(chain, None, self.acceptance.rates(seq.seq_id))
                self.acceptance.learn(seq.seq_id, asked, nodes, accepted)
        times = round_.times
        if times is not None:
            if any(round_.num_asked) and not catching_up:
                steps = max(round_.num_draft) if self._steps is None else self._steps
                asking = [len(s) for s, k in zip(round_.seqs, round_.num_asked, strict=True) if k]
                self.draft.correct(steps, times.draft, sum(asking) / len(asking))
                seconds = times.draft + times.target + times.verify + times.schedule
                tokens = len(round_.seqs) + sum(round_.num_accepted)
                if round_.num_rows <= len(round_.seqs) + sum(round_.num_draft):  # no prompt's rows among them
                    self._promise[0] = FADE * self._promise[0] + tokens
                    self._promise[1] = FADE * self._promise[1] + (self._rate * seconds if self._rate else tokens)
            self.rest += 0.1 * (times.verify + times.schedule - self.rest)
            self._correct(round_, times.target)
        self._nodes, self._steps = {}, None

    def _correct(self, round_: Round, seconds: float) -> None:
        """The target's pass took so long."""
        if self.target is None:  # in shape as measured for 8-bit weights: nearly flat, then a slope
            one = seconds / (1.0 + 0.02 * (round_.num_rows - 1))
            self.target = Curve([(m, one * (1.0 + 0.02 * (m - 1))) for m in (1, 4, 8, 16, 64)])
        elif round_.num_rows <= 2 * self.target.rows[-1]:
            contexts = [len(seq) for seq in round_.seqs]
            extra = self.target.extra(contexts, [1 + k for k in round_.num_draft])
            self.target.correct(round_.num_rows, seconds, extra)

    def release(self, seq: Sequence) -> None:
        """The sequence is gone."""
        self.acceptance.release(seq.seq_id)
        self.probing.release(seq)
        self._nodes.pop(seq.seq_id, None)
        self._asked.discard(seq.seq_id)
        self._starts.pop(seq.seq_id, None)


POLICY = GoodputLength

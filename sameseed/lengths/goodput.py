"""Goodput: in each round as many draft tokens as pay, none included (TurboSpec: Liu et al., 2024; DSpark, 2026).

A round's value is the tokens that it may be expected to decide over the time that it takes. How much to ask for is
decided from what earlier drafts brought (`_acceptance.py`) and what rounds cost (`_cost.py`). Once a draft is there,
its nodes are kept as long as the next likeliest one brings more than the time for it would elsewhere. Where no draft
pays, finding out whether that has changed costs at most a share of the time (`_budget.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from operator import attrgetter, itemgetter

import numpy as np

from sameseed.lengths._acceptance import Acceptance, DraftNodes, Rates
from sameseed.lengths._budget import TRIAL_ROUNDS, TRIAL_TOKENS, Budget
from sameseed.lengths._cost import LEARN, Curve, DraftCost, EngineCost, Prices
from sameseed.lengths._search import Offers, alone, shared
from sameseed.request import Sequence, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Round

HOLD_ROUNDS, LONGEST_HOLD = 4, 16  # rounds that a decision stands while the same sequences run, of short ones more
HOLD_SECONDS = 0.015  # seconds that they should last then
LEARN_EVERY = 0.01  # seconds of rounds, of which one is learned: of those that are looked at (`LOOK_EVERY`)
SHORT_ROUND = 0.004  # seconds of a round: in shorter ones it is felt if the drafter gets hidden states
LONGEST_WITHOUT_STATES = 0.5  # seconds without them, at most
STATES_NEEDED = 96  # tokens of a sequence with them, after some without: a head that knows fewer guesses worse
DECISION_SHARE = 0.005  # of the time that decisions may take where nobody drafts
WARM_UP = 48  # learned rounds; what was measured before them may be off altogether
FIRST_GAPS = 16  # of the first rounds each is learned: nothing else tells what lies between passes
SIMILAR_BATCH = 0.25  # share by which a batch may change in size while a decision stands
FEW_SEQUENCES = 3  # sequences, at most, of which a new one ends a rest: it may be a good part of what comes
LONGEST_REST = 64  # rounds without a draft before it is decided anew, at most
CLEAR_GAIN = 1.25  # times as fast as plain decoding; below, one round without a draft is measured of so many:
MEASURE_EVERY = 64
FIRST_UNMEASURED, LONGEST_UNMEASURED = 256, 1024  # of so many where it is clear: twice as many after one as expected
AS_EXPECTED = 1.15  # times as long, or as short, as expected is what a measured round takes
MEASURED = 0.4  # weight of such a round in what rounds without a draft take
FREE_STEP = 0.01  # of a round without a draft: a step that takes less costs nothing
LOOK_EVERY = 16  # of so many rounds without a draft one is measured, after the first of them
FADE = 0.95  # a round later, of how promises were kept; a text later, of how long texts are
PROPOSALS_NEEDED = 8  # proposals from which what a step of one costs is known
FEW_UNSEEN = 8  # tokens, at most, with which a drafter that is asked now and then has to catch up
_id = attrgetter("seq_id")
POSSIBLE_SAVING = 0.3  # of a round without a draft, for all its sequences: what drafting may save


class GoodputLength:
    """Decides lengths from costs and acceptance; `num_draft_tokens` is the most. One engine's own: it learns."""

    uses_confidence = trims = True

    def __init__(self, num_draft_tokens: int, target: Curve | None = None) -> None:
        """`target`: seconds of the target's passes; None: learned from the first rounds and a guess of their shape."""
        self.num_draft_tokens = num_draft_tokens
        self.cost = None if target is None else EngineCost(target)
        self.acceptance = Acceptance(max(1, num_draft_tokens))
        self.budget = Budget()
        self._rate = 0.0  # tokens a second that the last decision promised
        self._promise = [10.0, 10.0]  # tokens that rounds brought, and that their time was to bring by the promise
        # How often a token is right after right ones; tokens a second that time is worth; seconds of a row for what is
        # cached; tokens that a step of the drafter must bring; rows of the pass without drafts.
        self._next: tuple[float, float, float, float, float] | None = None
        self._held: tuple[tuple[int, ...], int, list[int]] | None = None  # sequences, rounds left, lengths
        self._rest, self._resting = 0, (0, 0)  # rounds for which nobody drafts, while about so many run, this one last
        self._idle = False  # is this round one of them?
        self._fixed_rest = 0  # of them, those for which it stays so whoever comes: to decide takes time too
        self._without_states = False  # does the drafter get no hidden states in these?
        self._can_try = self._none_to_try = False  # is one that the drafter knows worth a trial; or none of them?
        self._missed: dict[int, int] = {}  # tokens of a sequence in the last pass that the drafter did not get
        self._plain = 1.0  # seconds of a round without a draft
        self._num_plain = 0
        self._drafting: set[int] = set()  # sequences that the last decision lets draft
        self._asked: set[int] = set()  # sequences that were drafted for in the last round
        self._new: set[int] = set()  # those of them for which that was the pass over their prompt
        self._catching_up = 0, 0.0  # tokens that it reads now to catch up, and the seconds of it
        self._seen: dict[int, int] = {}  # tokens of a sequence that the drafter knew when it was last asked
        self._written = [0.0, 0.0]  # texts that ended, and their tokens; older ones fade
        self._nodes: dict[int, DraftNodes] = {}  # of the round that runs
        self._hold = HOLD_ROUNDS
        self._unlearned = LEARN_EVERY  # seconds of rounds since one was learned
        self._num_learned = 0  # rounds
        self._deciding = 0.0  # seconds of this round's decision, which stands for more rounds than this one
        self._steps = 0.0  # that a proposal as decided is expected to take
        self._unclear = False  # does drafting promise little more than plain decoding?
        self._drafted = 0  # when somebody last drafted, in rounds
        self._since_plain = 0  # rounds since the last one without a draft
        self._begun_in_vain = -1  # `_drafted`, when a text that had just begun was last decided not to draft
        self._unmeasured = FIRST_UNMEASURED  # rounds after which the next one is measured where the gain is clear
        self._chains = DraftCost()  # of proposals that could end early, by the steps that they really took
        self._could_end = self._ended = False  # the one of this round; did it?
        self._depth = 0  # of this round's draft, before it was trimmed
        self._may_end = False  # did any?

    @classmethod
    def build(cls, num_draft_tokens: int, confidence: float | None = None) -> GoodputLength:
        """One for these settings."""
        return cls(num_draft_tokens)

    def calibrate(self, measure: Callable[[], EngineCost]) -> None:
        """Take over what rounds cost, if that is not known."""
        if self.cost is None and self.num_draft_tokens:
            self.cost = measure()

    def stop(self, confidence: float) -> bool:
        return False

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        """Will one step more of these chains bring less than its time is worth?"""
        if self._next is None:
            return False
        self._could_end = self._may_end = True
        assert self.cost is not None
        rate, worth, slope, step, rows = self._next
        count, at = max(1, len(paths)), self.cost.target.at
        rows += sum(map(len, paths))  # passes cost more a row the longer they get
        row = worth * ((at(rows + count) - at(rows)) / count + slope)
        rates, gain = Rates(self.acceptance.all, None), 0.0
        for path in paths:
            likely = DraftNodes(range(-1, len(path) - 1), path, rates).likely[-1]
            gain += max(0.0, likely * rate - row)
        self._ended = gain < step
        return self._ended

    def lengths(self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None) -> list[int]:
        """Lengths that promise the most tokens a second; at most `budget` draft tokens in all."""
        if self.num_draft_tokens == 0 or not seqs or self.cost is None:
            return [0] * len(seqs)
        size, last = self._resting
        # A text that begins now would be decided as the last one that began, while nobody drafted since.
        same = size > FEW_SEQUENCES or seqs[-1].seq_id == last or self._begun_in_vain == self._drafted
        alike = abs(len(seqs) - size) <= SIMILAR_BATCH * size and same
        self._idle = self._rest > 0 and (alike or self._fixed_rest > 0)
        if self._idle:
            self._rest, self._fixed_rest = self._rest - 1, self._fixed_rest - 1
            return [0] * len(seqs)
        self._rest = self._fixed_rest = 0
        ids = tuple([seq.seq_id for seq in seqs])
        if self._held is not None and self._held[0] == ids and self._held[1] > 0:
            lengths = self._held[2]
            if budget is None or sum(lengths) <= budget:
                self._held = ids, self._held[1] - 1, lengths
                return list(lengths)
        start = time.perf_counter()
        lengths, hold = self._decided(seqs, num_rows or len(seqs), budget), self._hold
        self._deciding = time.perf_counter() - start
        if self.budget.trying is not None:
            hold = 1
        elif not any(lengths):
            rest, poor = self.budget.rest(ids, LONGEST_REST), self.budget.poor
            if poor > 0.0 and any(i not in self.acceptance.own for i in ids):
                self._begun_in_vain = self._drafted
            self._without_states = self._plain < SHORT_ROUND and (self._none_to_try or poor > LONGEST_REST)
            if self._without_states:
                most = LONGEST_WITHOUT_STATES / self._plain
                self._fixed_rest = round(min(poor if poor > LONGEST_REST else most, most))
            else:
                most = rest if self._can_try else LONGEST_REST
                self._fixed_rest = round(min(self._deciding / (DECISION_SHARE * self._plain), most)) - 1
            self._rest = max(rest - 1, self._fixed_rest)
            self._resting, self._idle = (len(seqs), ids[-1]), self._rest > 0
            self._held, self._asked, self._catching_up = None, set(), (0, 0.0)
            return lengths
        elif self._since_plain >= (MEASURE_EVERY if self._unclear else self._unmeasured):
            lengths, hold = [0] * len(seqs), 1  # what is not measured any more may have changed
        self._held = ids, hold - 1, lengths
        return list(lengths)

    def listens(self, seqs: Seq[Sequence]) -> bool:
        """Shall the drafter get the target's hidden states of this pass?

        Not where rounds are so short that to take them would be felt, and no draft comes for a while. A sequence that
        was not listened to is drafted for again once the drafter knows `STATES_NEEDED` tokens of it.
        """
        if not self._without_states or self._fixed_rest <= 0:
            return True
        self._missed.update({seq.seq_id: len(seq) for seq in seqs})
        return False

    def _decided(self, seqs: Seq[Sequence], rows: int, budget: int | None) -> list[int]:
        """Lengths that promise the most; a sequence for which drafting does not pay may be tried."""
        known = self.acceptance.own
        one = self.acceptance.offers(-1, self.num_draft_tokens)  # of those of whom nothing is known
        offers = [self.acceptance.offers(i, self.num_draft_tokens) if i in known else one for i in map(_id, seqs)]
        known_from = {i: length + STATES_NEEDED for i, length in self._missed.items()}
        missed = {b for b, seq in enumerate(seqs) if len(seq) < known_from.get(seq.seq_id, 0)}
        offers = [[] if b in missed else o for b, o in enumerate(offers)]
        lengths, prices = self._best(offers, seqs, rows, budget)
        starts = [self._catch_up_seconds(seq) for seq in seqs]
        late = self._never_recovered(seqs, offers, lengths, starts, prices)
        if late:
            lengths, prices = self._best([[] if b in late else o for b, o in enumerate(offers)], seqs, rows, budget)
        self.budget.end_trial()
        for seq, k in zip(seqs, lengths, strict=True):
            if (k > 0) != (seq.seq_id in self._drafting) or seq.seq_id == self.budget.tried:
                self.budget.note(seq, k > 0)
        self._drafting = {seq.seq_id for seq, k in zip(seqs, lengths, strict=True) if k}
        left = self.num_draft_tokens * len(seqs) if budget is None else budget - sum(lengths)
        # Drafts that tell how likely they are may be longer where unlikely ones end early, or steps cost nothing.
        if self.acceptance.tells and (self._may_end or prices.step < FREE_STEP * prices.plain):
            for b, k in enumerate(lengths):
                more = min(k + 2, self.num_draft_tokens - k, left) if k else 0
                lengths[b], left = k + more, left - more
        possible = POSSIBLE_SAVING / len(seqs) * prices.plain  # seconds a round that one more sequence may save
        idle = [b for b, k in enumerate(lengths) if not k and starts[b] <= possible * self._tokens_left(seqs[b])]
        idle = [b for b in idle if b not in missed]
        self._can_try, self._none_to_try = bool(idle), not idle and len(missed) < len(seqs)
        trial = min(TRIAL_TOKENS, self.num_draft_tokens)
        if idle and trial <= left:
            lost = prices.seconds(trial, trial) / prices.plain - 1.0
            brought = sum(gain for gain, _, _ in self.acceptance.offers(-1, trial)) / len(seqs)
            start = min(starts[b] for b in idle) / prices.plain
            tried = self.budget.next([seqs[b] for b in idle], TRIAL_ROUNDS * max(lost - brought, 0.0) + start)
            if tried is not None:
                lengths[seqs.index(tried)] = min(self.budget.trial_tokens, self.num_draft_tokens, left)
                if not self._drafting:
                    self._next = None  # a trial is to find out, not to pay
        self._steps = max((o[k - 1][2] for o, k in zip(offers, lengths, strict=True) if k), default=0.0)
        return lengths

    def _catch_up_seconds(self, seq: Sequence) -> float:
        """Seconds that the drafter needs to see what it has not seen of a sequence."""
        assert self.cost is not None
        unseen = len(seq) - self._seen.get(seq.seq_id, 0)
        return self.cost.catch_up * unseen if unseen > FEW_UNSEEN else 0.0

    def _tokens_left(self, seq: Sequence) -> float:
        """Tokens that a text will go on for: as many as texts had of late, and no more than it may."""
        most = seq.params.max_tokens - seq.num_output
        texts, tokens = self._written
        return float(most) if texts < 1.0 else min(most, tokens / texts)

    def _never_recovered(
        self, seqs: Seq[Sequence], offers: Seq[Offers], lengths: Seq[int], starts: Seq[float], prices: Prices
    ) -> set[int]:
        """Sequences for which drafting would pay, but not long enough to win back what beginning with it takes."""
        drafting = [b for b, k in enumerate(lengths) if k]
        gains = {b: sum(gain for gain, _, _ in offers[b][: lengths[b]]) for b in drafting}
        tokens = len(seqs) + sum(gains.values())
        saved = tokens * (prices.plain / len(seqs) - 1.0 / self._rate) if drafting else 0.0  # seconds a round
        rounds = {b: self._tokens_left(seqs[b]) / (1.0 + gains[b]) for b in drafting}
        return {b for b in drafting if starts[b] > saved / len(drafting) * rounds[b]}

    def _best(
        self, offers: Seq[Offers], seqs: Seq[Sequence], rows: int, budget: int | None
    ) -> tuple[list[int], Prices]:
        """Lengths that promise the most, or none where that is not clearly more than plain decoding promises."""
        assert self.cost is not None
        contexts = [len(seq) for seq in seqs]
        prices = self.cost.prices(contexts, rows, len(seqs), sum(contexts) / len(seqs))
        if len(seqs) == 1:
            best, promised = alone(offers[0][:budget], 1, prices)
        else:
            best, promised = shared(offers, budget, len(seqs), prices)
        self._unclear = promised < CLEAR_GAIN * len(seqs) / prices.plain
        self._hold = min(max(HOLD_ROUNDS, round(HOLD_SECONDS / prices.plain)), LONGEST_HOLD)
        self._rate, self._plain = promised, prices.plain
        self._set_next(rows, prices, max(1, sum(k > 0 for k in best)), sum(contexts) / len(seqs))
        return best, prices

    @property
    def _tokens_per_second(self) -> float:
        """Tokens a second: what was promised, by as much as such promises are kept."""
        return self._rate * min(self._promise[0] / self._promise[1], 1.25)

    def _set_next(self, rows: float, prices: Prices, num_seqs: int, context: float) -> None:
        """What one token more of each chain, and the step that writes them, must bring."""
        every, worth = self.acceptance.all, self._tokens_per_second
        rate = (sum(every.hits) + every.weight) / (sum(every.tries) + every.weight)
        step = self._chains.terms(num_seqs, context)[1] if self._chains.seen > PROPOSALS_NEEDED else prices.step
        self._next = rate, worth, prices.slope, worth * step, rows

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        """The draft without the nodes of `members` (None: all) that cost more time than their tokens are worth.

        `num_rows`: of known tokens. A node stays only with its parent, which is as likely at least and costs the same.
        """
        self._nodes = {}
        if not len(draft.tokens):
            return draft
        counts = np.diff(draft.offsets).tolist()
        self._nodes = self.acceptance.read(draft, seqs)
        self._depth = 1 + max(max(nodes.depths) for nodes in self._nodes.values())
        if self.cost is None or draft.confidence is None or self._rate <= 0.0:
            return draft
        # A trial is to find out, not to pay.
        free = range(len(seqs)) if members is None else members
        able = {b: self._nodes[seqs[b].seq_id] for b in free if counts[b] and seqs[b].seq_id in self._drafting}
        if not able:
            return draft
        likely = [(p, b, i) for b, nodes in able.items() for i, p in enumerate(nodes.likely)]
        likely.sort(key=itemgetter(0), reverse=True)  # stable: parents come before children
        rows = num_rows + len(draft.tokens) - len(likely)
        contexts = [len(seqs[b]) for b in able]
        prices = self.cost.prices(contexts, rows, len(able), sum(contexts) / len(able))
        count = self._num_worth([p for p, _, _ in likely], rows, prices)
        if count == len(likely):
            return draft
        keep: dict[int, list[int]] = {b: [] for b in able}
        for _, b, i in likely[:count]:
            keep[b].append(i)
        for b, nodes in able.items():
            keep[b].sort()
            self._nodes[seqs[b].seq_id] = nodes.kept(keep[b])
        return draft.kept([keep.get(b) for b in range(len(seqs))])

    def _num_worth(self, likely: Seq[float], rows: int, prices: Prices) -> int:
        """How many of these nodes, the likeliest first, bring more tokens than their time is worth."""
        tokens, best, best_gain, rate = 0.0, 0, 0.0, self._tokens_per_second
        target, slope = prices.target, prices.slope
        before = target.at(rows)
        for n, p in enumerate(likely, 1):
            tokens += p
            gain = tokens - rate * (target.at(rows + n) - before + slope * n)
            if gain > best_gain:
                best, best_gain = n, gain
        return best

    def pass_over(self) -> bool:
        """Count the round that has run without learning of it, as most of a rest; False where `update` is to."""
        if not self._idle or self._num_plain < LOOK_EVERY or (self._num_plain + 1) % LOOK_EVERY == 0:
            return False
        self._num_plain += 1
        self.budget.passed()
        return True

    def update(self, round_: Round) -> None:
        """Learn from a round: what was right, and what it took."""
        if self.pass_over():
            return
        self.budget.passed()
        self._num_plain += self._idle  # plain decoding should cost what it costs
        # A drafter that was not asked in the last round first has to catch up: that is no part of what a step costs. A
        # head does so a round later after a prompt. (One that found nothing was asked all the same.)
        asked_now = {s.seq_id for s, k in zip(round_.seqs, round_.num_asked, strict=True) if k}
        new = asked_now - self._asked
        catching_up = bool(new or asked_now & self._new)
        self._asked, self._new = asked_now, set()
        if new and self.cost is not None and self.cost.catch_up > 0.0:
            counts = zip(round_.seqs, round_.num_accepted, strict=True)
            self._new = new & {seq.seq_id for seq, accepted in counts if seq.num_output <= 1 + accepted}
        measured = not asked_now and self._since_plain > 0
        self._since_plain = self._since_plain + 1 if asked_now else 0
        if asked_now:
            self.acceptance.rested(self.budget.now - self._drafted - 1)
            self._drafted = self.budget.now
        self.acceptance.learn_round(round_, self._nodes, self._ended)
        times = round_.times
        if not catching_up:  # nobody asked again: how long the rest took is not known
            self._catching_up = 0, 0.0
        elif times is not None and self.cost is not None:
            self._caught_up(round_, new, times.draft)
        if times is not None and round_.seqs:
            seconds = times.draft + times.target + times.verify + times.schedule
            self._unlearned += seconds
            trial = self.budget.trying is not None
            if asked_now and round_.num_rows <= len(round_.seqs) + sum(round_.num_draft):  # no prompt's rows among them
                tokens = len(round_.seqs) + sum(round_.num_accepted)
                if trial:
                    self._tried(round_, seconds / self._plain - tokens / len(round_.seqs))
                if not catching_up:
                    self._promise[0] = FADE * self._promise[0] + tokens
                    self._promise[1] = FADE * self._promise[1] + (self._rate * seconds if self._rate else tokens)
            if self.cost is None:  # in shape as measured for 8-bit weights: nearly flat, then a slope
                one = times.target / (1.0 + 0.02 * (round_.num_rows - 1))
                self.cost = EngineCost(Curve([(m, one * (1.0 + 0.02 * (m - 1))) for m in (1, 4, 8, 16, 64)]))
            due = self._unlearned >= LEARN_EVERY or self._num_learned < WARM_UP or self.cost.gap.seen < FIRST_GAPS
            if trial or measured or due:  # to learn takes time too
                self._unlearned = 0.0
                self._learn(round_, times, catching_up, MEASURED if measured else LEARN)
            if measured and round_.num_rows == len(round_.seqs):
                as_expected = self._plain / AS_EXPECTED < seconds < self._plain * AS_EXPECTED
                self._unmeasured = min(2 * self._unmeasured, LONGEST_UNMEASURED) if as_expected else MEASURE_EVERY
        self._seen.update({s.seq_id: len(s) for s in round_.seqs if s.seq_id in asked_now})
        self._nodes, self._could_end, self._ended, self._depth, self._deciding = {}, False, False, 0, 0.0

    def _tried(self, round_: Round, lost: float) -> None:
        """A round of a trial is over, and has lost so many rounds' time."""
        counts = zip(round_.seqs, round_.num_asked, round_.num_accepted, strict=True)
        asked, accepted = next(((k, n) for s, k, n in counts if s.seq_id == self.budget.trying), (0, 0))
        self.budget.lost(lost, 0 < asked <= accepted)

    def _learn(self, round_: Round, times: TimeSplit, catching_up: bool, weight: float) -> None:
        """Learn what a round took; a proposal that could end early by the steps that it took, not those expected."""
        assert self.cost is not None
        self._num_learned += 1
        if self._deciding:
            times = replace(times, schedule=max(0.0, times.schedule - self._deciding))
            round_ = replace(round_, times=times)
        steps = self._depth if self._could_end else self._steps
        self.cost.learn(round_, steps, catching_up, self._num_learned <= WARM_UP, weight)
        if self._could_end and self._depth and not catching_up:
            asking = [len(seq) for seq, k in zip(round_.seqs, round_.num_asked, strict=True) if k]
            self._chains.learn(self._depth, len(asking), sum(asking) / len(asking), times.draft)

    def _caught_up(self, round_: Round, new: set[int], seconds: float) -> None:
        """Learn what tokens take that the drafter has yet to see; a head reads those of a prompt a round later."""
        assert self.cost is not None
        asking = [len(seq) for seq, k in zip(round_.seqs, round_.num_asked, strict=True) if k]
        start, step = self.cost.draft.terms(len(asking), sum(asking) / len(asking))
        unseen = sum(len(s) - self._seen.get(s.seq_id, 0) for s in round_.seqs if s.seq_id in new)
        self._catching_up = self._catching_up[0] + unseen, self._catching_up[1] + seconds - start - step * self._steps
        if not self._new:
            self.cost.learn_catch_up(*self._catching_up)
            self._catching_up = 0, 0.0

    def release(self, seq: Sequence) -> None:
        """The sequence is gone."""
        self.acceptance.release(seq.seq_id)
        self.budget.release(seq)
        self._seen.pop(seq.seq_id, None)
        self._missed.pop(seq.seq_id, None)
        self._written = [FADE * self._written[0] + 1.0, FADE * self._written[1] + seq.num_output]
        self._nodes.pop(seq.seq_id, None)
        self._asked.discard(seq.seq_id)
        self._drafting.discard(seq.seq_id)


POLICY = GoodputLength

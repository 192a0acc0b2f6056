"""goodput: in each round as many draft tokens as pay, which may be 0 (TurboSpec: Liu et al., 2024; DSpark, 2026).

Goodput is the expected number of accepted tokens of a round (the bonus token included) over the round's expected time.
Draft lengths are chosen to maximize goodput, from acceptance estimates (`_acceptance.py`) and measured costs (`cost`).
After drafting, nodes are kept in order of probability as long as each brings more tokens than its time is worth. While
no draft pays, trials find out whether that has changed, and lose at most a fixed share (`_budget.py`).

A "round" is one pass of the target with its proposal. "Plain" rounds have no drafts. A "rest" is a run of plain rounds
that is decided at once, without a new decision in each round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence as Seq, Set
from dataclasses import replace
from operator import attrgetter, itemgetter

import numpy as np

from sameseed.cost.curve import Curve
from sameseed.cost.round import NOTHING, DraftRows, RoundCost, expected
from sameseed.cost.running import DraftCost, EngineCost
from sameseed.lengths._acceptance import Acceptance, DraftNodes, Rates, likelihood
from sameseed.lengths._budget import SHARE, TRIAL_ROUNDS, TRIAL_TOKENS, Budget
from sameseed.lengths._search import Offers, best_lengths
from sameseed.request import Sequence, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, LengthPolicy, Round

HOLD_ROUNDS, LONGEST_HOLD = 4, 16  # fewest and most rounds for which a decision holds while the batch stays the same
HOLD_SECONDS = 0.015  # seconds for which a decision should hold if rounds are short
LEARN_EVERY = 0.02  # seconds of rounds (those that reach `update`) per round from which costs are learned
SHORT_ROUND = 0.004  # seconds: copying hidden states to the drafter takes a noticeable share of shorter rounds
LONGEST_WITHOUT_STATES = 0.5  # seconds, at most, without hidden states for the drafter
STATES_NEEDED = 96  # tokens with hidden states that a head needs after a gap; with fewer its drafts are worse
DECISION_SHARE = 0.005  # share of the time that decisions may take while no sequence has drafts; twice it with drafts
WARM_UP = 48  # learned rounds that rescale all costs: what was measured before them may be far off
FIRST_GAPS = 16  # first rounds that are all learned: nothing else measures the gap between passes
SIMILAR_BATCH = 0.25  # relative change of the batch size up to which a rest goes on
FEW_SEQUENCES = 3  # in batches up to this size a new sequence ends a rest: it may be a large part of the work
LONGEST_REST = 64  # most rounds of a rest before lengths are decided again
FIRST_UNMEASURED = 16  # least rounds with drafts before a plain one is measured; more by the budget of trials
# After drafts the first plain rounds find cold caches: one is measured once they do not get faster, or after so many.
NO_FASTER, MOST_COLD = 0.95, 8
FREE_STEP = 0.01  # share of a plain round's time below which a drafting step counts as free
LOOK_EVERY = 16  # one of so many rounds of rests is learned from, after the first so many
FADE = 0.95  # decay of `_promise` per round, and of `_written` per ended sequence
PROPOSALS_NEEDED = 8  # proposals after which the step cost in `_chains` is used
FEW_UNREAD = 8  # tokens of a text up to which reading is free: a drafter that is asked now and then misses so many
_id = attrgetter("seq_id")
POSSIBLE_SAVING = 0.3  # share of a plain round's time that drafting for all its sequences may save


class GoodputLength(LengthPolicy):
    """Decides draft lengths, at most `num_draft_tokens`, from learned costs and acceptance. One object per engine."""

    uses_confidence = trims = True

    def __init__(self, num_draft_tokens: int, target: Curve | None = None) -> None:
        """`target`: seconds of the target's passes; None: learned from the first rounds, with an assumed shape."""
        self.num_draft_tokens = num_draft_tokens
        self.cost = None if target is None else EngineCost(target)
        self.acceptance = Acceptance(max(1, num_draft_tokens))
        self.budget = Budget()
        self._rate = 0.0  # tokens per second that the last decision expects
        self._promise = [10.0, 10.0]  # tokens decided, and tokens expected in the same time; older rounds decay
        # What `ends` needs: acceptance rate of a token after accepted ones; tokens per second; seconds per draft row
        # (`EngineCost.row`); tokens that a step of the drafter must bring; rows of the pass without drafts.
        self._next: tuple[float, float, float, float, float] | None = None
        self._held: tuple[tuple[int, ...], int, list[int]] | None = None  # sequences, rounds left, lengths
        self._unaffordable = 0  # rounds in which another decision would take more than its share of the time
        self._rest, self._resting = 0, (0, 0)  # rounds left of the rest; its batch size and last sequence
        self._idle = False  # is this round part of a rest?
        self._fixed_rest = 0  # rounds of the rest that new sequences cannot end: a decision takes time too
        self._without_states = False  # does the drafter get no hidden states in these?
        self._can_try = self._none_to_try = False  # is a sequence worth a trial; is none, for certain?
        self._missed: dict[int, int] = {}  # by sequence: its length in the last pass without hidden states
        self._plain, self._count = 1.0, 1  # seconds of a plain round, and its sequences
        self._num_plain = 0  # rounds of rests so far
        self._drafting: set[int] = set()  # sequences with drafts by the last decision
        self._asked: set[int] = set()  # sequences with drafts in the last round
        self.drafter: Drafter | None = None  # whose reading of texts is counted; None: it reads nothing
        self._read: dict[int, int] = {}  # by sequence: tokens that the drafter had read when it was last asked
        self._written = [0.0, 0.0]  # texts that ended by themselves, and output tokens of all; older ones decay
        self._nodes: dict[int, DraftNodes] = {}  # drafts of the current round, by sequence
        self._hold = HOLD_ROUNDS
        self._unlearned = LEARN_EVERY  # seconds of rounds since costs were last learned
        self._num_learned = 0  # rounds from which costs were learned
        self._deciding = 0.0  # seconds of this round's decision, which holds for more rounds than this one
        self._steps = 0.0  # expected drafting steps of a proposal with the decided lengths
        self._drafted = 0  # number of the last round with a draft
        self._since_plain = 0  # rounds with drafts since a plain one was measured
        self._settling = 0, math.inf  # plain rounds since the last one with drafts, and seconds of the latest of them
        self._begun_in_vain = -1  # `_drafted` when a new sequence was last decided to have no draft
        self._chains = DraftCost()  # costs of proposals that could end early, by the steps that they took
        self._could_end = self._ended = self._may_end = False  # could this round's proposal end early; did it; any?
        self._depth = 0  # depth of this round's draft before trimming

    @classmethod
    def build(cls, num_draft_tokens: int, confidence: float | None = None) -> GoodputLength:
        """The policy for these settings; `confidence` is ignored."""
        return cls(num_draft_tokens)

    def calibrate(self, measure: Callable[[], EngineCost]) -> None:
        """Set the round costs to `measure()` if they are not known yet and drafts are allowed."""
        if self.cost is None and self.num_draft_tokens:
            self.cost = measure()

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        """True if one more drafting step for these chains is expected to bring less than its time is worth."""
        if self._next is None:
            return False
        self._could_end = self._may_end = True
        assert self.cost is not None
        rate, worth, slope, step, rows = self._next
        count, at = max(1, len(paths)), self.cost.target.at
        rows += sum(map(len, paths))  # a row may cost more in a larger pass
        row = worth * ((at(rows + count) - at(rows)) / count + slope)
        rates, gain = Rates(self.acceptance.all, None), 0.0
        for path in paths:
            gain += max(0.0, likelihood(path, rates) * rate - row)
        self._ended = gain < step
        return self._ended

    def lengths(
        self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None, beside: int = 0
    ) -> list[int]:
        """The lengths with the most expected tokens per second; at most `budget` draft tokens in all.

        Sequences `beside` these will soon share each pass: a token that a draft saves is worth its share of such a one.
        """
        if self.num_draft_tokens == 0 or not seqs or self.cost is None:
            return [0] * len(seqs)
        size, last = self._resting
        # A new sequence would get the same decision as the last new one, if no sequence had a draft since then.
        same = size > FEW_SEQUENCES or seqs[-1].seq_id == last or self._begun_in_vain == self._drafted
        count = len(seqs) + beside
        alike = abs(count - size) <= SIMILAR_BATCH * size and same
        self._idle = self._rest > 0 and (alike or self._fixed_rest > 0)
        if self._idle:
            self._rest, self._fixed_rest = self._rest - 1, self._fixed_rest - 1
            return [0] * len(seqs)
        self._rest = self._fixed_rest = 0
        ids = (beside, *[seq.seq_id for seq in seqs])
        if self._held is not None and self._held[1] > 0:
            lengths = self._kept(ids, self._held)
            if lengths is not None and (budget is None or sum(lengths) <= budget):
                self._held, self._unaffordable = (ids, self._held[1] - 1, lengths), self._unaffordable - 1
                return list(lengths)
        start = time.perf_counter()
        lengths, hold = self._decided(seqs, num_rows or len(seqs), budget, count), self._hold
        self._deciding = time.perf_counter() - start
        if self.budget.trying is not None:
            hold = 1
        elif not any(lengths):
            self._begin_rest(ids[1:], count)
            return lengths
        elif self._since_plain >= self._due(count):
            lengths, hold = [0] * len(seqs), MOST_COLD  # measure a plain round: its cost may have changed
        else:
            self._unaffordable = min(round(self._deciding / (2 * DECISION_SHARE * self._plain)), LONGEST_HOLD)
            hold = max(hold, self._unaffordable)
        self._held = ids, hold - 1, lengths
        return list(lengths)

    def _kept(self, ids: tuple[int, ...], held: tuple[tuple[int, ...], int, list[int]]) -> list[int] | None:
        """The decided lengths for these sequences; None if a new decision is due.

        A batch of which most is known waits until a decision is affordable; its new sequences have no drafts till then.
        """
        if held[0] == ids:
            return held[2]
        known = dict(zip(held[0][1:], held[2], strict=True))
        if self._unaffordable <= 0 or held[0][0] != ids[0] or 2 * sum(i in known for i in ids[1:]) <= len(ids) - 1:
            return None
        return [known.get(i, 0) for i in ids[1:]]

    def _due(self, num_seqs: int) -> int:
        """After how many rounds with drafts a plain round is measured: soon where none was, in such a batch."""
        assert self.cost is not None
        if (False, num_seqs.bit_length()) not in self.cost.ratios:
            return FIRST_UNMEASURED
        lost = MOST_COLD * (self._rate * self._plain / num_seqs - 1.0)  # rounds that measuring loses at most
        return max(FIRST_UNMEASURED, round(lost / SHARE))

    def _begin_rest(self, ids: tuple[int, ...], count: int) -> None:
        """Begin a rest: plain rounds until a trial is affordable, or a new decision is due."""
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
        self._resting, self._idle = (count, ids[-1]), self._rest > 0
        self._held, self._asked = None, set()

    def listens(self, seqs: Seq[Sequence]) -> bool:
        """True if the drafter should get the target's hidden states of this pass.

        False if rounds are so short that copying hidden states would cost a noticeable share, and no draft is due soon.
        A sequence whose hidden states were left out gets drafts again after `STATES_NEEDED` more tokens.
        """
        if not self._without_states or self._fixed_rest <= 0:
            return True
        self._missed.update({seq.seq_id: len(seq) for seq in seqs})
        return False

    def _decided(self, seqs: Seq[Sequence], rows: int, budget: int | None, size: int) -> list[int]:
        """The best lengths by the estimates; a sequence for which drafting does not pay may get a trial."""
        known = self.acceptance.own
        unseen = [] if all(i in known for i in map(_id, seqs)) else self.acceptance.offers(-1, self.num_draft_tokens)
        offers = [self.acceptance.offers(i, self.num_draft_tokens) if i in known else unseen for i in map(_id, seqs)]
        known_from = {i: length + STATES_NEEDED for i, length in self._missed.items()}
        missed = {b for b, seq in enumerate(seqs) if len(seq) < known_from.get(seq.seq_id, 0)}
        offers = [[] if b in missed else o for b, o in enumerate(offers)]
        assert self.cost is not None
        cost, context = self.cost.now(size, rows), sum(map(len, seqs)) / len(seqs)
        lengths = self._best(offers, budget, cost, size, context)
        starts = [self._catch_up_seconds(seq) for seq in seqs]
        drafting = [b for b, k in enumerate(lengths) if k]
        late = {b for b in drafting if not self._pays_back(starts[b], seqs[b], 1.0 / len(drafting))}
        if late:
            others = [[] if b in late else o for b, o in enumerate(offers)]
            lengths = self._best(others, budget, cost, size, context)
        self._set_next(rows, max(1, sum(k > 0 for k in lengths)), context)
        self.budget.end_trial()
        for seq, k in zip(seqs, lengths, strict=True):
            if (k > 0) != (seq.seq_id in self._drafting) or seq.seq_id == self.budget.tried:
                self.budget.note(seq, k > 0)
        self._drafting = {seq.seq_id for seq, k in zip(seqs, lengths, strict=True) if k}
        left = self.num_draft_tokens * len(seqs) if budget is None else budget - sum(lengths)
        # Drafts with probabilities may be longer (2k + 2) if they can end early or steps are free: `trim` cuts them.
        step = self.cost.draft.terms(len(seqs), context)[1]
        if self.acceptance.tells and (self._may_end or step < FREE_STEP * self._plain):
            for b, k in enumerate(lengths):
                more = min(k + 2, self.num_draft_tokens - k, left) if k else 0
                lengths[b], left = k + more, left - more
        possible = POSSIBLE_SAVING / size * self._plain  # seconds per round saved by drafts of one sequence
        idle = [b for b, k in enumerate(lengths) if not k and starts[b] <= possible * self._tokens_left(seqs[b])]
        idle = [b for b in idle if b not in missed]
        self._can_try, self._none_to_try = bool(idle), not idle and len(missed) < len(seqs)
        trial = min(TRIAL_TOKENS, self.num_draft_tokens)
        if idle and trial <= left:
            round_ = expected(cost, DraftRows(0.0, trial / size, trial, len(seqs)), trial, size, context)
            lost = round_.seconds / self._plain - 1.0
            brought = sum(gain for gain, _, _ in self.acceptance.offers(-1, trial)) / size
            start = min(starts[b] for b in idle) / self._plain
            tried = self.budget.next([seqs[b] for b in idle], TRIAL_ROUNDS * max(lost - brought, 0.0) + start)
            if tried is not None:
                lengths[seqs.index(tried)] = min(self.budget.trial_tokens, self.num_draft_tokens, left)
                if not self._drafting:
                    self._next = None  # drafts of a trial do not end early: the trial must learn, not gain
        self._steps = max((o[k - 1][2] for o, k in zip(offers, lengths, strict=True) if k), default=0.0)
        return lengths

    def _catch_up_seconds(self, seq: Sequence) -> float:
        """Seconds for which the drafter must read a sequence before it can draft."""
        if self.cost is None or self.drafter is None or not self.drafter.must_read:
            return 0.0
        unread = len(seq) - self.drafter.num_read(seq)
        return self.cost.catch_up * unread if unread > FEW_UNREAD else 0.0

    def recovers(self, seq: Sequence, unread: int, share: float = 1.0) -> bool:
        if self.cost is None or unread <= FEW_UNREAD or self._rate <= 0.0:
            return True
        return self._pays_back(self.cost.catch_up * unread, seq, share)

    def _pays_back(self, seconds: float, seq: Sequence, share: float) -> bool:
        """Whether drafting saves `seconds` until a sequence ends, which has this `share` in what a round saves."""
        saved = self._plain - self._count / self._rate  # seconds per token of each sequence
        return seconds <= saved * share * self._tokens_left(seq)

    def _tokens_left(self, seq: Sequence) -> float:
        """Expected remaining output tokens, at most what is allowed.

        A text is taken to end at any token with the same chance: ends of recent texts over their tokens. A text that
        reached its limit has tokens, but no end.
        """
        most = seq.params.max_tokens - seq.num_output
        ends, tokens = self._written
        return float(most) if ends < 1.0 else min(most, tokens / ends)

    def _best(self, offers: Seq[Offers], budget: int | None, cost: RoundCost, size: int, context: float) -> list[int]:
        """The best lengths by the estimates. All are 0 unless they beat plain decoding by `PAYS`."""
        self._plain, self._count = expected(cost, NOTHING, 0, size, context).plain, size
        best, self._rate = best_lengths(offers, budget, cost, size, context, self._plain)
        self._hold = min(max(HOLD_ROUNDS, round(HOLD_SECONDS / self._plain)), LONGEST_HOLD)
        return best

    @property
    def _tokens_per_second(self) -> float:
        """Expected tokens per second, times how well recent expectations were met (at most 1.25)."""
        return self._rate * min(self._promise[0] / self._promise[1], 1.25)

    def _set_next(self, rows: float, num_seqs: int, context: float) -> None:
        """Set `_next`, by which `ends` weighs one more token per chain against the drafting step."""
        every, worth = self.acceptance.all, self._tokens_per_second
        rate = (sum(every.hits) + every.weight) / (sum(every.tries) + every.weight)
        assert self.cost is not None
        draft = self._chains if self._chains.seen > PROPOSALS_NEEDED else self.cost.draft
        self._next = rate, worth, self.cost.row(context), worth * draft.terms(num_seqs, context)[1], rows

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        """The draft without the nodes that cost more time than they bring, for sequences `members` (None: all).

        `num_rows`: rows of known tokens in the pass. A kept node's parent is kept too, since the parent is at least as
        likely and costs the same.
        """
        self._nodes = {}
        if not len(draft.tokens):
            return draft
        counts = draft.counts
        self._nodes = self.acceptance.read(draft, seqs)
        self._depth = 1 + max(max(nodes.depths) for nodes in self._nodes.values())
        if self.cost is None or draft.confidence is None or self._rate <= 0.0:
            return draft
        # Drafts of trials (sequences not in `_drafting`) are not trimmed: a trial must learn, not gain.
        free = range(len(seqs)) if members is None else members
        able = {b: self._nodes[seqs[b].seq_id] for b in free if counts[b] and seqs[b].seq_id in self._drafting}
        if not able:
            return draft
        likely = [(p, b, i) for b, nodes in able.items() for i, p in enumerate(nodes.likely)]
        likely.sort(key=itemgetter(0), reverse=True)  # stable: parents come before children
        rows = num_rows + len(draft.tokens) - len(likely)
        row = self.cost.row(sum(len(seqs[b]) for b in able) / len(able))
        count = self._num_worth([p for p, _, _ in likely], rows, row)
        if count == len(likely):
            return draft
        keep: dict[int, list[int]] = {b: [] for b in able}
        for _, b, i in likely[:count]:
            keep[b].append(i)
        for b, nodes in able.items():
            keep[b].sort()
            self._nodes[seqs[b].seq_id] = nodes.kept(keep[b])
        return draft.kept([keep.get(b) for b in range(len(seqs))])

    def _num_worth(self, likely: Seq[float], rows: int, row: float) -> int:
        """How many of these nodes, the likeliest first, to keep for the largest gain over the worth of their time.

        `row`: seconds of a row beside those of the target's curve.
        """
        assert self.cost is not None
        curve, more = self.cost.target, np.arange(len(likely) + 1.0)
        gains = np.append(0.0, np.cumsum(likely)) - self._tokens_per_second * (curve.at(rows + more) + row * more)
        return int(gains.argmax())

    def pass_over(self) -> bool:
        """Count a round of a rest without learning from it. False if the round must go to `update` instead."""
        if not self._idle or self._num_plain < LOOK_EVERY or (self._num_plain + 1) % LOOK_EVERY == 0:
            return False
        self._num_plain += 1
        self.budget.passed()
        return True

    def update(self, round_: Round) -> None:
        """Learn from a round: which draft tokens were accepted, and how long the round took."""
        if self.pass_over():
            return
        self.budget.passed()
        self._num_plain += self._idle
        asked_now = {s.seq_id for s, k in zip(round_.seqs, round_.num_asked, strict=True) if k}
        read = self._read_now(round_, asked_now)
        # What a drafter does for a sequence that it was not asked for in the last round is not part of a step's cost.
        reading = read > FEW_UNREAD * len(asked_now) + sum(round_.num_draft)
        catching_up, self._asked = reading or not asked_now <= self._asked, asked_now
        plain = not asked_now and round_.num_rows == len(round_.seqs)  # a pass over prompts is none
        cold = plain and self._since_plain > 0
        measured = cold and round_.times is not None and self._settled(round_.times.whole)
        self._since_plain = 0 if measured else self._since_plain + bool(asked_now)
        if asked_now:
            self._settling = 0, math.inf
            self.acceptance.rested(self.budget.now - self._drafted - 1)
            self._drafted = self.budget.now
        self.acceptance.learn_round(round_, self._nodes, self._ended)
        times = round_.times
        if reading and times is not None and self.cost is not None:
            self._caught_up(round_, read, times.draft)
        if times is not None and round_.seqs:
            seconds = times.whole
            self._unlearned += seconds
            trial = self.budget.trying is not None
            if asked_now and round_.num_rows <= len(round_.seqs) + sum(round_.num_draft):  # no prompt rows
                tokens = len(round_.seqs) + sum(round_.num_accepted)
                if trial:
                    self._tried(round_, seconds / self._plain - tokens / len(round_.seqs))
                if not catching_up:
                    self._promise[0] = FADE * self._promise[0] + tokens
                    self._promise[1] = FADE * self._promise[1] + (self._rate * seconds if self._rate else tokens)
            if self.cost is None:  # a shape as measured for 8-bit weights: each row adds 2 % of a one-row pass
                one = times.target / (1.0 + 0.02 * (round_.num_rows - 1))
                self.cost = EngineCost(Curve([(m, one * (1.0 + 0.02 * (m - 1))) for m in (1, 4, 8, 16, 64)]))
            due = self._unlearned >= LEARN_EVERY or self._num_learned < WARM_UP or self.cost.gap.seen < FIRST_GAPS
            if trial or measured or (due and not cold):  # not every round: learning takes time too
                self._unlearned = 0.0
                self._learn(round_, times, catching_up, measured)
        self._nodes, self._could_end, self._ended, self._depth, self._deciding = {}, False, False, 0, 0.0

    def _settled(self, seconds: float) -> bool:
        """Whether a plain round that took `seconds` is as fast as it would be if nobody had drafted before it."""
        count, before = self._settling
        self._settling = count + 1, seconds
        settled = seconds > NO_FASTER * before or count + 1 >= MOST_COLD
        if settled and not self._idle:
            self._held = None
        return settled

    def _tried(self, round_: Round, lost: float) -> None:
        """Report a trial's round to the budget; `lost`: the loss, in plain rounds."""
        counts = zip(round_.seqs, round_.num_asked, round_.num_accepted, strict=True)
        asked, accepted = next(((k, n) for s, k, n in counts if s.seq_id == self.budget.trying), (0, 0))
        self.budget.lost(lost, 0 < asked <= accepted)

    def _learn(self, round_: Round, times: TimeSplit, catching_up: bool, settled: bool) -> None:
        """Learn a round's costs. If its proposal could end early, by the steps it took, else by the expected steps."""
        assert self.cost is not None
        self._num_learned += 1
        if self._deciding:
            times = replace(times, schedule=max(0.0, times.schedule - self._deciding))
            round_ = replace(round_, times=times)
        steps = self._depth if self._could_end else self._steps
        draft = self._draft_cost
        self.cost.learn(round_, steps, catching_up, self._num_learned <= WARM_UP, settled, draft)
        asking = [len(seq) for seq, k in zip(round_.seqs, round_.num_asked, strict=True) if k]
        if asking and self._could_end and self._depth and not catching_up and draft is not self._chains:
            self._chains.learn(self._depth, len(asking), sum(asking) / len(asking), times.draft)

    @property
    def _draft_cost(self) -> DraftCost:
        """The cost of this round's proposal. A model's behind a lookup is kept apart: lookups are free."""
        assert self.cost is not None
        behind = self._could_end and self.drafter is not None and not self.drafter.must_read
        return self._chains if behind else self.cost.draft

    def _read_now(self, round_: Round, asked: Set[int]) -> int:
        """Tokens of texts that the drafter has read since it was last asked."""
        if self.drafter is None:
            return 0
        now = {s.seq_id: self.drafter.num_read(s) for s in round_.seqs if s.seq_id in asked}
        read = sum(max(0, n - self._read.get(i, 0)) for i, n in now.items())
        self._read.update(now)
        return read

    def _caught_up(self, round_: Round, read: int, seconds: float) -> None:
        """Learn the drafter's seconds per token of a text that it reads, from a proposal that took `seconds`."""
        assert self.cost is not None
        if any(round_.num_draft):
            asking = [len(seq) for seq, k in zip(round_.seqs, round_.num_asked, strict=True) if k]
            start, step = self._draft_cost.terms(len(asking), sum(asking) / len(asking))
            seconds -= start + step * (self._depth if self._could_end else self._steps)
        self.cost.learn_catch_up(read, seconds)

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self.acceptance.release(seq.seq_id)
        self.budget.release(seq)
        self._read.pop(seq.seq_id, None)
        self._missed.pop(seq.seq_id, None)
        if seq.num_output > 0:  # else it ended before it wrote, or while its prompt was scored
            ended = seq.num_output < seq.params.max_tokens
            self._written = [FADE * self._written[0] + ended, FADE * self._written[1] + seq.num_output]
        self._nodes.pop(seq.seq_id, None)
        self._asked.discard(seq.seq_id)
        self._drafting.discard(seq.seq_id)


POLICY = GoodputLength

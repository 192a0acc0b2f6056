"""Estimated acceptance rates of draft tokens, per request, with the rates over all requests as the prior.

Recent rounds count more than older ones. The drafter's own probabilities are calibrated. The estimated acceptance rate
of a node, given that its parent was accepted, is the observed rate of nodes with similar probability. (DSpark, 2026,
calibrates a head's probabilities in the same way.) If a drafter gives no probabilities, rates are kept by position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence as Seq
from math import log

import numpy as np
from numpy.typing import NDArray

from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Round

POSITIONS = 16  # positions in a draft with an estimate of their own; later positions share the last one
EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99, 0.999)  # of the probability bins
NUM_BINS = len(EDGES) + 1
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 2.0  # acceptance rate assumed without observations, and its weight in observations
SURE = 0.98  # upper limit of an acceptance rate that is assumed, not observed
OWN_WEIGHT = 1.5  # weight of the estimate over all requests, in observations of the request itself
DECAY = 0.92  # factor on a request's own counts per round
DECAY_OF_ALL = 0.97  # factor on the counts of all requests per request and round
HALF_LIFE = 2048  # rounds without drafts after which the counts of all requests weigh half, since texts change
KEPT = 0.25  # weight of the stored counts of all requests in the next process, whose texts may differ
MOST_TIMES = 1000.0  # most rounds that `Record.next` counts at once; older counts weigh nothing after them
_MIDDLES = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
# A token's kind is its position if its probability is unknown, else its probability bin. First tokens have own bins.
_PRIORS = [PRIOR_RATE] * POSITIONS + [0.9 * p for p in _MIDDLES] * 2


def kind(position: int, probability: float | None) -> int:
    """The index under which a token is counted, by `probability` given its parent, or by `position` if that is None."""
    if probability is None:
        return min(position, POSITIONS - 1)
    return POSITIONS + (NUM_BINS if position else 0) + bisect_right(EDGES, probability)


class Record:
    """Acceptance counts of one request, or of all requests. Older counts are weighted down by `decay` per round.

    `tries` and `hits` count, by kind, tokens whose parent was accepted, and those of them that were accepted. The other
    lists are by rank: a node's place among the nodes of its draft, the likeliest first. `asked` counts drafts in which
    the rank was asked for, `there` those that had it. `gain` sums path probabilities, and `steps` sums the depth (in
    drafting steps) of the draft up to that rank.
    """

    def __init__(self, decay: float, num_draft_tokens: int) -> None:
        self.tries, self.hits = [0.0] * len(_PRIORS), [0.0] * len(_PRIORS)
        self.asked, self.there, self.gain, self.steps = ([0.0] * num_draft_tokens for _ in range(4))
        self.was, self.said = 0.0, 0.0  # accepted tokens, and how many the priors of their kinds predicted
        self.weight = 1.0  # of new counts: it grows by 1 / decay, which is cheaper than scaling down all old counts
        self._growth = 1.0 / decay

    def next(self, times: float = 1.0) -> None:
        """Count one round, or `times` rounds, as passed."""
        self.weight *= self._growth if times == 1.0 else self._growth ** min(times, MOST_TIMES)
        if self.weight > 1e12:
            for counts in (self.tries, self.hits, self.asked, self.there, self.gain, self.steps):
                counts[:] = [c / self.weight for c in counts]
            self.was, self.said = self.was / self.weight, self.said / self.weight
            self.weight = 1.0


class Rates(dict[int, float]):
    """By kind: the acceptance rate of a request's tokens whose parent was accepted. Computed on first access."""

    def __init__(self, every: Record, own: Record | None) -> None:
        self.every = every
        self.own = own
        # If a drafter is over- or underconfident, it is so at most probabilities alike, so all priors are scaled.
        w = PRIOR_WEIGHT * every.weight
        self.scale = (every.was + w) / (every.said + w)

    def __missing__(self, of: int) -> float:
        every, own = self.every, self.own
        w = PRIOR_WEIGHT * every.weight
        prior = PRIOR_RATE
        if of >= POSITIONS:
            prior = min(_PRIORS[of] * self.scale, SURE)
        elif of:  # the prior of a position is the estimate of the position before it
            prior = self[of - 1]
        rate = (every.hits[of] + w * prior) / (every.tries[of] + w)
        if own is not None:
            w = OWN_WEIGHT * own.weight
            rate = (own.hits[of] + w * rate) / (own.tries[of] + w)
        self[of] = rate
        return rate


def likelihood(path: Seq[float], rates: Rates) -> float:
    """The calibrated probability of a chain, from the drafter's probabilities of its beginnings; NaN: unknown."""
    likely, before = 1.0, 1.0
    for depth, sure in enumerate(path):
        own = (min(1.0, sure / before) if before > 0.0 else 0.0) if sure == sure else None
        likely *= rates[kind(depth, own)]
        before = sure
    return likely


class DraftNodes:
    """The nodes of one sequence's draft: their parents, kinds and depths, and each path's estimated probability."""

    __slots__ = ("depths", "kinds", "likely", "parents")

    def __init__(self, parents: Seq[int], confidence: Seq[float] | None, rates: Rates) -> None:
        """`confidence`: the drafter's path probabilities, NaN if unknown; `likely` holds the calibrated ones."""
        self.parents = parents
        self.depths: list[int] = []
        self.kinds: list[int] = []
        self.likely: list[float] = []
        for i, parent in enumerate(parents):
            depth, before = (self.depths[parent] + 1, self.likely[parent]) if parent >= 0 else (0, 1.0)
            own: float | None = None
            if confidence is not None and confidence[i] == confidence[i]:
                path = confidence[parent] if parent >= 0 else 1.0
                own = min(1.0, confidence[i] / path) if path > 0.0 else 0.0
            of = kind(depth, own)
            self.depths.append(depth)
            self.kinds.append(of)
            self.likely.append(rates[of] * before)

    def ranked(self) -> list[int]:
        """Nodes, the likeliest first. Parents come before children: they are at least as likely, and drafted first."""
        likely = self.likely
        return sorted(range(len(likely)), key=likely.__getitem__, reverse=True)  # stable: ties stay in order

    def kept(self, keep: Seq[int]) -> DraftNodes:
        """These nodes only; `keep` is ascending and contains the parent of each node in it."""
        new = DraftNodes.__new__(DraftNodes)
        place = {old: i for i, old in enumerate(keep)}
        new.parents = [place.get(self.parents[i], -1) for i in keep]
        new.depths, new.kinds = [self.depths[i] for i in keep], [self.kinds[i] for i in keep]
        new.likely = [self.likely[i] for i in keep]
        return new


class Acceptance:
    """Acceptance estimates for one engine's drafts, by request; `num_draft_tokens`: the most nodes of a draft."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.all = Record(DECAY_OF_ALL, num_draft_tokens)
        self.own: dict[int, Record] = {}
        self.tells = False  # does the drafter give probabilities?

    def as_arrays(self) -> dict[str, NDArray[np.float64]]:
        """The counts over all requests as arrays, to be stored for another process."""
        every = self.all
        return {
            "kinds": np.array([every.tries, every.hits]) / every.weight,
            "ranks": np.array([every.asked, every.there, every.gain, every.steps]) / every.weight,
            "said": np.array([every.was, every.said]) / every.weight,
            "tells": np.array([float(self.tells)]),
        }

    def restore(self, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """Start from arrays of `as_arrays`, weighted by `KEPT`."""
        every = self.all = Record(DECAY_OF_ALL, self.num_draft_tokens)
        every.tries, every.hits = (KEPT * arrays["kinds"]).tolist()
        every.asked, every.there, every.gain, every.steps = (KEPT * arrays["ranks"]).tolist()
        every.was, every.said = (KEPT * arrays["said"]).tolist()
        self.tells = bool(arrays["tells"][0])

    def read(self, draft: Draft, seqs: Seq[Sequence]) -> dict[int, DraftNodes]:
        """The nodes of a draft with their estimated path probabilities, by request id. Empty drafts are left out."""
        if not len(draft.tokens):
            return {}
        self.tells = draft.confidence is not None
        parents = draft.parents.tolist()
        confidence = None if draft.confidence is None else draft.confidence.tolist()
        found, end = {}, 0
        for seq, count in zip(seqs, draft.counts, strict=True):
            if count:
                part = slice(end, end + count)
                sure = None if confidence is None else confidence[part]
                found[seq.seq_id] = DraftNodes(parents[part], sure, self.rates(seq.seq_id))
            end += count
        return found

    def rates(self, seq_id: int) -> Rates:
        """The acceptance rates of this request's tokens, by kind."""
        return Rates(self.all, self.own.get(seq_id))

    def offers(self, seq_id: int, count: int) -> list[tuple[float, float, float]]:
        """Expected values for each rank below `count`: accepted tokens, rows of the pass, drafting steps up to it."""
        return self._by_rank(seq_id, count) if self.tells else self._by_place(seq_id, count)

    def _by_place(self, seq_id: int, count: int) -> list[tuple[float, float, float]]:
        """`offers` of chains without probabilities: a token counts if it and all tokens before it are accepted."""
        every, rates = self.all, self.rates(seq_id)
        own, w = self.own.get(seq_id), PRIOR_WEIGHT * every.weight
        mine = own.weight * OWN_WEIGHT if own is not None else 0.0
        offers, gain, steps = [], 1.0, 0.0
        for j in range(count):
            there = (every.there[j] + w) / (every.asked[j] + w)
            if own is not None:
                there = (own.there[j] + mine * there) / (own.asked[j] + mine)
            gain *= rates[min(j, POSITIONS - 1)]
            steps += there
            offers.append((gain * there, there, steps))
        return offers

    def _by_rank(self, seq_id: int, count: int) -> list[tuple[float, float, float]]:
        """`offers` of drafts with probabilities: observed means by rank; unseen ranks continue those before them."""
        every, own = self.all, self.own.get(seq_id)
        w, mine = every.weight, own.weight * OWN_WEIGHT if own is not None else 0.0
        offers, gain, there, steps, falls = [], 1.0, 1.0, 0.0, PRIOR_RATE
        for j in range(count):
            seen, before = every.there[j], gain
            gain = (every.gain[j] + PRIOR_WEIGHT * w * before * falls) / (every.asked[j] + PRIOR_WEIGHT * w)
            there = (seen + w * there) / (every.asked[j] + w)
            deeper = (every.steps[j] + w * (steps + 1.0)) / (seen + w)
            if own is not None:
                gain = (own.gain[j] + mine * gain) / (own.asked[j] + mine)
                there = (own.there[j] + mine * there) / (own.asked[j] + mine)
                deeper = (own.steps[j] + mine * deeper) / (own.there[j] + mine)
            steps = max(steps, deeper)
            falls = min(gain / before, SURE) if before > 0.0 else PRIOR_RATE
            offers.append((gain, there, steps))
        return offers

    def rested(self, rounds: int) -> None:
        """Weight down the counts of all requests after `rounds` rounds without drafts, as texts may have changed."""
        self.all.next(rounds / HALF_LIFE * log(0.5) / log(DECAY_OF_ALL))

    def learn_round(self, round_: Round, read: Mapping[int, DraftNodes], ended: bool = False) -> None:
        """Learn from all drafts of a round; `read`: their nodes as verified, by request id.

        `ended`: the chains were ended early because one more step was not expected to pay.
        """
        for b, (seq, asked) in enumerate(zip(round_.seqs, round_.num_asked, strict=True)):
            if not asked or (seq.num_unread and not round_.num_draft[b]):
                continue
            accepted = range(round_.num_accepted[b]) if round_.nodes is None else round_.nodes[b]
            nodes = read.get(seq.seq_id)
            if not round_.num_draft[b]:
                nodes = NOTHING
            elif nodes is None or len(nodes.parents) != round_.num_draft[b]:  # not read by `trim`: a chain
                nodes = DraftNodes(range(-1, round_.num_draft[b] - 1), None, self.rates(seq.seq_id))
            self.learn(seq.seq_id, asked, nodes, accepted, ended)

    def learn(self, seq_id: int, asked: int, nodes: DraftNodes, accepted: Seq[int], ended: bool = False) -> None:
        """Learn from one draft: nodes asked for, the draft's nodes as verified, and the accepted path.

        If the chain `ended` because one more step was not expected to pay, its missing ranks are extrapolated from the
        probability at its end.
        """
        asked = min(asked, self.num_draft_tokens)  # a request may fix a larger length of its own
        own = self.own.get(seq_id)
        if own is None:
            own = self.own[seq_id] = Record(DECAY, self.num_draft_tokens)
        right = {-1, *accepted}
        outcomes = [(nodes.kinds[i], i in right) for i, parent in enumerate(nodes.parents) if parent in right]
        ranks: list[tuple[float, int]] = []
        if self.tells:
            steps = 0
            for i in nodes.ranked():
                steps = max(steps, nodes.depths[i] + 1)
                ranks.append((nodes.likely[i], steps))
            there = asked if ended and ranks else len(ranks)
            for j in range(len(ranks), there):
                last = ranks[-1][0]
                ranks.append((last * min(SURE, last ** (1 / j)), j + 1))
        else:
            there = len(nodes.parents)
        for record in (own, self.all):
            record.next()
            w = record.weight
            for of, hit in outcomes:
                record.tries[of] += w
                record.hits[of] += w * hit
                record.was += w * hit
                record.said += w * _PRIORS[of]
            for j in range(asked):
                record.asked[j] += w
            for j in range(min(there, asked)):
                record.there[j] += w
            for j, (likely, steps) in enumerate(ranks[:asked]):
                record.gain[j] += w * likely
                record.steps[j] += w * steps

    def release(self, seq_id: int) -> None:
        """Forget a request that has ended."""
        self.own.pop(seq_id, None)


NOTHING = DraftNodes((), None, Rates(Acceptance(1).all, None))

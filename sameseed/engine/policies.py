"""The length policy that a SpecConfig asks for, and policies of requests that want another one than the engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Seq

from sameseed import registry
from sameseed.config import MAX_DRAFT_TOKENS, SpecConfig
from sameseed.cost.running import EngineCost
from sameseed.cost.said import SaidTokens
from sameseed.engine.learned import LearnedTable
from sameseed.lengths.disco import DiscoLength
from sameseed.lengths.fixed import FixedLength
from sameseed.lengths.goodput import GoodputLength
from sameseed.lengths.history import HistoryLength
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, LengthPolicy, Round
from sameseed.tuned import Scope

CALIBRATING = "sameseed.engine.calibrate"  # the tenant of requests that measure: nobody asked for their outputs

log = logging.getLogger("sameseed")
Learning = DiscoLength | GoodputLength | HistoryLength
OWN: dict[str, type[Learning]] = {"disco": DiscoLength, "goodput": GoodputLength, "history": HistoryLength}


def make_policy(spec: SpecConfig) -> LengthPolicy:
    """The policy that a SpecConfig asks for."""
    if spec.method == "none":
        return FixedLength(0)
    name = "confidence" if spec.policy == "fixed" and spec.confidence is not None else spec.policy
    made: LengthPolicy = registry.load("lengths", name).POLICY.build(spec.num_draft_tokens, spec.confidence)
    return made


class RequestPolicies(LengthPolicy):
    """The engine's policy, except for requests with a policy of their own (`Speculation`) or outside the `scope`."""

    def __init__(self, default: LengthPolicy, scope: Scope = Scope(), said: SaidTokens | None = None) -> None:  # noqa: B008
        self._scope, self._said = scope, said
        self._unbounded = scope == Scope()
        self._table: LearnedTable | None = None
        self._own: dict[str, LengthPolicy] = {}  # by name: policies of requests that do not use the engine's
        self.default = default
        self._trimmed: set[int] = set()  # sequences whose whole draft was dropped in this round
        self._has_forced = False  # does a request of this round fix its draft length?

    def calibrate(self, measure: Callable[[], EngineCost], key: str | None = None) -> None:
        """Let the engine's policy measure what rounds cost; `key`: where what earlier processes learned is stored."""
        if key is None or not isinstance(self.default, GoodputLength):
            return self.default.calibrate(measure)
        self._table = LearnedTable(self.default, key)
        self._table.begin(measure)

    def follow(self, drafter: Drafter) -> None:
        """Let the engine's policy count what `drafter` reads."""
        if isinstance(self.default, GoodputLength):
            self.default.drafter = drafter

    def recovers(self, seq: Sequence, unread: int, share: float = 1.0) -> bool:
        return self.default.recovers(seq, unread, share)

    @property
    def uses_confidence(self) -> bool:
        return self.default.uses_confidence

    @property
    def least_probability(self) -> float:
        """As the engine's policy decides: all chains of a draft end by the same rule."""
        return self.default.least_probability

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        """As the engine's policy decides; False if a request of this round fixes its length, as chains end together."""
        return not self._has_forced and self.default.ends(paths)

    def lengths(
        self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None, beside: int = 0
    ) -> list[int]:
        """Lengths of all sequences. Fixed lengths come first; then each policy decides its sequences together."""
        self._trimmed.clear()
        self._has_forced = False
        if self._unbounded and not any(seq.speculation for seq in seqs):
            return self.default.lengths(seqs, num_rows, budget, beside)
        forced = [self._forced(seq) for seq in seqs]
        lengths = [k or 0 for k in forced]
        self._has_forced = any(k is not None for k in forced)
        for policy, members in self._groups(seqs):
            taken = sum(lengths)
            rows = None if num_rows is None else num_rows + taken
            left = None if budget is None else max(0, budget - taken)
            asked = policy.lengths([seqs[b] for b in members], rows, left, beside)
            for b, k in zip(members, asked, strict=True):
                own = seqs[b].speculation
                lengths[b] = k if own is None else own.of(k)
        return lengths

    def _groups(self, seqs: Seq[Sequence]) -> list[tuple[LengthPolicy, list[int]]]:
        """Each policy with the sequences for which it decides: all but those whose requests fix the length."""
        free = [(b, self._of(seq)) for b, seq in enumerate(seqs) if self._forced(seq) is None]
        groups = [(policy, [b for b, own in free if own is policy]) for policy in self._all()]
        return [(policy, members) for policy, members in groups if members]

    @property
    def trims(self) -> bool:
        return any(policy.trims for policy in self._all())

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        """The draft without the nodes that each sequence's policy drops, unless its request fixes the length."""
        for policy, free in self._groups(seqs) if len(draft.tokens) else ():
            before, draft = draft, policy.trim(draft, seqs, num_rows, free)
            if draft is not before:
                self._trimmed |= {seqs[b].seq_id for b in free if before.count(b) and not draft.count(b)}
        return draft

    def why_none(self, seq: Sequence, num_draft: int) -> str:
        """Why a sequence had no draft: "off" (none wanted), "cost" (it would not pay), or "no draft" (found)."""
        if num_draft:
            return "cost" if seq.seq_id in self._trimmed else "no draft"
        may, policy = True, self.default
        if seq.speculation is not None or not self._unbounded:
            may = self._forced(seq) is None and (seq.speculation is None or seq.speculation.of(1) > 0)
            policy = self._of(seq)
        return "cost" if may and isinstance(policy, GoodputLength) and policy.num_draft_tokens else "off"

    def _forced(self, seq: Sequence) -> int | None:
        """The draft length that the request itself fixes, or None."""
        own = seq.speculation
        if own is None or own.policy not in ("off", "fixed"):
            return None
        if own.policy == "fixed" and own.num_draft_tokens is None:
            if isinstance(self.default, Learning):
                return min(self.default.num_draft_tokens, SpecConfig().num_draft_tokens)
            return None
        return own.of(0)

    def _of(self, seq: Sequence) -> LengthPolicy:
        name = None if seq.speculation is None else seq.speculation.policy
        if seq.speculation is None and not self._scope.covers(seq.params.temperature):
            name = "goodput"
        if name not in OWN or isinstance(self.default, OWN[name]):
            return self.default
        if name not in self._own:
            if seq.speculation is None:
                log.warning("temperature %g lies outside the profile's scope; goodput decides", seq.params.temperature)
            self._own[name] = OWN[name].build(MAX_DRAFT_TOKENS)
        return self._own[name]

    def _all(self) -> list[LengthPolicy]:
        return [self.default, *self._own.values()]

    def listens(self, seqs: Seq[Sequence]) -> bool:
        """Should the drafter get the target's hidden states of this pass? See `GoodputLength.listens`."""
        goodput = self.default
        return not isinstance(goodput, GoodputLength) or any(s.speculation for s in seqs) or goodput.listens(seqs)

    def pass_over(self) -> bool:
        """Count a round without learning from it; False if it must go to `update` (see `GoodputLength.pass_over`)."""
        goodput = self.default
        if self._own or not isinstance(goodput, GoodputLength) or not goodput.pass_over():
            return False
        if self._table is not None:
            self._table.passed()
        return True

    def update(self, round_: Round) -> None:
        """Let every policy in use learn from the round."""
        for policy in self._all():
            policy.update(round_)
        if self._table is not None:
            self._table.passed()

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended; its output is counted."""
        if self._said is not None and seq.tenant != CALIBRATING:
            self._said.add(seq.token_ids[seq.num_prompt :])
        for policy in self._all():
            policy.release(seq)

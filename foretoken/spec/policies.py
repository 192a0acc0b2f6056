"""Which length policy a SpecConfig asks for, and requests that want another one than the engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from foretoken.config import MAX_DRAFT_TOKENS, SpecConfig
from foretoken.request import Sequence
from foretoken.spec.goodput import Curve, GoodputLength
from foretoken.spec.length import ConfidenceLength, FixedLength, LengthPolicy, Round


def make_policy(spec: SpecConfig, measure: Callable[[], Curve] | None = None) -> LengthPolicy:
    """The policy that a SpecConfig asks for; `measure` times passes of the target, for a policy that wants that."""
    if spec.method == "none":
        return FixedLength(0)
    if spec.policy == "goodput":
        return GoodputLength(spec.num_draft_tokens, None if measure is None else measure())
    if spec.confidence is None:
        return FixedLength(spec.num_draft_tokens)
    return ConfidenceLength(spec.num_draft_tokens, spec.confidence)


class ByRequest:
    """The engine's policy, except for requests that wish for another one (`Speculation`)."""

    def __init__(self, default: LengthPolicy) -> None:
        self.default = default
        self._goodput = default if isinstance(default, GoodputLength) else None

    def lengths(self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None) -> list[int]:
        """Lengths of all; sequences of one policy are decided together."""
        lengths = [0] * len(seqs)
        groups: dict[int, tuple[LengthPolicy, list[int]]] = {}
        for b, seq in enumerate(seqs):
            policy = self._of(seq)
            groups.setdefault(id(policy), (policy, []))[1].append(b)
        for policy, members in groups.values():
            for b, k in zip(members, policy.lengths([seqs[b] for b in members], num_rows, budget), strict=True):
                wish = seqs[b].speculation
                lengths[b] = k if wish is None else wish.of(k)
        return lengths

    def _of(self, seq: Sequence) -> LengthPolicy:
        if seq.speculation is None or seq.speculation.policy != "goodput":
            return self.default
        if self._goodput is None:
            self._goodput = GoodputLength(MAX_DRAFT_TOKENS)
        return self._goodput

    def _all(self) -> list[LengthPolicy]:
        return [self.default, *([self._goodput] if self._goodput not in (None, self.default) else [])]

    def update(self, round_: Round) -> None:
        """Every policy in use learns of the round."""
        for policy in self._all():
            policy.update(round_)

    def release(self, seq: Sequence) -> None:
        """The sequence is gone."""
        for policy in self._all():
            policy.release(seq)

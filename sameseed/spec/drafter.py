"""Drafter: base class of all drafting methods, one per file of the registry. Only `propose` must be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from sameseed import fields
from sameseed.models.block import BlockRunner
from sameseed.models.eagle import HeadRunner
from sameseed.models.runner import ModelRunner
from sameseed.request import Sequence, SpecMetrics, TimeSplit
from sameseed.spec.draft import Draft, LateDraft

Owned = Literal["", "model", "head", "target"]


class Span(NamedTuple):
    """Positions start .. end of a sequence that became certain (stored in the target's cache) in one round.

    `num_draft`: the drafter's nodes that were verified.
    """

    start: int
    end: int
    num_draft: int = 0


@dataclass(frozen=True)
class Round:
    """The outcome of one round: for each sequence the draft tokens asked for, drafted, and accepted.

    `num_rows`: rows of the target's pass; `times`: seconds of the round's stages, or None if they were not measured;
    `nodes`: the accepted path of each draft, or None if the drafts are chains.
    """

    seqs: Seq[Sequence]
    num_asked: Seq[int]
    num_draft: Seq[int]
    num_accepted: Seq[int]
    num_rows: int = 0
    times: TimeSplit | None = None
    nodes: Seq[Seq[int]] | None = None


class LengthPolicy:
    """Base of all length policies: decides draft lengths, from the rounds so far if the policy learns."""

    num_draft_tokens = 0

    @property
    def trims(self) -> bool:
        """Can `trim` ever drop nodes? Then the host must know the draft's tokens before the target's pass."""
        return False

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        """The draft, possibly with fewer nodes to verify. `num_rows`: rows of known tokens in the pass.

        `members`: indices of the sequences that may lose nodes; None: all.
        """
        return draft

    def calibrate(self, measure: Callable[[], Any]) -> None:
        """Called before the first round. A policy that uses costs gets them from `measure()`, an `EngineCost`."""

    def lengths(
        self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None, beside: int = 0
    ) -> list[int]:
        """The most tokens to draft for each sequence in the next round; 0 for no draft.

        `num_rows`: rows of known tokens in the pass; `budget`: draft tokens that fit into it; `beside`: other sequences
        in the engine, whose prompts are being read.
        """
        return [self.num_draft_tokens] * len(seqs)

    def update(self, round_: Round) -> None:
        """Learn from the outcome of a round."""

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""

    def recovers(self, seq: Sequence, unread: int, share: float = 1.0) -> bool:
        """Would drafts for `share` of a sequence's other tokens save the drafter's time for reading `unread` ones?"""
        return True

    @property
    def uses_confidence(self) -> bool:
        """Does the policy use token probabilities, so that a drafter must compute them?"""
        return False

    @property
    def least_probability(self) -> float:
        """A draft ends after a token with a lower draft probability; 0: no token ends it."""
        return 0.0

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        """Should all chains that grow together end? `paths`: for each chain, the path probability at each token."""
        return False


@dataclass(frozen=True)
class Below:
    """A drafter that works below another drafter, and the policy for its draft lengths."""

    drafter: Drafter
    policy: LengthPolicy


@dataclass(frozen=True)
class Parts:
    """What a drafter is built from: target, length policy (asked after each draft token), and the drafters below it.

    `runner`: the drafter's own model if it `owns` one, in its own cache, or in the target's if it owns "target"; it
    captures the hidden states that the drafters below need. `head`: the drafter's head if it owns "head".
    """

    target: ModelRunner
    policy: LengthPolicy
    runner: ModelRunner | None = None
    below: tuple[Below, ...] = ()
    head: HeadRunner | BlockRunner | None = None

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the target."""
        return self.target.model.config.vocab_size


class Drafter:
    """Base of all drafters."""

    @dataclass(frozen=True)
    class Options:
        """Options of one drafter; flags, JSON keys and docs rows derive from the fields. Raises as `check_ranges`."""

        def __post_init__(self) -> None:
            fields.check_ranges(self)

    owns: ClassVar[Owned] = ""  # the model of its own that `build` gets; "target": the target in another format
    inside: ClassVar[bool] = False  # is its head inside the target's checkpoint?
    num_below: ClassVar[tuple[int, int]] = (0, 0)  # the fewest and the most drafters below it
    at_once: ClassVar[bool] = False  # does its model write a whole draft in one pass?
    judges: ClassVar[bool] = False  # does it compute token probabilities, so that `confidence` can end its drafts?
    must_read = False  # must a model of its own read a text before there is a draft? A lookup needs none
    branches = False  # may its drafts be trees? Then num_draft counts nodes, and a text's length limits the depth only
    captures: tuple[int, ...] = ()  # target layers whose hidden states `observe` needs

    def __init__(self, options: Any = None) -> None:
        """`options` are the class's own Options, or None for the defaults."""

    @classmethod
    def branches_with(cls, options: Options) -> bool:
        """May drafts be trees with these options? For use before it is built; drafters asked in turn count too."""
        return cls.branches

    @classmethod
    def build(cls, options: Options, parts: Parts) -> Drafter:
        """A drafter for a target: `cls(options, parts)` if it owns a model or has others below, else `cls(options)`."""
        return cls(options, parts) if cls.owns or cls.num_below[1] else cls(options)  # type: ignore[call-arg]

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft | LateDraft:
        """Draft 0 to num_draft[b] tokens (nodes) for each sequence. Nodes deeper than `seq.draft_depth` are dropped."""
        raise NotImplementedError

    def ahead(
        self, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int], going: Callable[[], bool]
    ) -> list[list[int]]:
        """Draft further after `draft`, made for num_draft[b] tokens, while the target verifies it in another thread.

        Returns the tokens after each sequence's draft; empty if there are none. No pass begins once `going()` is
        false. Only the drafter's own state may be used: not the target's cache, and of `seqs`, which grow, only ids.
        """
        return [[] for _ in seqs]

    def observe(self, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor | None) -> None:
        """Take over what became certain: one span per sequence, hidden float32 [sum of spans, len(captures) * C]."""

    def rewind(self, seq: Sequence, length: int) -> None:
        """Called before tokens of `seq` from `length` on are taken back (in a cascade they were only drafted)."""

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""

    def num_read(self, seq: Sequence) -> int:
        """Tokens of a sequence that models of its own have read."""
        return 0

    @property
    def limit(self) -> int | None:
        """The context limit: no drafts for sequences of this many tokens or more. None: no limit."""
        return None

    @property
    def name(self) -> str:
        """The drafter's name, which is the name of its file."""
        return type(self).__module__.rsplit(".", 1)[-1]

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels that may draft tokens of its drafts (see `Draft.levels`), the lowest level first."""
        return (self.name,)

    def counted(self) -> list[tuple[Drafter, SpecMetrics]]:
        """Drafters below with acceptance counters of their own, the lowest first, each with its counters."""
        return []


class NoDrafter(Drafter):
    """Plain decoding: speculation with an empty draft."""

    level_names = ()

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        return Draft.empty(len(seqs))


def goes_ahead(drafter: type[Drafter]) -> bool:
    """Can this drafter draft further while the target verifies (`ahead`)?"""
    return drafter.ahead is not Drafter.ahead


def level_metrics(drafter: Drafter) -> list[tuple[str, SpecMetrics]]:
    """Acceptance counters of the drafters below `drafter`, by name, e.g. "level 1: ngram"."""
    return [(f"level {i}: {d.name}", metrics) for i, (d, metrics) in enumerate(drafter.counted(), 1)]

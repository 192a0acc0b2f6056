"""Drafter: a way to guess. One file of the registry derives from it; `propose` is all that must be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from sameseed import fields
from sameseed.models.block_runner import BlockRunner
from sameseed.models.eagle_runner import HeadRunner
from sameseed.models.runner import ModelRunner
from sameseed.request import Sequence, SpecMetrics, TimeSplit
from sameseed.spec.draft import Draft

Owned = Literal["", "model", "head", "target"]


class Span(NamedTuple):
    """Positions start .. end of a sequence that became certain (stored in the target's cache) in one round.

    `num_draft`: nodes of its draft that were checked: what the drafter gave, less what was dropped before.
    """

    start: int
    end: int
    num_draft: int = 0


@dataclass(frozen=True)
class Round:
    """What one pass brought: for each sequence the draft tokens that were asked for, guessed, and right.

    `num_rows`: of the target's pass; `times`: seconds of its stages, or None where nobody looked;
    `nodes`: the accepted path of each, or None where drafts are chains.
    """

    seqs: Seq[Sequence]
    num_asked: Seq[int]
    num_draft: Seq[int]
    num_accepted: Seq[int]
    num_rows: int = 0
    times: TimeSplit | None = None
    nodes: Seq[Seq[int]] | None = None


class Trims(Protocol):
    """Who may drop nodes of a draft before it is checked."""

    @property
    def trims(self) -> bool:
        """Does it ever, so that a draft must be known before?"""

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        """The draft, maybe with fewer nodes. `num_rows`: of known tokens in the pass.

        Only drafts of `members` (indices of sequences; None: of all) may lose nodes.
        """


class LengthPolicy(Trims, Protocol):
    """Decides draft lengths from what happened so far."""

    def calibrate(self, measure: Callable[[], Any]) -> None:
        """Before the first round: `measure()` tells what rounds cost (`lengths._cost.EngineCost`), if it is wanted."""

    def lengths(self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None) -> list[int]:
        """The most tokens to draft for each sequence in the next round; 0 for none.

        `num_rows`: of known tokens in the pass, of all its sequences; `budget`: draft tokens that it has room for.
        """

    def update(self, round_: Round) -> None:
        """What the round brought."""

    def release(self, seq: Sequence) -> None:
        """The sequence is gone: forget it."""

    @property
    def uses_confidence(self) -> bool:
        """Does `stop` look at the probability (so that a drafter must compute it)?"""

    def stop(self, confidence: float) -> bool:
        """Should a draft end after a token to which the drafter gave this probability?"""

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        """Should chains that grow together all end? `paths`: of each, its probability up to each of its tokens."""


@dataclass(frozen=True)
class Below:
    """A drafter that another one works with, and the policy of its lengths."""

    drafter: Drafter
    policy: LengthPolicy


@dataclass(frozen=True)
class Parts:
    """What a drafter is made of: the target, its length policy, its own model if it `owns` one, the drafters below it.

    The policy is asked after each guessed token (`policy.stop`). `runner`: its own model with a cache of its own, or in
    the target's cache where it owns "target"; it captures what the drafters below want. `head`: where it owns "head".
    """

    target: ModelRunner
    policy: LengthPolicy
    runner: ModelRunner | None = None
    below: tuple[Below, ...] = ()
    head: HeadRunner | BlockRunner | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return self.target.model.config.vocab_size


class Drafter:
    """Base of all drafters."""

    @dataclass(frozen=True)
    class Options:
        """Knobs of one drafter; flags, JSON keys and docs rows derive from the fields."""

    owns: ClassVar[Owned] = ""  # the model of its own that `build` gets; "target": the target in another format
    num_below: ClassVar[tuple[int, int]] = (0, 0)  # the fewest and the most drafters that it works with
    text: ClassVar[str] = (
        ""  # what also means it in --draft: "MODEL", "HEAD", "BLOCK", "PARALLEL", "A > MODEL", "A + B"
    )
    cuttable = False  # is a draft of k tokens the k first (of a tree: likeliest) of a longer one?
    at_once: ClassVar[bool] = False  # does its model guess a whole draft in one pass?
    judges: ClassVar[bool] = False  # does it know how likely its tokens are, so that `confidence` can end its drafts?
    branches = False  # may its drafts be trees? Then num_draft counts nodes, and only their depth is a text's concern
    captures: tuple[int, ...] = ()  # target layers whose hidden states `observe` wants

    def __init__(self, options: Any = None) -> None:
        """`options` are the class's own Options, or None for the defaults."""

    @classmethod
    def branches_with(cls, options: Options) -> bool:
        """May its drafts be trees with these options? Asked before it is built; then `branches` says the same.

        Where the drafters below guess for it in turn, theirs count as well.
        """
        return cls.branches

    @classmethod
    def build(cls, options: Options, parts: Parts) -> Drafter:
        """One for a target, of what the engine has prepared for it."""
        return cls(options)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Guess at most num_draft[b] tokens (nodes) for each sequence; fewer, or none, is always allowed.

        Nodes deeper than `seq.draft_depth` are of no use: they are dropped.
        """
        raise NotImplementedError

    def ahead(
        self, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int], going: Callable[[], bool]
    ) -> list[list[int]]:
        """Guess on after `draft`, which was for num_draft[b] tokens, while the target checks it in another thread.

        Returns for each sequence the tokens after its draft, none where that is unknown. Begins no pass once `going()`
        is false. Must keep to what is its own: no target's cache, and of the sequences, which grow, only their ids.
        """
        return [[] for _ in seqs]

    def observe(self, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor | None) -> None:
        """Learn what became certain: a span per sequence, hidden float32 [sum of spans, len(captures) * C]."""

    def rewind(self, seq: Sequence, length: int) -> None:
        """Tokens of `seq` from `length` on are about to be taken back (in a cascade they were only guessed)."""

    def release(self, seq: Sequence) -> None:
        """The sequence is gone: forget it."""

    @property
    def limit(self) -> int | None:
        """Its own context: it does not draft for sequences of this many tokens or more. None: no such end."""
        return None

    @property
    def name(self) -> str:
        """Its name: that of its file."""
        return type(self).__module__.rsplit(".", 1)[-1]

    @property
    def level_names(self) -> tuple[str, ...]:
        """Those that may have guessed a token of its drafts (`Draft.levels`), the lowest level first."""
        return (self.name,)

    def counted(self) -> list[tuple[Drafter, SpecMetrics]]:
        """Drafters below whose guesses are counted apart, the lowest first, with what was made of their guesses."""
        return []


class NoDrafter(Drafter):
    """Plain decoding: speculation with an empty draft."""

    level_names = ()

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        return Draft.empty(len(seqs))


def parse_options(drafter: type[Drafter], options: Mapping[str, object]) -> Drafter.Options:
    """The drafter's Options from plain data. Raises ConfigError: unknown key (with the nearest), wrong type."""
    return fields.parse(drafter.Options, options)


def goes_ahead(drafter: type[Drafter]) -> bool:
    """Can it guess on while the target checks (`ahead`)?"""
    return drafter.ahead is not Drafter.ahead


def level_metrics(drafter: Drafter) -> list[tuple[str, SpecMetrics]]:
    """What was made of the guesses of the drafters below one, by name: "level 1: ngram"."""
    return [(f"level {i}: {d.name}", metrics) for i, (d, metrics) in enumerate(drafter.counted(), 1)]

"""decode_step: draft, verify, commit. The same step serves the engine and every level of a cascade."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.runner import ModelRunner
from sameseed.request import Sequence, TimeSplit
from sameseed.spec.draft import Draft, LateDraft
from sameseed.spec.drafter import Drafter, LengthPolicy, Span
from sameseed.spec.sampling import drawer
from sameseed.spec.verify import Verified, verify

log = logging.getLogger("sameseed")
Made = TypeVar("Made", Draft, Draft | LateDraft)


class NoOverlap:
    """No overlap: the drafter waits while the target verifies."""

    @contextmanager
    def beside(
        self, drafter: Drafter, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int]
    ) -> Iterator[Callable[[], None]]:
        """Context in which the drafter may draft ahead; once the yielded function is called, it begins no further pass.

        The drafter has stopped when the context ends. Sequences may grow inside, as the drafter uses only their ids.
        """
        yield lambda: None

    def outcome(self, b: int, draft: Draft, result: Verified) -> bool | None:
        """Whether the tokens drafted ahead for sequence b in this round are usable; None if there were none."""
        return None


NO_OVERLAP = NoOverlap()


def decode_step(
    runner: ModelRunner,
    drafter: Drafter,
    seqs: Seq[Sequence],
    num_pending: Seq[int],
    num_draft: Seq[int],
    times: TimeSplit | None = None,
    policy: LengthPolicy | None = None,
    ahead: NoOverlap = NO_OVERLAP,
    captured: bool = True,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Draft, Verified]:
    """Advance `seqs` by one pass of the model: num_pending[b] known tokens and at most num_draft[b] draft tokens each.

    Appends the decided tokens to the sequences, and adds the seconds of each stage to `times` (drafting counts as time
    of the pass if the host reads the draft after it). `policy` may drop draft nodes before the pass. `ahead`: what the
    drafter does while the pass runs. `captured` false: the drafter gets no hidden states. `meanwhile` is called before
    the host waits for the pass.
    """
    clock = time.perf_counter
    start = clock()
    eos = runner.model.config.eos_token_ids
    asked = [0 if seq.num_scripted else k for seq, k in zip(seqs, num_draft, strict=True)]
    own = Draft.empty(len(seqs))  # until the pass, if it is not read before
    proposed = _guarded(lambda: drafter.propose(seqs, asked), len(seqs)) if any(asked) else own
    unread = _unread(proposed, runner, seqs, policy, ahead)
    if unread is None:
        vocab_size = runner.model.config.vocab_size
        own = _guarded(lambda: _checked(proposed.read(), asked, vocab_size), len(seqs))
        if any(asked):
            own = _guarded(lambda: _useful(own, seqs, asked, eos), len(seqs))
        if runner.cache.states is not None and len(own.tokens):  # a recurrent state follows one path
            own = _guarded(own.likeliest_chains, len(seqs))
        if policy is not None and len(own.tokens):
            own = policy.trim(own, seqs, sum(num_pending))
        draft = _with_scripts(own, seqs, num_draft)
    drafted = clock()
    with ahead.beside(drafter, seqs, own, asked) as end_ahead:
        nodes = draft if unread is None else unread.nodes
        out = runner.forward(seqs, nodes, num_pending, captured, drawer, meanwhile)
        if unread is not None:  # its tokens are read together with the pass's choices: the host waits once
            numbers, out = out.read_with(unread.drawn.numbers)
            own = draft = _guarded(lambda: _useful(unread.settle(numbers), seqs, asked, eos), len(seqs))
            out = out.narrowed(unread.counts, own.counts)
        end_ahead()
        checked = clock()
        result = verify(draft, out.logits, seqs, out.wants_logits, eos, out.choices)
        starts = [seq.num_cached for seq in seqs]
        hidden = runner.commit(seqs, num_pending, result.nodes, out)
        for seq, tokens in zip(seqs, result.tokens, strict=True):
            seq.token_ids += tokens
        verified = clock()
    spans = [Span(s, seq.num_cached, n) for s, seq, n in zip(starts, seqs, own.counts, strict=True)]
    _observe(drafter, seqs, spans, hidden)
    if times is not None:
        times.draft += drafted - start + clock() - verified
        times.target += checked - drafted
        times.verify += verified - checked
    return draft, result


def _guarded(make: Callable[[], Made], num_seqs: int) -> Made | Draft:
    """The draft from `make()`, or an empty one if it raises: a failing drafter costs speed, but never the text."""
    try:
        return make()
    except Exception:
        log.exception("the drafter failed; this round goes without drafts")
        return Draft.empty(num_seqs)


def _checked(draft: Draft, num_draft: Seq[int], vocab_size: int) -> Draft:
    """The draft, maybe of a user's own drafter. Raises ConfigError if it is not as it was asked for."""
    if draft.num_seqs != len(num_draft) or any(n > k for n, k in zip(draft.counts, num_draft, strict=True)):
        raise ConfigError("a draft needs an entry for each sequence, and at most as many tokens as it was asked for")
    if len(draft.tokens) and not 0 <= draft.tokens.min() <= draft.tokens.max() < vocab_size:
        raise ConfigError(f"a draft has tokens outside the target's vocabulary of {vocab_size}")
    return draft


def _useful(draft: Draft, seqs: Seq[Sequence], num_draft: Seq[int], eos: Seq[int]) -> Draft:
    """The draft without nodes beyond the end of each text: its length limit, or a token that ends it."""
    depths, ending = [seq.draft_depth for seq in seqs], [seq.params.ending(eos) for seq in seqs]
    fits = all(k <= depth for k, depth in zip(num_draft, depths, strict=True))
    if fits and frozenset[int]().union(*ending).isdisjoint(draft.tokens.tolist()):
        return draft
    return draft.useful(depths, ending)


def _unread(
    draft: Draft | LateDraft, runner: ModelRunner, seqs: Seq[Sequence], policy: LengthPolicy | None, ahead: NoOverlap
) -> LateDraft | None:
    """The draft if it can be verified before the host has read it; None if something must look at its tokens first."""
    if isinstance(draft, Draft) or not runner.takes_late or ahead is not NO_OVERLAP:
        return None
    looks = (policy is not None and policy.trims) or any(seq.num_scripted for seq in seqs)
    return None if looks else draft


def _observe(drafter: Drafter, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor | None) -> None:
    """Tell the drafter what became certain. If the drafter fails, it forgets these sequences."""
    try:
        drafter.observe(seqs, spans, hidden)
    except Exception:
        log.exception("the drafter failed; it starts anew with these sequences")
        for seq in seqs:
            forget(drafter, seq)


def forget(drafter: Drafter, seq: Sequence) -> None:
    """Tell the drafter that a sequence has ended. What it raises is logged."""
    try:
        drafter.release(seq)
    except Exception:
        log.exception("the drafter failed to forget a sequence")


def _with_scripts(draft: Draft, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
    """The draft, in which sequences with scripted tokens (decided already) get these as their draft."""
    if not any(seq.num_scripted for seq in seqs):
        return draft
    trees: list[tuple[Seq[int], Seq[int]]] = [draft.nodes(b) for b in range(len(seqs))]
    levels = [draft.node_levels(b) for b in range(len(seqs))]
    for b, seq in enumerate(seqs):
        if seq.num_scripted:
            trees[b] = (seq.script[len(seq) : len(seq) + num_draft[b]], range(-1, num_draft[b] - 1))
            levels[b] = [0] * len(trees[b][0])
    return Draft.trees(trees, levels=levels)

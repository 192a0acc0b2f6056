"""decode_step: guess, check, keep. The one loop body, for the engine and for every level of a cascade."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq

from foretoken.models.runner import ModelRunner
from foretoken.request import Sequence, TimeSplit
from foretoken.spec.draft import Draft
from foretoken.spec.drafter import Drafter, Span
from foretoken.spec.verify import Verified, verify

log = logging.getLogger("foretoken")


def decode_step(
    runner: ModelRunner,
    drafter: Drafter,
    seqs: Seq[Sequence],
    num_pending: Seq[int],
    num_draft: Seq[int],
    times: TimeSplit | None = None,
) -> tuple[Draft, Verified]:
    """Advance `seqs` by one pass of the model: num_pending[b] known tokens and at most num_draft[b] guesses each.

    Appends the decided tokens to the sequences. `times`, if given, is increased by the seconds of each stage.
    """
    clock = time.perf_counter
    start = clock()
    draft = _propose(drafter, seqs, num_draft)
    drafted = clock()
    out = runner.forward(seqs, draft, num_pending)
    checked = clock()
    result = verify(draft, out.logits, seqs, out.wants_logits, runner.model.config.eos_token_ids)
    starts = [seq.num_cached for seq in seqs]
    hidden = runner.commit(seqs, num_pending, result.nodes, out)
    for seq, tokens in zip(seqs, result.tokens, strict=True):
        seq.token_ids += tokens
    verified = clock()
    try:
        drafter.observe(seqs, [Span(s, seq.num_cached) for s, seq in zip(starts, seqs, strict=True)], hidden)
    except Exception:
        log.exception("the drafter failed; it starts anew with these sequences")
        for seq in seqs:
            drafter.release(seq)
    if times is not None:
        times.draft += drafted - start + clock() - verified
        times.target += checked - drafted
        times.verify += verified - checked
    return draft, result


def _propose(drafter: Drafter, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
    """The drafter's guesses; a sequence whose next tokens are decided already is drafted by its script.

    A drafter that fails costs speed, never the text.
    """
    scripted = [seq.num_scripted > 0 for seq in seqs]
    asked = [0 if known else k for known, k in zip(scripted, num_draft, strict=True)]
    draft = Draft.empty(len(seqs))
    if any(asked):
        try:
            draft = drafter.propose(seqs, asked)
        except Exception:
            log.exception("the drafter failed; this round goes without drafts")
    if not any(scripted):
        return draft
    trees: list[tuple[Seq[int], Seq[int]]] = [draft.nodes(b) for b in range(len(seqs))]
    for b, seq in enumerate(seqs):
        if scripted[b]:
            trees[b] = (seq.script[len(seq) : len(seq) + num_draft[b]], range(-1, num_draft[b] - 1))
    return Draft.trees(trees)

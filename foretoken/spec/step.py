"""decode_step: guess, check, keep. The one loop body, for the engine and for every level of a cascade."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from foretoken.models.runner import ModelRunner
from foretoken.request import Sequence, TimeSplit
from foretoken.spec.ahead import NOT_AHEAD, NotAhead
from foretoken.spec.draft import Draft
from foretoken.spec.drafter import Drafter, Span
from foretoken.spec.length import Trims
from foretoken.spec.verify import Verified, verify


def decode_step(
    runner: ModelRunner,
    drafter: Drafter,
    seqs: Seq[Sequence],
    num_pending: Seq[int],
    num_draft: Seq[int],
    times: TimeSplit | None = None,
    policy: Trims | None = None,
    ahead: NotAhead = NOT_AHEAD,
) -> tuple[Draft, Verified]:
    """Advance `seqs` by one pass of the model: num_pending[b] known tokens and at most num_draft[b] guesses each.

    Appends the decided tokens to the sequences. `times`, if given, is increased by the seconds of each stage; `policy`,
    if given, may drop nodes of the draft before they are checked; `ahead`: what the drafter does while the model's
    pass runs. A draft's paths end where a sequence must.
    """
    clock = time.perf_counter
    start = clock()
    draft = drafter.propose(seqs, num_draft) if any(num_draft) else Draft.empty(len(seqs))
    depths = [seq.draft_depth for seq in seqs]
    if any(k > depth for k, depth in zip(num_draft, depths, strict=True)):
        draft = draft.shallow(depths)
    if policy is not None:
        draft = policy.trim(draft, seqs, sum(num_pending))
    drafted = clock()
    with ahead.beside(drafter, seqs, draft, num_draft) as end_ahead:
        out = runner.forward(seqs, draft, num_pending)
        end_ahead()
        checked = clock()
        result = verify(draft, out.logits, seqs, out.wants_logits, runner.model.config.eos_token_ids)
        starts = [seq.num_cached for seq in seqs]
        hidden = runner.commit(seqs, num_pending, result.nodes, out)
        for seq, tokens in zip(seqs, result.tokens, strict=True):
            seq.token_ids += tokens
        verified = clock()
    spans = [Span(s, seq.num_cached, draft.count(b)) for b, (s, seq) in enumerate(zip(starts, seqs, strict=True))]
    drafter.observe(seqs, spans, hidden)
    if times is not None:
        times.draft += drafted - start + clock() - verified
        times.target += checked - drafted
        times.verify += verified - checked
    return draft, result

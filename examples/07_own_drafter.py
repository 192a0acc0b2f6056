"""A drafter of one's own: it guesses that the last few tokens come again. Wrong guesses cost time, never the text."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sameseed import LLM, SamplingParams
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter


class EchoDrafter(Drafter):
    """Guesses the last four tokens again."""

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        return Draft.chains([seq.token_ids[-4:][:k] for seq, k in zip(seqs, num_draft)])


expected = LLM("embedded").generate("1, 2, 1, 2, 1,", SamplingParams(max_tokens=40))[0]

# A file sameseed/drafters/echo.py with DRAFTER = EchoDrafter would make it `--draft echo`.
llm = LLM("embedded", draft=EchoDrafter, num_draft_tokens=4)
completion = llm.generate("1, 2, 1, 2, 1,", SamplingParams(max_tokens=40))[0]
assert completion.text == expected.text
spec = completion.metrics.spec
print(f"{completion.text!r}\n{spec.num_accepted_tokens} of {spec.num_draft_tokens} guesses were right")

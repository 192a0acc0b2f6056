"""The oracle promise: a textbook decoder in NumPy, with the same weights, checks the server's greedy texts."""

from __future__ import annotations

from collections.abc import Iterator

from sameseed_verify import VerifyError
from sameseed_verify.inquiry import Evidence, Inquiry, promise
from sameseed_verify.reading import ServedText
from sameseed_verify.weights import Read, Verdict, Weights

STRANGER = 0.9  # if a smaller share of tokens is (nearly) the textbook's choice, the weights are another model's
AT_ONCE = 4  # texts that the textbook decoder reads together
FOLDER, ANOTHER = "the folder of --model", "it holds another model; give the one that is served"


def judge(inquiry: Inquiry, heard: list[tuple[int, ServedText]]) -> Iterator[tuple[str, int, int, bool, bool]]:
    """For each token of each distinct text: (prompt id, index, token, is the textbook's choice, is near the choice)."""
    weights = inquiry.weights
    assert weights is not None
    texts: dict[Read, int] = {}
    for index, answer in heard:
        if (both := weights.tokens(inquiry.prompts[index], inquiry.chat, answer)) is not None:
            texts.setdefault(both, index)
    new = [both for both in texts if both not in weights.judged]
    for start in range(0, len(new), AT_ONCE):
        _read(weights, new[start : start + AT_ONCE])
    for both, index in texts.items():
        for at, verdict in enumerate(weights.judged[both]):
            yield inquiry.prompts[index].id, at, *verdict


def _read(weights: Weights, some: list[Read]) -> None:
    """Judge texts with the textbook decoder. Raises VerifyError for tokens outside the model's vocabulary."""
    import numpy as np

    from sameseed.laws import textbook
    from sameseed.request import SamplingParams

    size, greedy = weights.model.config.vocab_size, SamplingParams(ignore_eos=True)
    if (largest := max(t for both in some for part in both for t in part)) >= size:
        raise VerifyError(f"the server has a token {largest}, and {FOLDER} {size} tokens: {ANOTHER}")
    logits = textbook.forward(weights.model, [(*prompt, *tokens) for prompt, tokens in some], weights.kv_format)
    for (prompt, tokens), rows in zip(some, logits, strict=True):
        near, found = weights.share * float(np.abs(rows).max()), list[Verdict]()
        for at, token in enumerate(tokens):
            row = rows[len(prompt) + at - 1]
            found.append((token, *textbook.judge(row, greedy, 0, prompt, tokens[:at], token, (), near)))
        weights.judged[prompt, tokens] = found


def acquaint(inquiry: Inquiry) -> None:
    """Check that the server has the same weights. Raises VerifyError if it cannot."""
    weights = inquiry.weights
    assert weights is not None
    for prompt, answer in zip(inquiry.prompts, inquiry.alone, strict=True):
        own = weights.encode(prompt, inquiry.chat)
        if answer.prompt_token_ids and answer.prompt_token_ids != own:
            raise VerifyError(f"{FOLDER} makes other tokens of prompt {prompt.id} than the server: {ANOTHER}")
        if answer.num_prompt not in (None, len(own)):
            told = f"{len(own)} tokens of prompt {prompt.id}, the server {answer.num_prompt}"
            raise VerifyError(f"{FOLDER} makes {told}: {ANOTHER}")
    some = [(i, a) for i, a in enumerate(inquiry.alone) if a.error is None]
    close = [is_close for *_, is_close in judge(inquiry, some)]
    if close and sum(close) < STRANGER * len(close):
        raise VerifyError(
            f"of {len(close)} tokens that the server wrote, {sum(close)} are what {FOLDER} would choose: {ANOTHER}, or "
            "its numbers in another --format"
        )


@promise("oracle", "the weights' own text")
async def oracle(inquiry: Inquiry, evidence: Evidence) -> None:
    """Greedy texts are those of a textbook decoder with these weights."""
    assert inquiry.weights is not None
    heard = [*((i, a) for i, a in enumerate(inquiry.alone) if a.error is None), *inquiry.heard]
    shown: set[str] = set()
    at = 0
    for where, number, token, exact, close in judge(inquiry, heard):
        at = 0 if number == 0 else at
        evidence.tokens += 1
        shown.add(where)
        evidence.count("near_ties", close and not exact)
        if not close:
            piece = inquiry.weights.tokenizer.decode([token])
            evidence.differ(f"{where}, token {number}", at, "the textbook's choice", f"token {token}, {piece!r}")
        at += len(inquiry.weights.tokenizer.decode([token]))
    evidence.compared = len(shown)
    evidence.notes.append(f"up to {inquiry.weights.share:g} of the largest logit from the choice is a near tie")
    if heard and not evidence.compared:
        evidence.missing = "the server names no token ids, and its texts do not tell which they were"

"""The promise about log-probabilities: they belong to the text, its tokens are the likeliest, sums are at most 1.

Docstrings of promises are their statements in reports.
"""

from __future__ import annotations

import math
from typing import Any

from sameseed_verify.ask import ScoredToken, ServedText, ServerQuestion
from sameseed_verify.inquiry import Evidence, Inquiry, promise

NUM_TOP = 5
TIE = 1e-4  # tolerance in log-probability: a token this close to the likeliest counts as equally likely
SUM = 1e-3  # tolerance by which a sum of probabilities may exceed 1
DRIFT = 0.05  # tolerated mean difference per token between generating a text and scoring it as a prompt
FAR = 0.5  # tolerated difference of one token's log-probability, generated in a text and requested alone
MOST_SCORED = 4  # texts that are scored as prompts
UNREADABLE = ("\ufffd", "bytes:", "<0x")  # marks of tokens that hold parts of characters, whose text is not exact


def wanted(chat: bool) -> dict[str, Any]:
    """The request fields that ask for log-probabilities."""
    return {"logprobs": True, "top_logprobs": NUM_TOP} if chat else {"logprobs": NUM_TOP}


@promise("logprobs", "log-probabilities")
async def logprobs(inquiry: Inquiry, evidence: Evidence) -> None:
    """Log-probabilities are those of the text: its tokens the likeliest, sums at most 1, the same when it is scored."""
    for i, prompt in enumerate(inquiry.prompts):
        answer = await inquiry.asker.ask(inquiry.question(i, stream=False, fields=wanted(inquiry.chat)))
        if i == 0 and (answer.refused or (answer.error is None and not answer.scored)):
            why = f" ({answer.detail})" if answer.refused else ": its answers have none"
            evidence.missing = f"the server gives no log-probabilities{why}"
            return
        inquiry.scored.append(answer)
        if answer.error is None:
            inquiry.compare(evidence, "with log-probabilities", i, answer)
            spelled(evidence, prompt.id, answer)
            at = 0
            for number, token in enumerate(answer.scored):
                likeliest(evidence, f"{prompt.id}, token {number}", at, token)
                at += len(token.token)
        else:
            evidence.failed += 1
    if not any(len(token.top) > 1 for answer in inquiry.scored for token in answer.scored):
        evidence.missing = "the server names no other likely tokens (top_logprobs)"
    else:
        await _ask_at(inquiry, evidence)
    await _score(inquiry, evidence)


def spelled(evidence: Evidence, where: str, answer: ServedText) -> None:
    """Check that the tokens' texts join to the answer's text. A final stop token and outer whitespace are ignored.

    Not checked where marks of thoughts, or parts of characters, are among the tokens.
    """
    pieces = [token.token for token in answer.scored]
    if answer.has_thoughts or any(mark in piece for piece in pieces for mark in UNREADABLE):
        return
    said = {"".join(pieces).strip()}
    if answer.finish_reason == "stop":
        said.add("".join(pieces[:-1]).strip())
    if answer.text.strip() not in said:
        evidence.differ(f"{where}: tokens that have log-probabilities", 0, answer.text, "".join(pieces))


def likeliest(evidence: Evidence, where: str, at: int, token: ScoredToken) -> None:
    """Check that the chosen token is the likeliest, and that the probabilities sum to at most 1."""
    if token.logprob is None:
        return
    values = dict(token.top) | {token.token: token.logprob}
    if any(not name or any(mark in name for mark in UNREADABLE) for name in values):
        return  # different tokens may share such a name
    best, best_value = max(token.top, key=lambda t: t[1], default=(token.token, token.logprob))
    evidence.count("log_probabilities")
    if token.logprob < best_value - TIE:
        evidence.differ(
            f"{where}: not the likeliest", at, f"{best!r} {best_value:g}", f"{token.token!r} {token.logprob:g}"
        )
    elif token.logprob < best_value:
        evidence.count("ties")
    whole = sum(math.exp(min(v, 1.0)) for v in values.values())
    if not whole <= 1 + SUM:
        evidence.differ(f"{where}: probabilities of {len(values)} tokens", at, "a sum of at most 1", f"{whole:g}")


async def _ask_at(inquiry: Inquiry, evidence: Evidence) -> None:
    """Check tokens reported without alternatives: requested alone after the same text, their log-probability agrees.

    llama-server, for example, reports 0 for tokens that came from a draft.
    """
    bare = [(i, at) for i, a in enumerate(inquiry.scored) for at, t in enumerate(a.scored) if at and len(t.top) < 2]
    if not bare:
        return
    evidence.numbers["tokens_without_alternatives"] = len(bare)
    for i, at in bare[:: -(-len(bare) // MOST_SCORED)] if not inquiry.chat else ():
        before, told = inquiry.scored[i].scored[:at], inquiry.scored[i].scored[at]
        text = inquiry.prompts[i].said + "".join(token.token for token in before)
        question = ServerQuestion({"prompt": text}, 1, stream=False, fields=wanted(chat=False))
        found = next(iter((await inquiry.asker.ask(question)).scored), None)
        values = {} if found is None else dict(found.top)
        value = values.get(told.token)
        if value is not None and told.logprob is not None and not abs(value - told.logprob) <= FAR:
            where = f"{inquiry.prompts[i].id}, token {at}: log-probability of {told.token!r}"
            evidence.differ(
                where, sum(len(t.token) for t in before), f"{value:.3f}, asked for alone", f"{told.logprob:g}"
            )


async def _score(inquiry: Inquiry, evidence: Evidence) -> None:
    """Check that texts scored as prompts (`echo`) have nearly the log-probabilities with which they were generated."""
    known = [a for a in inquiry.scored if a.error is None and a.token_ids and a.prompt_token_ids][:MOST_SCORED]
    for number, written in enumerate(known):
        ids, count = [*written.prompt_token_ids, *written.token_ids], len(written.token_ids)
        asked = {"echo": True, "logprobs": 1}
        answer = await inquiry.asker.ask(ServerQuestion({"prompt": ids}, 1, stream=False, fields=asked))
        mine = [t.logprob for t in written.scored]
        told = [t.logprob for t in answer.scored[len(written.prompt_token_ids) : len(ids)]]
        if answer.error is not None or not len(told) == len(mine) == count or None in told or None in mine:
            evidence.notes.append("texts could not be scored as prompts (echo)")
            return
        drift = sum(a - b for a, b in zip(mine, told, strict=True) if a is not None and b is not None) / count
        evidence.numbers["largest_drift"] = max(evidence.numbers.get("largest_drift", 0.0), abs(drift))
        evidence.count("texts_scored")
        if not abs(drift) <= DRIFT:
            says = f"{sum(m or 0 for m in mine):.3f}", f"{sum(t or 0 for t in told):.3f}"
            evidence.differ(f"text {number + 1} scored as a prompt: sum of {count} log-probabilities", 0, *says)

"""Two promises about likelihoods: log-probabilities belong to the text, and near ties are decided the same way."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from sameseed_verify.ask import ScoredToken, ServedText, ServerQuestion
from sameseed_verify.inquiry import LEAST_TEXTS, Evidence, Inquiry

NUM_TOP = 5
TIE = 1e-4  # tolerance in log-probability: a token this close to the likeliest counts as equally likely
SUM = 1e-3  # tolerance by which a sum of probabilities may exceed 1
DRIFT = 0.05  # tolerated mean difference per token between generating a text and scoring it as a prompt
FAR = 0.5  # tolerated difference of one token's log-probability, generated in a text and requested alone
MOST_SCORED = 4  # texts that are scored as prompts
MOST_TIES = 8
MOST_BIASED = 4  # ties that are also requested with a logit bias that makes both tokens equally likely
NEAR = 0.1  # largest difference in log-probability that counts as a near tie
AFTER = 8  # tokens to generate from the tie on
UNREADABLE = ("\ufffd", "bytes:", "<0x")  # marks of tokens that hold parts of characters, whose text is not exact


def wanted(chat: bool) -> dict[str, Any]:
    """The request fields that ask for log-probabilities."""
    return {"logprobs": True, "top_logprobs": NUM_TOP} if chat else {"logprobs": NUM_TOP}


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
    """Check that the tokens' texts join to the answer's; stop tokens, outer space, half characters do not count."""
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
    """Check tokens without alternatives (llama-server reports 0 for drafted ones): asked alone, their values agree."""
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


class NearTie(NamedTuple):
    """A small log-probability gap between the two likeliest tokens, after `at` tokens of the answer to one prompt."""

    gap: float
    prompt: int
    at: int


def near_ties(inquiry: Inquiry) -> list[NearTie]:
    """The nearest ties of all answers, nearest first. For chat: at most one per answer."""
    found = []
    for i, answer in enumerate(inquiry.scored):
        for at, token in enumerate(answer.scored):
            best, *others = sorted((v for _, v in token.top), reverse=True) or [0.0]
            found += [NearTie(best - others[0], i, at)] if others else []
    found.sort()
    if inquiry.chat:
        found = sorted({tie.prompt: tie for tie in reversed(found)}.values())
    return found[:MOST_TIES]


def at_tie(inquiry: Inquiry, tie: NearTie) -> ServerQuestion:
    """A question whose first token is at the near tie. For chat: the whole prompt, whose answer passes the near tie."""
    if inquiry.chat:
        return inquiry.question(tie.prompt)
    answer = inquiry.scored[tie.prompt]
    if answer.prompt_token_ids and answer.token_ids:
        return ServerQuestion({"prompt": [*answer.prompt_token_ids, *answer.token_ids[: tie.at]]}, AFTER)
    written = "".join(token.token for token in answer.scored[: tie.at])
    return ServerQuestion({"prompt": inquiry.prompts[tie.prompt].said + written}, AFTER)


async def sharpened(inquiry: Inquiry, question: ServerQuestion) -> ServerQuestion | None:
    """The question with a logit bias that makes its two likeliest first tokens nearly equal; None without token ids."""
    if inquiry.chat or not inquiry.asker.extras:
        return None
    asked = {**wanted(chat=False), "return_tokens_as_token_ids": True}
    answer = await inquiry.asker.ask(replace(question, max_tokens=1, stream=False, fields=asked))
    if answer.error is not None or not answer.scored or len(answer.scored[0].top) < 2:
        return None
    (_, best), (name, second) = sorted(answer.scored[0].top, key=lambda t: -t[1])[:2]
    prefix, _, token = name.partition(":")
    if prefix != "token_id" or not token.isdigit():
        return None
    return replace(question, fields={"logit_bias": {token: best - second}})


async def ties(inquiry: Inquiry, evidence: Evidence) -> None:
    """Where two tokens are nearly as likely, the same one is chosen, alone and under load."""
    if not inquiry.scored:
        evidence.missing = "without log-probabilities no near tie can be found"
        return
    found = near_ties(inquiry)
    asked = [(f"gap {tie.gap:.2g}", tie, at_tie(inquiry, tie)) for tie in found]
    for _, tie, question in asked[:MOST_BIASED]:
        if (biased := await sharpened(inquiry, question)) is not None:
            asked.append(("made equal by a bias", tie, biased))
    wheres = [f"{inquiry.prompts[tie.prompt].id}, token {tie.at}, {how}" for how, tie, _ in asked]
    questions = [question for *_, question in asked]
    alone = [await inquiry.asker.ask(q) for q in questions]
    for where, question, first in zip(wheres, questions, alone, strict=True):
        evidence.compare(f"{where}, again", first, await inquiry.asker.ask(question))
    together = await inquiry.asker.ask_together(questions, inquiry.args.concurrency) if questions else []
    for where, first, answer in zip(wheres, alone, together, strict=False):
        evidence.compare(f"{where}, under load", first, answer)
    near = sum(tie.gap <= NEAR for tie in found)
    numbers = {"near_ties": near, "made_equal": len(asked) - len(found)}
    evidence.numbers |= numbers | ({"nearest_gap": found[0].gap} if found else {})
    if sum(numbers.values()) < LEAST_TEXTS:
        short = f"{near} places have two tokens within {NEAR:g}, at least {LEAST_TEXTS} are needed"
        evidence.missing = f"{short}; give more --requests or --max-tokens"

"""The promise about near ties: where two tokens are nearly equally likely, a tiny change of arithmetic shows.

Docstrings of promises are their statements in reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sameseed_verify.ask import ServerQuestion
from sameseed_verify.inquiry import LEAST_TEXTS, Evidence, Inquiry, promise
from sameseed_verify.numbers import wanted

MOST_TIES = 8
MOST_BIASED = 4  # ties that are also requested with a logit bias that makes both tokens equally likely
NEAR = 0.1  # largest difference in log-probability that counts as a near tie
AFTER = 8  # tokens to generate from the tie on


@dataclass(frozen=True)
class NearTie:
    """A small log-probability gap between the two likeliest tokens, after `at` tokens of the answer to one prompt."""

    gap: float
    index: int
    at: int


def near_ties(inquiry: Inquiry) -> list[NearTie]:
    """The nearest ties of all answers, nearest first. For chat: at most one per answer."""
    found = []
    for i, answer in enumerate(inquiry.scored):
        for at, token in enumerate(answer.scored):
            values = sorted((v for _, v in token.top), reverse=True)
            if len(values) > 1:
                found.append(NearTie(values[0] - values[1], i, at))
    found.sort(key=lambda tie: tie.gap)
    if inquiry.chat:
        firsts = {tie.index: tie for tie in reversed(found)}
        found = sorted(firsts.values(), key=lambda tie: tie.gap)
    return found[:MOST_TIES]


def at_tie(inquiry: Inquiry, tie: NearTie) -> ServerQuestion:
    """A question whose first token is at the near tie. For chat: the whole prompt, whose answer passes the near tie."""
    if inquiry.chat:
        return inquiry.question(tie.index)
    answer = inquiry.scored[tie.index]
    if answer.prompt_token_ids and answer.token_ids:
        return ServerQuestion({"prompt": [*answer.prompt_token_ids, *answer.token_ids[: tie.at]]}, AFTER)
    written = "".join(token.token for token in answer.scored[: tie.at])
    return ServerQuestion({"prompt": inquiry.prompts[tie.index].said + written}, AFTER)


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


@promise("ties", "near ties")
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
    wheres = [f"{inquiry.prompts[tie.index].id}, token {tie.at}, {how}" for how, tie, _ in asked]
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
        evidence.missing = (
            f"{near} places have two tokens within {NEAR:g} of each other, at least {LEAST_TEXTS} are needed; "
            "give more --requests or --max-tokens"
        )

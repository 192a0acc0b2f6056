"""The promise at near ties: where two tokens are nearly as likely, the smallest change of arithmetic shows."""

from __future__ import annotations

from dataclasses import dataclass

from sameseed.study.load import prompts
from sameseed.study.promises.ask import Question
from sameseed.study.promises.evidence import LEAST_TEXTS, Evidence, promise
from sameseed.study.promises.inquiry import Inquiry

MOST_TIES = 8
NEAR = 0.1  # of log-probability, between the likeliest and the next
AFTER = 8  # tokens written from a tie on


@dataclass(frozen=True)
class NearTie:
    """Where the gap between the two likeliest tokens is small: after `at` tokens of the answer to a prompt."""

    gap: float
    index: int
    at: int


def near_ties(inquiry: Inquiry) -> list[NearTie]:
    """The nearest ties of all answers, nearest first; in a conversation, one an answer."""
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


def at_tie(inquiry: Inquiry, tie: NearTie) -> Question:
    """A question whose first token is a near tie; in a conversation, one whose answer comes to it."""
    if inquiry.chat:
        return inquiry.question(tie.index)
    answer = inquiry.scored[tie.index]
    if answer.prompt_token_ids and answer.token_ids:
        return Question({"prompt": [*answer.prompt_token_ids, *answer.token_ids[: tie.at]]}, AFTER)
    written = "".join(token.token for token in answer.scored[: tie.at])
    return Question({"prompt": prompts.plain(inquiry.prompts[tie.index]) + written}, AFTER)


@promise("ties", "near ties")
async def ties(inquiry: Inquiry, evidence: Evidence) -> None:
    """Where two tokens are nearly as likely, the same one is chosen, alone and under load."""
    if not inquiry.scored:
        evidence.missing = "without log-probabilities no near tie can be found"
        return
    found = near_ties(inquiry)
    questions = [at_tie(inquiry, tie) for tie in found]
    alone = [await inquiry.asker.ask(q) for q in questions]
    wheres = [f"{inquiry.prompts[tie.index].id}, token {tie.at}, gap {tie.gap:.2g}" for tie in found]
    for where, question, first in zip(wheres, questions, alone, strict=True):
        evidence.compare(f"{where}, again", first, await inquiry.asker.ask(question))
    together = await inquiry.asker.ask_together(questions, max(2, inquiry.concurrency)) if questions else []
    for where, first, answer in zip(wheres, alone, together, strict=False):
        evidence.compare(f"{where}, under load", first, answer)
    near = [tie.gap for tie in found if tie.gap <= NEAR]
    evidence.numbers |= {"near_ties": len(near)} | ({"nearest_gap": found[0].gap} if found else {})
    if len(near) < LEAST_TEXTS:
        evidence.missing = (
            f"{len(near)} places have two tokens within {NEAR:g} of each other, at least {LEAST_TEXTS} are needed; "
            "give more --requests or --max-tokens"
        )

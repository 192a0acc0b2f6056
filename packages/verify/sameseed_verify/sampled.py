"""Promises about seeded sampling, and about speculation switched off and on per request.

Docstrings of promises are their statements in reports.
"""

from __future__ import annotations

from typing import Any

from sameseed_verify.evidence import Evidence
from sameseed_verify.inquiry import Inquiry, promise
from sameseed_verify.reading import ServedText

MOST_SEEDED = 6  # most prompts asked with seeds
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
LEAST_DRAFTED = 32  # least draft tokens, some accepted and some rejected, for the promise to be shown
# Request fields that switch speculation off and on. They count only if the answers confirm it.
SWITCHES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"speculation": "off"}, {"speculation": "fixed"}),  # sameseed
    ({"speculative.n_max": 0}, {}),  # llama-server, the versions that read it
)


@promise("seeds", "seeds")
async def seeds(inquiry: Inquiry, evidence: Evidence) -> None:
    """A sampled text with its seed comes again, alone and under load."""
    lengths = [answer.num_tokens for answer in inquiry.alone]  # prefer long answers: an empty one shows nothing
    indices = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:MOST_SEEDED]
    ask = inquiry.asker.ask
    same = [inquiry.question(i, fields={**SAMPLING, "seed": inquiry.seed + i}) for i in indices]
    others = [inquiry.question(i, fields={**SAMPLING, "seed": inquiry.seed + 1000 + i}) for i in indices]
    firsts: list[ServedText] = []
    alone = varied = 0
    for i, mine, another in zip(indices, same, others, strict=True):
        first = await ask(mine)
        firsts.append(first)
        if firsts[0].refused:
            evidence.missing = f"the server refuses seeds ({firsts[0].detail})"
            return
        second, other = await ask(mine), await ask(another)
        alone += evidence.compare(f"{inquiry.prompts[i].id}, seed {inquiry.seed + i}, again", first, second)
        varied += other.error is None and other.text != first.text
    together = await inquiry.asker.ask_together(same, inquiry.concurrency)
    for i, first, answer in zip(indices, firsts, together, strict=False):
        where = f"{inquiry.prompts[i].id}, seed {inquiry.seed + i}, {inquiry.concurrency} at once"
        evidence.compare(where, first, answer)
    evidence.numbers["other_seeds_with_another_text"] = varied
    if not varied:
        evidence.missing = "no other seed gave another text: the server may sample nothing, or read no seed"
    elif not alone and evidence.compared:
        evidence.notes.append("the same seed never gave the same text: the server seems not to read it")


@promise("speculation", "speculation")
async def speculation(inquiry: Inquiry, evidence: Evidence) -> None:
    """A greedy text is the same with speculation off and on."""
    if not inquiry.asker.extras:
        evidence.missing = "the server refuses fields beyond OpenAI's, so no request can switch speculation"
        return
    for off, on in SWITCHES:
        without = await inquiry.asker.ask(inquiry.question(0, fields=off))
        drafting = await inquiry.asker.ask(inquiry.question(0, fields=on))
        if without.error is drafting.error is None and without.num_drafted == 0 and drafting.num_drafted is not None:
            break
    else:
        evidence.missing = (
            "no request could switch speculation: the server has no such field, or does not tell of drafts"
        )
        return
    drafted = accepted = 0
    for i in range(len(inquiry.prompts)):
        if i:
            without = await inquiry.asker.ask(inquiry.question(i, fields=off))
            drafting = await inquiry.asker.ask(inquiry.question(i, fields=on))
        evidence.compare(f"{inquiry.prompts[i].id}, speculation on", without, drafting)
        inquiry.heard += [(i, answer) for answer in (without, drafting) if answer.error is None]
        drafted, accepted = drafted + (drafting.num_drafted or 0), accepted + drafting.num_accepted
        if without.num_drafted:
            evidence.count("drafted_though_off", without.num_drafted)
    evidence.numbers |= {"draft_tokens": drafted, "accepted": accepted, "rejected": drafted - accepted}
    if not drafted:
        evidence.missing = "nothing was drafted: start the server with a draft"
    elif drafted < LEAST_DRAFTED or not 0 < accepted < drafted:
        evidence.missing = (
            f"{drafted} tokens were drafted, {accepted} of them accepted: at least {LEAST_DRAFTED} are needed, with "
            "some accepted and some rejected; give more --requests or --max-tokens"
        )
